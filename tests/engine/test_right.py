"""Right: what engine B loads instead of computing gives the tokens it would have computed.

Every case asserts that something *was* loaded, and how much; one breaks the loaded bytes on purpose
and wants to see other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from kvass import Client
from kvass.testing.daemon import Daemon
from tests.engine.conftest import ARGS, BLOCK, CHUNK, arena_of, store
from tests.support.vllm.judge import Judge
from tests.support.vllm.process import EngineProcess, Prompt, Settings

pytestmark = pytest.mark.engine

Make = Callable[[int], list[int]]


def around(*edges: int) -> list[int]:
    return [edge + by for edge in edges for by in (-1, 0, 1)]


SIZES: Final = [1000, *around(BLOCK, CHUNK, 2 * CHUNK)]
MORE: Final = [
    pytest.param(size, marks=pytest.mark.slow) for size in around(CHUNK + BLOCK, 3 * CHUNK)
]


def hit(tokens: int) -> int:
    """What vLLM's own cache hits of a prompt that it has all of."""
    return (tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("size", [*SIZES, *MORE])
def test_cold_and_warm_in_a_second_process(
    a: EngineProcess, b: EngineProcess, judge: Judge, prompt: Make, size: int
) -> None:
    tokens = prompt(size)
    cold = store(a, tokens, 4)
    assert cold.cached == 0
    judge.check(tokens, cold)
    warm = b.one(tokens, 4)
    assert (warm.local, warm.external) == (0, hit(size))
    judge.check(tokens, warm)


def test_shared_prefix(a: EngineProcess, b: EngineProcess, judge: Judge, prompt: Make) -> None:
    first = prompt(900)
    second = first[:600] + prompt(300)
    store(a, first)
    warm = b.one(second)
    assert warm.external == hit(601)
    judge.check(second, warm)


def test_a_local_hit_that_ends_inside_a_chunk_is_kept(
    a: EngineProcess, b: EngineProcess, judge: Judge, prompt: Make
) -> None:
    tokens = prompt(1000)
    b.one(tokens[:300], 1)
    store(a, tokens)
    warm = b.one(tokens)
    assert (warm.local, warm.external) == (288, hit(1000) - 288)
    judge.check(tokens, warm, alike=False)


def test_generated_tokens_are_reused_in_the_next_turn(
    a: EngineProcess, b: EngineProcess, judge: Judge, prompt: Make
) -> None:
    question = prompt(300)
    (answer,) = a.store(Prompt(question, 300))
    turn = question + answer.tokens + prompt(50)
    warm = b.one(turn)
    judge.check(turn, warm, alike=False)
    assert warm.external == hit(600) > len(question)


def test_two_engines_at_once(
    a: EngineProcess, b: EngineProcess, judge: Judge, prompt: Make
) -> None:
    same, one, other = prompt(600), prompt(700), prompt(500)
    a.submit(Prompt(same), Prompt(one))
    b.submit(Prompt(same), Prompt(other))
    for tokens, answer in zip((same, one, same, other), a.answers() + b.answers(), strict=True):
        judge.check(tokens, answer, alike=False)
    for tokens in (same, one, other):
        store(a, tokens)
    assert b.reset()
    a.submit(Prompt(other), Prompt(same))
    b.submit(Prompt(one), Prompt(same))
    warm = a.answers() + b.answers()
    assert [answer.external for answer in warm] == [hit(500), hit(600), hit(700), hit(600)]
    for tokens, answer in zip((other, same, one, same), warm, strict=True):
        judge.check(tokens, answer, alike=False)


def test_chunked_prefill(a: EngineProcess, b: EngineProcess, judge: Judge, prompt: Make) -> None:
    tokens = prompt(2500)
    judge.check(tokens, store(a, tokens, 8))
    longer = tokens + prompt(1200)
    warm = store(b, longer, 8)
    assert warm.external == hit(2501)
    judge.check(longer, warm, stored=2500)


def test_a_request_that_reads_no_cache_still_stores(
    a: EngineProcess, b: EngineProcess, judge: Judge, prompt: Make
) -> None:
    tokens = prompt(600)
    store(a, tokens)
    unread = b.one(tokens, skip_prefix_cache=True)
    assert unread.cached == 0
    judge.check(tokens, unread)
    other = prompt(600)
    (unread,) = a.store(Prompt(other, skip_prefix_cache=True))
    assert unread.cached == 0
    assert b.one(other).external == hit(600)


def test_a_salt_never_hits_anothers(
    a: EngineProcess, b: EngineProcess, judge: Judge, prompt: Make
) -> None:
    tokens = prompt(600)
    store(a, tokens, salt="mine")
    for salt in ("yours", None):
        assert b.one(tokens, salt=salt).cached == 0
        assert b.reset()
        assert b.one(tokens, salt="mine").external == hit(600)
        assert b.reset()
    judge.check(tokens, b.one(tokens, salt="mine"))


def test_reset_cache_forgets_for_everybody(
    a: EngineProcess, b: EngineProcess, judge: Judge, prompt: Make
) -> None:
    tokens = prompt(600)
    store(a, tokens)
    assert a.reset(connector=True)
    cold = store(b, tokens, 8)
    assert cold.cached == 0
    judge.check(tokens, cold)


def test_an_engine_tells_the_size_of_its_own_cache(
    a: EngineProcess, b: EngineProcess, daemon: Daemon
) -> None:
    size = ARGS["num_gpu_blocks_override"] * sum(run for run, _ in a.groups()[0].pages)
    told = [engine["cache_bytes"] for engine in daemon.status()["engines"]]
    assert told.count(size) >= 2


def zero_arena(daemon: Daemon) -> None:
    """Overwrite every byte of the arena."""
    with arena_of(daemon) as arena:
        arena[:] = 0


def test_zeroed_kv_changes_the_tokens(
    a: EngineProcess, b: EngineProcess, judge: Judge, daemon: Daemon, prompt: Make
) -> None:
    """The negative control: the loaded bytes decide, so the cases above prove something."""
    tokens = prompt(600)
    store(a, tokens)
    zero_arena(daemon)
    wrong = b.one(tokens)
    assert wrong.external == hit(600)
    judge.check_wrong(tokens, wrong)
    with Client(daemon.socket) as client:
        client.clear(everything=True)
    assert b.reset()
    judge.check(tokens, b.one(tokens))


@pytest.mark.parametrize("stored", [100, 600], ids=["a tail", "a chunk"])
def test_a_row_that_is_used_in_part_decides_the_tokens(
    a: EngineProcess, b: EngineProcess, judge: Judge, daemon: Daemon, prompt: Make, stored: int
) -> None:
    """All that the second engine loads are the first blocks of one row. They are zeroed."""
    first = prompt(stored)
    second, third = (first[:100] + prompt(100) for _ in range(2))
    store(a, first)
    warm = b.one(second)
    assert warm.external == 96
    judge.check(second, warm, stored=stored)
    zero_arena(daemon)
    assert b.reset()
    wrong = b.one(third)
    assert wrong.external == 96
    judge.check_wrong(third, wrong, stored)
    with Client(daemon.socket) as client:
        client.clear(everything=True)
    assert b.reset()


@pytest.mark.parametrize("how", ["unordered", "hasty"])
def test_copies_that_do_not_wait_change_the_tokens(
    a: EngineProcess, b: EngineProcess, judge: Judge, prompt: Make, how: str
) -> None:
    """The negative control of the fake GPU: what its copies wait for decides."""
    tokens = prompt(600)
    store(a, tokens)
    b.disturb(Settings(broken_gpu=how))
    wrong = b.one(tokens)
    b.disturb(Settings())
    assert wrong.external == hit(600)
    judge.check_wrong(tokens, wrong)
    assert b.reset()
    judge.check(tokens, b.one(tokens))


def test_what_a_busy_machine_does_not_store_is_not_taken_for_stored(
    a: EngineProcess, b: EngineProcess, prompt: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of ``EngineProcess.store``, with copies that are all late."""
    tokens = prompt(600)
    a.disturb(Settings(ahead_s=1e6))
    monkeypatch.setattr("tests.support.vllm.process.STORE_TRIES", 1)
    with pytest.raises(AssertionError, match="not stored"):
        a.store(Prompt(tokens))
    assert a.reset()
    assert b.one(tokens).cached == 0
    a.disturb(Settings())
    a.store(Prompt(tokens))
    assert b.reset()
    assert b.one(tokens).external == hit(600)


def test_nothing_is_owed_afterwards(a: EngineProcess, b: EngineProcess, daemon: Daemon) -> None:
    assert a.reset()
    assert b.reset()
    daemon.wait_until(leases=0, reservations=0, pins=0, quarantined_bytes=0, rows_loading=0)
