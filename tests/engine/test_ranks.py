"""Real engines of several ranks: vLLM's own worker processes, each with its part of the cache.

What TP 2 in bfloat16 computes itself is the measure: run cold twice it repeats itself to the
last bit, and so does a local prefix hit; but cold and local hit differ, because other batch shapes
sum in another order: by up to 0.043 in a logprob, measured on this model. A hit that leaves the
same batch shapes as the cold run must repeat it; any other must repeat a local hit.

On a CPU vLLM's MLA contradicts itself on a re-prefill, so there the pages are compared, not tokens.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from kvass.testing.daemon import Daemon
from tests.engine.conftest import ARGS, BLOCK, CHUNK, NOTHING_OWED, ROOT, Starter, empty, store
from tests.support.vllm.judge import Judge, check_same
from tests.support.vllm.models import TINY_LATENT, build
from tests.support.vllm.process import EngineDied, EngineProcess, Pages, Prompt, Settings
from tests.support.vllm.ranks import until

pytestmark = pytest.mark.engine

Make = Callable[[int], list[int]]

START_S: Final = 400.0
"""Six processes that import vLLM at once keep two cores busy for half a minute, if idle before."""
LATE: Final = Settings(ahead_s=1e6)
LATENT_BLOCK: Final = 16
"""vLLM's block size for MLA on a CPU, whatever is asked for."""
STEP: Final = int(ARGS["max_num_batched_tokens"])


class Two(NamedTuple):
    """Engines of one shape that share a daemon. ``a`` is also the judge."""

    a: EngineProcess
    b: EngineProcess

    judge: Judge


@pytest.fixture(scope="module")
def tp(daemon: Daemon, start: Starter) -> Iterator[Two]:
    """Tensor parallel 2, in bfloat16; the pages of ``b`` are on fake GPUs."""
    args = {"tensor_parallel_size": 2, "dtype": "bfloat16"}
    fields: dict[str, Any] = {"args": args, "start_timeout_s": START_S}
    socket = Path(daemon.socket)
    a, b = (start(f"tp-{n}", socket=socket, gpu=n == "b", **fields) for n in "ab")
    yield Two(a.wait_ready(), b.wait_ready(), Judge(a))
    for engine in (a, b):
        engine.kill()


@pytest.fixture(scope="module")
def stages(daemon: Daemon, start: Starter) -> Iterator[EngineProcess]:
    """Pipeline parallel 2, on fake GPUs."""
    args = {"pipeline_parallel_size": 2}
    engine = start("pp", socket=Path(daemon.socket), args=args, start_timeout_s=START_S, gpu=True)
    yield engine.wait_ready()
    engine.kill()


@pytest.fixture(scope="module")
def mla(daemon: Daemon, start: Starter) -> Iterator[EngineProcess]:
    """A model with latent attention, tensor parallel 2. The backend is vLLM's reference: the one
    it prefers on CPUs with AMX refuses float32."""
    model = build(ROOT / ".cache" / "models", TINY_LATENT)
    args = {"block_size": LATENT_BLOCK, "attention_backend": "CPU_MLA", "tensor_parallel_size": 2}
    socket = Path(daemon.socket)
    engine = start("mla", folder_of=model, socket=socket, args=args, start_timeout_s=START_S)
    yield engine.wait_ready()
    engine.kill()


def watched(engine: EngineProcess, settings: Settings, rank: int | None = None) -> EngineProcess:
    """``engine`` with its own cache empty, and disturbed in this way only."""
    assert engine.reset()
    engine.reset_hooks()
    engine.disturb(settings, rank=rank)
    return engine


# ---------------------------------------------------------------- tensor parallel, dense


@pytest.mark.parametrize("size", [520, pytest.param(1030, marks=pytest.mark.slow)])
def test_a3_tensor_parallel_cold_and_warm_in_a_second_process(
    tp: Two, prompt: Make, size: int
) -> None:
    """After 512 and 1024 tokens the cold run begins a step, as the warm one does: the same sums."""
    tokens = prompt(size)
    hit = size // CHUNK * CHUNK
    assert hit % STEP == 0
    cold = tp.judge.cold(tokens)
    check_same(store(tp.a, tokens, 8), cold)
    warm = watched(tp.b, Settings()).one(tokens)
    assert (warm.local, warm.external) == (0, hit)
    check_same(warm, cold)


@pytest.mark.slow
def test_ranks_in_other_processes_wait_for_no_step_that_nobody_makes(
    tp: Two, stages: EngineProcess, daemon: Daemon, prompt: Make
) -> None:
    """As in ``test_engines_come_and_go.py``; with pipeline stages vLLM queues steps. The last reset
    is below a request that runs, so no step can be made for its copies."""
    for engine in (tp.a, tp.b, stages):
        for asks in (True, False):
            rows = empty(daemon)["rows"]
            engine.leave(Prompt(prompt(900), 1), asks=asks)
            if asks:
                assert empty(daemon)["rows"] == rows + 4
            assert engine.reset_at_once(running=asks)
            assert empty(daemon)["rows"] == rows + 4
        engine.slow_copies(0.1)
        engine.leave(Prompt(prompt(900), 60), asks=False, first=True)
        assert engine.reset_at_once(running=True)
        engine.slow_copies(0.0)
        assert engine.reset()


def test_a3_tensor_parallel_where_the_cold_run_sums_in_another_order(tp: Two, prompt: Make) -> None:
    tokens = prompt(1000)
    store(tp.a, tokens)
    warm = watched(tp.b, Settings()).one(tokens)
    assert warm.external == 992
    tp.judge.check(tokens, warm)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_ranks_zeroed_pages_change_the_answer(tp: Two, prompt: Make, rank: int) -> None:
    """The negative control: what each rank loads decides."""
    tokens = prompt(520)
    cold = tp.judge.cold(tokens)
    store(tp.a, tokens)
    wrong = watched(tp.b, Settings(spoil=True), rank).one(tokens)
    assert wrong.external == 512
    assert wrong.tokens != cold.tokens
    right = watched(tp.b, Settings()).one(tokens)
    assert right.external == 512
    check_same(right, cold)


def test_one_ranks_late_load_is_computed_by_all(tp: Two, daemon: Daemon, prompt: Make) -> None:
    tokens = prompt(520)
    cold = tp.judge.cold(tokens)
    store(tp.a, tokens)
    answer = watched(tp.b, LATE, rank=1).one(tokens)
    check_same(answer, cold)
    assert watched(tp.b, Settings()), "no block is held"
    daemon.wait_until(**NOTHING_OWED)


def test_one_ranks_late_load_inside_a_step_is_taken_back_by_all(
    tp: Two, daemon: Daemon, prompt: Make
) -> None:
    tokens = prompt(520)
    cold = tp.judge.cold(tokens)
    store(tp.a, tokens)
    tp.a.load_in_steps(at_most=0)
    before = tp.a.in_step()
    check_same(watched(tp.a, Settings(late_in_step=True), rank=1).one(tokens), cold)
    assert tp.a.in_step() == [before[0] + 1, before[1]]
    warm = watched(tp.a, Settings()).one(tokens)
    assert tp.a.in_step() == [before[0] + 2, before[1] + 1]
    assert warm.external == 512
    check_same(warm, cold)
    tp.a.load_in_steps(False)
    daemon.wait_until(**NOTHING_OWED)


# ---------------------------------------------------------------- pipeline parallel


def test_b5_pipeline_stages_store_and_load_their_own_layers(
    stages: EngineProcess, daemon: Daemon, prompt: Make
) -> None:
    tokens = prompt(520)
    cold = store(watched(stages, Settings(watch=True)), tokens, 8)
    stages.reset_hooks()
    stages.scrub()
    stages.disturb(Settings(watch=True))
    warm = stages.one(tokens)
    assert warm.external == 512
    check_same(warm, cold)
    first, second = stages.pages()
    assert len(first.loaded) == len(second.loaded) == 512 // BLOCK
    assert first.loaded != second.loaded
    for rank in (0, 1):
        wrong = watched(stages, Settings(spoil=True), rank).one(tokens)
        assert wrong.external == 512
        assert wrong.tokens != cold.tokens
    check_same(watched(stages, LATE, rank=1).one(tokens), cold)
    daemon.wait_until(**NOTHING_OWED)


# ---------------------------------------------------------------- MLA


class Kept(NamedTuple):
    """A prompt that was stored in one step and loaded again, and what that took."""

    tokens: list[int]
    stored: list[Pages]
    loaded: list[Pages]
    used_bytes: int
    commits: int
    releases: int


def keep(engine: EngineProcess, daemon: Daemon, prompt: Make) -> Kept:
    """Store a prompt of 520 tokens, overwrite all pages, and load it."""
    for _ in range(20):  # another prompt if a busy machine left out the store, see ``store``
        tokens, before = prompt(520), daemon.status()
        watched(engine, Settings(watch=True)).one(tokens, 1)
        after = daemon.wait_until(**NOTHING_OWED)
        stored = engine.pages()
        watched(engine, Settings(watch=True)).scrub()
        if engine.one(tokens, 1).external == 512:
            break
    loaded = engine.pages()
    end = daemon.wait_until(**NOTHING_OWED)
    return Kept(
        tokens=tokens,
        stored=stored,
        loaded=loaded,
        used_bytes=latent_bytes(after) - latent_bytes(before),
        commits=sent(after, "commit") - sent(before, "commit"),
        releases=sent(end, "release") - sent(after, "release"),
    )


def sent(status: dict[str, Any], kind: str) -> int:
    """Messages of this kind that sessions had sent by then."""
    return int(status["messages"].get(kind, 0))


def latent_bytes(status: dict[str, Any]) -> int:
    """What the rows of the MLA model take of the arena."""
    spaces = [one for one in status["namespaces"] if "deepseek" in one["model"]]
    return sum(int(group["used_bytes"]) for one in spaces for group in one["groups"])


def test_a1_b3_what_every_rank_loads_is_what_the_first_stored(
    mla: EngineProcess, daemon: Daemon, prompt: Make
) -> None:
    """... and there is one shard in the arena and one commit."""
    kept = keep(mla, daemon, prompt)
    first = kept.stored[0].stored
    assert len(first) == len(set(first)) == 512 // LATENT_BLOCK
    assert [pages.loaded for pages in kept.loaded] == [first] * 2
    latents = TINY_LATENT.layers * (TINY_LATENT.latent + TINY_LATENT.rope) * 4
    assert kept.used_bytes == 512 * latents
    assert (kept.commits, kept.releases) == (1, 2)


def test_a6_a_shared_shard_is_held_until_the_last_rank_has_read_it(
    mla: EngineProcess, daemon: Daemon, prompt: Make
) -> None:
    engine, second = mla, mla.ranks[1]
    kept = keep(engine, daemon, prompt)
    before = sent(daemon.status(), "release")
    watched(engine, Settings())
    os.kill(second, signal.SIGSTOP)
    try:
        engine.submit(Prompt(kept.tokens, 1))
        until(lambda: sent(daemon.status(), "release") == before + 1, "the first rank's release")
        held = daemon.status()
        assert (held["leases"], held["pins"]) == (1, 2)
        assert sent(held, "release") == before + 1
    finally:
        os.kill(second, signal.SIGCONT)
    assert engine.answers()[0].external == 512
    end = daemon.wait_until(**NOTHING_OWED)
    assert sent(end, "release") == before + 2


def test_one_ranks_wrong_load_ends_the_cache_of_all(
    mla: EngineProcess, daemon: Daemon, prompt: Make
) -> None:
    """Also where ranks share a shard: each has loaded it for itself."""
    tokens = prompt(CHUNK + 1)  # one row
    cold = watched(mla, Settings()).one(tokens)
    store(mla, tokens)
    mla.verify_again()
    wrong = watched(mla, Settings(flip="load"), rank=1).one(tokens)
    check_same(wrong, cold)
    assert "kvass is off, the engine runs uncached: rank 1: a load in layer group 0" in mla.log()
    assert "rank 0:" not in mla.log()
    assert watched(mla, Settings()).one(tokens).cached == 0, "nothing is looked up any more"
    daemon.wait_until(**NOTHING_OWED)
    mla.verify_again()
    assert watched(mla, Settings()).one(tokens).cached == 0, "the namespace is empty"


# ---------------------------------------------------------------- a rank dies


def strike(
    engine: EngineProcess, daemon: Daemon, tokens: list[int], hook: str, rank: int
) -> dict[str, Any]:
    """Run ``tokens``, and ``kill -9`` this rank when the first of the two rows that ``hook`` sends
    it to copy is copied. What was owed then; nothing is, soon after vLLM has ended the engine."""
    pids = [engine.pid, *engine.ranks]
    victim = engine.ranks[rank]
    watched(engine, Settings(copy_delay_s=1.0))
    engine.arm(hook, "after", [(victim, signal.SIGSTOP, 1.5)], rank=rank)
    engine.submit(Prompt(tokens))
    until(lambda: state(victim) == "T", "the rank to stop in the middle")
    held = daemon.status()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(EngineDied):
        engine.answers()
    until(lambda: all(state(pid) in "Z-" for pid in pids), "the engine's end", 60.0)
    daemon.wait_until(**NOTHING_OWED)
    return held


def test_a_rank_killed_while_it_stores(tp: Two, daemon: Daemon, prompt: Make) -> None:
    kept, storing = prompt(520), prompt(520)
    store(tp.b, kept)
    rows = daemon.status()["rows"]
    held = strike(tp.b, daemon, storing, "wait_for_save", 0)
    assert held["reservations"] == 1
    assert daemon.status()["rows"] == rows, "what not every rank committed"
    warm = watched(tp.a, Settings()).one(kept)
    assert warm.external == 512
    check_same(warm, tp.judge.cold(kept))
    cold = tp.a.one(storing)
    assert cold.cached == 0
    check_same(cold, tp.judge.cold(storing))
    store(tp.a, storing)  # its keys are not blocked


def test_a_rank_killed_while_it_loads(mla: EngineProcess, daemon: Daemon, prompt: Make) -> None:
    """It shares shard and lease with the other rank, which has read its copy."""
    kept = keep(mla, daemon, prompt)
    rows = daemon.status()["rows"]
    held = strike(mla, daemon, kept.tokens, "bind_connector_metadata", 1)
    assert (held["leases"], held["pins"]) == (1, 2)
    assert daemon.status()["rows"] == rows


def state(pid: int) -> str:
    """One letter, as ``ps`` says it: T is stopped; Z has let go of everything; - is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "-"
