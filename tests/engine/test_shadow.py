"""Shadow mode in real engines: what it says kvass would hit is what an engine without it hits, on
the same trace. It loads nothing into the engine. What it compares is equal, but for the order of
additions. One flipped byte in L1 is reported with its row.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvass.client.client import Client
from kvass.client.health import troubles
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.conftest import ARGS, ROOT, arena_of, empty
from tests.engine.hybrid import GPT_OSS, QWEN3_NEXT
from tests.support.vllm.models import TINY, TINY_LATENT, Sizes, build
from tests.support.vllm.process import EngineProcess, Prompt

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Family:
    """A family of models. ``kinds``: of its layer groups. ``branches``: whether a prompt's KV does
    not depend on how many tokens follow. Of MLA on a CPU it does, also without kvass: vLLM computes
    other KV for some tokens in a step of another size."""

    name: str
    shape: Sizes
    kinds: tuple[str, ...]
    args: dict[str, Any]
    branches: bool = True


FAMILIES = [
    Family("dense", TINY, ("full",), {}),
    Family("mla", TINY_LATENT, ("full",), {}, branches=False),
    Family("windows", GPT_OSS.blueprint, ("sliding_window", "full"), GPT_OSS.args),
    Family("states", QWEN3_NEXT.blueprint, ("state", "full"), QWEN3_NEXT.args),
]


def trace(family: Family) -> list[list[int]]:
    """Prompts of which some begin alike, and some are repeated."""
    rng = random.Random(family.name)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(4, 1000) for _ in range(count)]

    first, second = tokens(1000), tokens(1400)
    if not family.branches:
        return [first, second, first, second]
    return [first, second, first, second[:800] + tokens(300), second, first + tokens(500)]


@contextmanager
def engine(family: Family, folder: Path, **options: Any) -> Iterator[tuple[EngineProcess, Daemon]]:
    """An engine with a daemon of its own."""
    if EngineProcess.all_on_gpu:  # its comparisons: test_gpu_wiring.py
        pytest.skip("the connector with a fake GPU has no shadow mode")
    folder.mkdir()
    path = build(ROOT / ".cache" / "models", family.shape)
    with running_daemon(folder, l1_size="256MiB", lookup_budget_ms=10_000) as daemon:
        one = EngineProcess(
            path,
            folder / "engine.log",
            socket=Path(daemon.socket),
            args=ARGS | family.args,
            options=options,
            patient=True,
        )
        try:
            yield one.wait_ready(), daemon
        finally:
            one.kill()


def run(one: EngineProcess, prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
    """Each prompt without vLLM's own cache: what was loaded, and the generated tokens."""
    found = []
    for tokens in prompts:
        assert one.reset()
        (answer,) = one.store(Prompt(tokens, 4))
        assert answer.local == 0
        found.append((answer.external, answer.tokens))
    return found


def shadow_of(daemon: Daemon, lookups: int) -> dict[str, Any]:
    """What the daemon knows of the engine's shadow mode after so many lookups."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        (row,) = daemon.status()["engines"]
        found: dict[str, Any] | None = row["shadow"]
        if found is not None and found["lookups"] >= lookups:
            return found
        time.sleep(0.02)
    raise AssertionError(f"no report of {lookups} lookups: {row}")


def is_noise(group: dict[str, Any]) -> bool:
    """Whether loaded and computed values differ by the order of additions at most, which depends on
    the sizes of steps. All four models compute in float32 or bfloat16; wrong rows differ by more
    than the values themselves."""
    return bool(group["largest_difference"] <= 0.05 * (group["at_value"] + 0.1))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=pytest.mark.slow if one.name != "windows" else ())
        for one in FAMILIES
    ],
    ids=lambda family: family.name,
)
def test_would_be_hits_are_the_hits_of_the_same_trace(family: Family, tmp_path: Path) -> None:
    prompts = trace(family)
    with engine(family, tmp_path / "real") as (real, _):
        expected = run(real, prompts)
    with engine(family, tmp_path / "shadow", **{"kvass.shadow": True}) as (one, daemon):
        got = run(one, prompts)
        shadow = shadow_of(daemon, len(prompts))
        status = empty(daemon)
    assert [external for external, _ in got] == [0] * len(prompts)
    hits = [external for external, _ in expected]
    assert sum(hits) > 0
    assert shadow["hit_tokens"] == sum(hits)
    assert shadow["loads"] == sum(hit > 0 for hit in hits)
    assert shadow["not_compared"] == 0
    assert shadow["saved_s"] > 0
    assert shadow["wrong_rows"] == 0
    assert [group["kind"] for group in shadow["groups"]] == list(family.kinds)
    assert all(group["rows"] > 0 and not group["not_compared"] for group in shadow["groups"])
    assert all(is_noise(group) for group in shadow["groups"]), shadow["groups"]
    assert status["namespaces"][0]["lookup_tokens"] == 0


def flip_a_byte(daemon: Daemon) -> None:
    """Flip bits of one byte in the first row that was stored: the byte of a float32's exponent."""
    with arena_of(daemon) as arena:
        at = int(arena.view("<u4").nonzero()[0][1000])
        arena[4 * at + 3] ^= 0x44


def test_one_flipped_byte_is_reported_with_its_row(tmp_path: Path) -> None:
    """The negative control. The engine's tokens stay right: it does not use the row."""
    family = FAMILIES[0]
    (tokens, *_) = trace(family)
    with engine(family, tmp_path / "one", **{"kvass.shadow": True}) as (one, daemon):
        (cold, again) = run(one, [tokens, tokens])
        before = shadow_of(daemon, 2)
        assert is_noise(before["groups"][0])
        flip_a_byte(daemon)
        (wrong,) = run(one, [tokens])
        assert cold[1] == again[1] == wrong[1]
        deadline_s = time.monotonic() + 30
        while (found := shadow_of(daemon, 3))["loads"] < 2 and time.monotonic() < deadline_s:
            time.sleep(0.02)
        (group,) = found["groups"]
        assert not is_noise(group)
        assert group["differing_rows"] == before["groups"][0]["differing_rows"] + 1
        assert group["wrong_rows"] == 1
        (line,) = troubles(daemon.status())
        assert "1 wrong row of " in line
        one.kill()
        status = daemon.wait_until(instances=0)
        (namespace,) = status["namespaces"]
        assert namespace["shadow"] == {**found, "groups": [group]}
        assert troubles(status) == [line], "it stays when the engine has ended"
        with Client(daemon.socket) as client:
            assert client.explain()[-1]["shadow"]
    log = (tmp_path / "one" / "engine.log").read_text()
    row = r"WARNING.* namespace (\w+), group (\d+) \(full\), chunk (\d+) of request .*"
    assert re.findall(row + r": see docs/wrong-tokens\.md", log) == [
        (namespace["namespace"], "0", "0")
    ]
