"""Hits that end at a block, with vLLM's real scheduler, real copies, and a real daemon.

The judge is vLLM: a hit of ``b``, which has nothing itself, must be as long as the hit in the own
cache of ``a``, which computed everything.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvass.testing.daemon import Daemon, running_daemon
from tests.support.vllm.ranks import StubModelEngine, until
from tests.support.vllm.scheduler import BLOCK

CHUNK = 256
NAMES = itertools.count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("daemon"), l1_size="256MiB") as one:
        yield one


def engine(daemon: Daemon, **options: Any) -> StubModelEngine:
    sizes = {"length": 4096, "blocks": 700, "batched": 1024}
    made = StubModelEngine(daemon.socket, daemon, **sizes, **options)
    made.wait_connected()
    return made


@pytest.fixture(scope="module")
def pair(daemon: Daemon) -> Iterator[tuple[StubModelEngine, StubModelEngine]]:
    """``a`` stores, ``b`` only loads."""
    both = [engine(daemon, chunk=CHUNK), engine(daemon, chunk=CHUNK, kv_role="kv_consumer")]
    yield both[0], both[1]
    for one in both:
        one.close()


def idle(one: StubModelEngine) -> None:
    until(lambda: one.step() and not one.world.scheduler.has_requests(), "the stores")
    assert one.daemon is not None
    one.daemon.wait_until(reservations=0, leases=0)


def forget(one: StubModelEngine) -> None:
    """Empty vLLM's own cache."""
    until(lambda: one.step() and one.world.scheduler.reset_prefix_cache(), "the reset")


def run(one: StubModelEngine, tokens: list[int], **request: Any) -> tuple[int, list[int]]:
    """How many tokens of a prompt the engine did not compute, and the tokens after its end."""
    name, computed, checked = str(next(NAMES)), 0, False
    asked = one.world.add(name, tokens, **{"max_tokens": 1, **request})
    while not asked.is_finished():
        output, work = one.world.schedule()
        mine = output.num_scheduled_tokens.get(name, 0)
        if mine and not checked:
            checked, had = True, asked.num_computed_tokens - mine
            one.check(asked, had // BLOCK * BLOCK)
        if asked.num_output_tokens == 0:
            computed += mine
        for each, count in output.num_scheduled_tokens.items():
            one.compute(each, count)
        one.world.finish(output, **one.ranks.run(work, bool(output.num_scheduled_tokens)))
    idle(one)
    return len(tokens) - computed, list(asked.all_token_ids)


def lengths(rng: random.Random, most: int) -> int:
    """Of any size up to ``most``, often at or next to a block's or a chunk's end."""
    unit = rng.choice([1, 1, BLOCK, CHUNK])
    around = rng.randint(0, most // unit) * unit + rng.choice([-1, 0, 0, 1]) * (unit > 1)
    return min(max(around, 0), most)


@pytest.mark.parametrize("part", range(4))
def test_a_hit_is_as_long_as_that_of_vllms_own_cache(
    pair: tuple[StubModelEngine, StubModelEngine], tmp_path: Path, part: int
) -> None:
    """200 pairs of prompts, 20 to 3,000 tokens long, in four parts."""
    a, b = pair
    rng = random.Random(part)
    adapter = tmp_path / f"adapter {part}"
    longer = 0
    for number in range(50):
        forget(a)
        first = [rng.randrange(1000) for _ in range(max(20, lengths(rng, 1500)))]
        kind = rng.choice(["plain", "plain", "salt", "other salt", "turns"])
        one: dict[str, Any] = {"salt": "x"} if "salt" in kind else {}
        two = {"salt": "y"} if kind == "other salt" else one
        generates = rng.choice([1, 2, BLOCK, 40]) if kind == "turns" else 1
        _, said = run(a, first, max_tokens=generates, **one)
        shared = said if kind == "turns" else first[: lengths(rng, len(first))]
        rest = [rng.randrange(1000) for _ in range(max(20, lengths(rng, 1500)))]
        second = (shared + rest)[: max(20, lengths(rng, 3000))]
        forget(b)
        loaded, _ = run(b, second, **two)
        local, _ = run(a, second, **two)
        assert loaded == local, f"pair {number} of part {part}: {kind}, {len(second)} tokens"
        longer += loaded % CHUNK > 0
    assert longer > 10
    assert adapter
