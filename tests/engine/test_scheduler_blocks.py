"""Hits that end at a block, with vLLM's real scheduler, real copies, and a real daemon.

The judge is vLLM: a hit of ``b``, which has nothing itself, must be as long as the hit in the own
cache of ``a``, which computed everything.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvass.engine import adapter_files, adapters
from kvass.engine.hit_limits import HitLimits
from kvass.engine.offers import OfferMaker
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.test_scheduler_lora import train
from tests.support.vllm.pairs import CHUNK, draw
from tests.support.vllm.ranks import StubModelEngine, until

NAMES = itertools.count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("daemon"), l1_size="256MiB") as one:
        yield one


def engine(daemon: Daemon, **options: Any) -> StubModelEngine:
    options |= {"length": 4096, "blocks": 700, "batched": 1024, "lora": True}
    made = StubModelEngine(daemon.socket, daemon, **options)
    made.wait_connected()
    return made


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a look at files may take long, and a file may be very young."""
    monkeypatch.setattr(adapters, "WAIT_S", 60.0)
    monkeypatch.setattr(adapters, "PATIENCE_S", 60.0)
    monkeypatch.setattr(adapter_files, "STABLE_NS", 0)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("adapters") / "one", b"weights")


@pytest.fixture(scope="module")
def pair(daemon: Daemon, adapter: Path) -> Iterator[tuple[StubModelEngine, StubModelEngine]]:
    """``a`` stores, ``b`` only loads. Both have loaded the adapter."""
    both = [engine(daemon, chunk=CHUNK), engine(daemon, chunk=CHUNK, kv_role="kv_consumer")]
    for one in both:
        run(one, [5] * 20, lora=adapter)
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
            one.verify(asked, had)
        if asked.num_output_tokens == 0:
            computed += mine
        for each, count in output.num_scheduled_tokens.items():
            one.compute(each, count)
        one.run_ranks(output, work)
    idle(one)
    return len(tokens) - computed, list(asked.all_token_ids)


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_a_hit_is_as_long_as_that_of_vllms_own_cache(
    pair: tuple[StubModelEngine, StubModelEngine], adapter: Path, part: int
) -> None:
    """200 pairs of prompts, 20 to 3,000 tokens long, in four parts."""
    a, b = pair
    inside = Counter[str]()
    for one in draw(part, 50, adapter):
        forget(a)
        _, said = run(a, one.first, max_tokens=one.generates, **one.fields[0])
        second = one.second(said[len(one.first) :])
        forget(b)
        loaded, _ = run(b, second, **one.fields[1])
        local, _ = run(a, second, **one.fields[1])
        assert loaded == local, f"part {part}: {one.kind}, {len(second)} tokens"
        inside[one.kind] += loaded % CHUNK > 0
    assert all(inside[kind] for kind in ("plain", "lora", "salt", "turns")), inside
    assert not inside["other salt"]


@pytest.mark.parametrize("without", ["blocks", "tails"])
def test_the_comparison_sees_what_is_missing(
    pair: tuple[StubModelEngine, StubModelEngine], monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """The negative control: the same pair with and without."""
    a, b = pair

    def hits(token: int) -> tuple[int, int]:
        first = [token + 10 * (without == "tails")] * 300
        forget(a)
        run(a, first)
        forget(b)
        return run(b, first + [1] * 30)[0], run(a, first + [1] * 30)[0]

    assert hits(7) == (288, 288)
    if without == "blocks":
        monkeypatch.setattr(HitLimits, "inside_chunks", False)
    else:
        monkeypatch.setattr(OfferMaker, "tail", lambda *_: 0)
    assert hits(8) == (CHUNK, 288)


def test_a_tail_that_was_loaded_is_not_offered_again(
    pair: tuple[StubModelEngine, StubModelEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, sent = pair[0], list[Any]()
    run(a, [40] * 300)
    client = a.world.planner.client
    begin = client.begin_reserve

    def counting(items: Any, *args: Any, **kwargs: Any) -> Any:
        sent.extend(items)
        return begin(items, *args, **kwargs)

    monkeypatch.setattr(client, "begin_reserve", counting)
    for rest, offers in ((3, 0), (40, 1)):
        forget(a)
        assert run(a, [40] * 300 + [1] * rest)[0] == 288
        assert len(sent) == offers, "a longer one is"


def test_what_was_computed_before_its_adapter_had_a_name_is_stored(
    pair: tuple[StubModelEngine, StubModelEngine], tmp_path: Path
) -> None:
    """Ranks say what they hold after the step that loads it. A request may have ended by then."""
    a, b = pair
    new = {"lora": train(tmp_path / "new", b"1234"), "lora_id": 2}
    forget(a)
    run(a, [30] * 300, **new)
    _, said = run(a, [31] * 300, max_tokens=40, **new)
    forget(b)
    assert run(b, [30] * 300 + [1] * 30, **new)[0] == 0, "its first request computes"
    forget(b)
    assert run(b, [30] * 300 + [1] * 30, **new)[0] == 288
    assert run(b, said + [1] * 30, **new)[0] == 336
