"""How many tokens a request lets be loaded: vLLM's real scheduler, a real daemon, pages of known
content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvass.client.client import Client
from kvass.connectors.vllm.hints import MOST_LOADED, REPORT, SKIP_LOAD, VLLM_MOST_LOADED
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine import conftest
from tests.engine.conftest import empty
from tests.engine.test_scheduler_groups import DENSE, GPT_OSS, MIXED, finish, prompt
from tests.engine.test_scheduler_reports import reports
from tests.support.vllm.hybrid import GroupShape
from tests.support.vllm.ranks import StubModelEngine, making, until
from tests.support.vllm.scheduler import BLOCK, CHUNK

PROMPT = list(range(100))
STORED = 96

daemon = conftest.own_daemon


@pytest.fixture
def engine(daemon: Daemon, pages: Iterator[dict[str, Any]]) -> Iterator[Any]:
    def make(**options: Any) -> StubModelEngine:
        return StubModelEngine(daemon.socket, daemon, **{**next(pages), **options})

    with making(make) as engine:
        yield engine


def loaded(engine: StubModelEngine, name: str, tokens: list[int], most: int | None) -> int:
    """With how many tokens of kvass a request begins, in an engine that has none itself."""
    assert engine.world.scheduler.kv_cache_manager.reset_prefix_cache()
    params = {REPORT: True} | ({} if most is None else {MOST_LOADED: most})
    found = engine.load(name, tokens, params=params)[1]
    finish(engine)
    return int(found)


def explained(daemon: Daemon) -> list[dict[str, Any]]:
    with closing(Client(daemon.socket)) as operator:
        return operator.explain(limit=100)


def test_a_load_ends_at_a_block_and_its_end_is_told(daemon: Daemon, engine: Any) -> None:
    """A limit that leaves nothing makes no lookup. Others look up no more than is allowed, and what
    is left out is no miss."""
    a, b = engine(), engine()
    a.generate("a", PROMPT)
    told = reports(b.world)
    limits = [0, 15, 16, 31, 32, 47, 48, 95, 96, 1000]
    for most in limits:
        before = daemon.status()["counters"]["lookup_chunks"]
        assert loaded(b, f"most {most}", PROMPT, most) == min(most, STORED) // BLOCK * BLOCK
        asked = daemon.status()["counters"]["lookup_chunks"] - before
        assert asked == min(most, STORED) // CHUNK, "of whole chunks"
    assert [each["kvass"] for each in told] == [
        {
            "hit_tokens": min(most, STORED) // BLOCK * BLOCK,
            "kept_tokens": 0,
            "missed_because": "load_limit" if most < STORED else "",
        }
        for most in limits
    ]
    b.generate("the notes are sent by now", PROMPT[:9])
    entries = {each["request"]: each for each in explained(daemon)}
    for most in limits:
        entry = entries[f"most {most}"]
        assert entry["why"] == ("load_limit" if most < STORED else "")
        assert entry["hit_tokens"] == min(most, STORED) // BLOCK * BLOCK
    assert entries["most 48"]["text"] == "The request allows no more tokens to be loaded."
    lookups = [most for most in limits if most >= BLOCK]
    (ns,) = daemon.status()["namespaces"]
    asked = [min(most, STORED) // BLOCK * BLOCK for most in lookups]
    assert (ns["lookups"], ns["hit_tokens"]) == (len(lookups) + 1, sum(asked))
    assert ns["lookup_tokens"] == sum(asked) + STORED, "and a's own, which missed"
    empty(daemon)


def test_it_counts_after_the_engines_own_hit(engine: Any) -> None:
    a, b = engine(), engine(kv_role="kv_consumer")
    a.generate("a", PROMPT)
    b.generate("own", PROMPT[:49])
    told = reports(b.world)
    assert b.load("b", PROMPT, params={VLLM_MOST_LOADED: 32, REPORT: True})[1] == 48 + 32
    finish(b)
    assert told[-1]["kvass"]["hit_tokens"] == 32


def test_what_is_computed_is_stored_as_always(daemon: Daemon, engine: Any) -> None:
    a, b = engine(), engine()
    a.generate("a", PROMPT[:40])
    request = b.world.add("b", PROMPT, max_tokens=2, params={SKIP_LOAD: True})
    until(lambda: b.step() and request.is_finished(), "its end")
    assert b.found["b"] == 0
    finish(b)
    daemon.wait_until(reservations=0)
    assert loaded(a, "all of it", PROMPT, None) == STORED


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("shapes", [GPT_OSS, MIXED], ids=["gpt-oss", "mixed"])
def test_a_load_ends_where_a_hit_of_a_shorter_prompt_would(
    daemon: Daemon, engine: Any, shapes: list[GroupShape], drafts: int
) -> None:
    """Also with a drafter, which must find a chunk more than is loaded."""
    options = {"shapes": shapes, "blocks": 400, "batched": 128, "chunk": 64, "more": DENSE}
    options |= {"drafts": drafts, "drafter": "eagle"} if drafts else {}
    a, b = engine(**options), engine(**options, kv_role="kv_consumer")
    tokens = prompt(1, 400)
    a.generate("a", tokens)
    found = []
    for most in (0, 63, 64, 130, 320, 1000):
        upto = most // 64 * 64 + 64 * bool(drafts) + 1
        shorter = loaded(b, f"shorter {most}", tokens[:upto], None)
        assert loaded(b, f"most {most}", tokens, most) == shorter <= most
        found.append(shorter)
    assert len(set(found)) > 2
    assert found[:2] == [0, 0]
    assert not b.rank.connector._boundary.counters
    empty(daemon)


@pytest.mark.parametrize("shapes", [[], GPT_OSS], ids=["blocks", "windows"])
def test_a_match_that_became_too_long_is_asked_again(
    daemon: Daemon, engine: Any, shapes: list[GroupShape]
) -> None:
    """While the request waited, the engine's own cache lost blocks of it."""
    options = {"shapes": shapes, "blocks": 400, "chunk": 64, "more": DENSE}
    a, b = engine(**options), engine(**options)
    tokens = prompt(1, 300)
    a.generate("a", tokens)
    b.world.add("b", tokens, params={MOST_LOADED: 112})
    planner = b.world.connector._planner
    until(lambda: planner.match("b", 48) is not None, "the answer")
    assert planner.match("b", 48) == (112 if not shapes else 128 - 48)
    until(lambda: b.step() and "b" in b.found, "its first tokens")
    assert b.found["b"] == (112 if not shapes else 64)
    finish(b)
    empty(daemon)


@pytest.mark.slow
def test_a_tier_brings_no_more_than_is_allowed(
    tmp_path: Path, pages: Iterator[dict[str, Any]]
) -> None:
    (tmp_path / "tier").mkdir()
    tier = f"disk:{tmp_path / 'tier'}?capacity=64MiB"
    with running_daemon(tmp_path, tier=[tier], lookup_budget_ms=10_000) as daemon:
        a = StubModelEngine(daemon.socket, daemon, **next(pages))
        b = StubModelEngine(daemon.socket, daemon, kv_role="kv_consumer", **next(pages))
        with closing(a), closing(b):
            a.wait_connected()
            a.generate("a", PROMPT)
            assert daemon.stop() == 0
            daemon.start()
            b.wait_connected()
            found = []
            for most in (0, 31, 40, None):
                tokens = loaded(b, f"most {most}", PROMPT, most)
                found.append((tokens, daemon.status()["rows"]))
            assert found == [(0, 0), (0, 0), (32, 1), (96, 3)]
