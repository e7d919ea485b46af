"""60 seeds of the simulated world, and that a broken one says its seed and leaves a trace.
``make test-all`` has 120, ``make sim`` more."""

from __future__ import annotations

from collections import Counter
from multiprocessing.pool import ApplyResult, Pool
from pathlib import Path
from typing import Any

import pytest

from kvass.core.pending.settlement import Settlement
from tests.support.simulation import simulator
from tests.support.simulation.simulator import Simulation, dump_trace, run_seed

SEEDS = 120
BATCHES = 4


class Batch:
    """Some of the seeds: what those say that failed, what the daemons counted, and how many reads
    were in time."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.seen = Counter[str]()
        self.reads = 0

    def look(self, sim: Simulation) -> None:
        status = sim.machine.status()
        self.seen.update(status["counters"])
        for tier in status["tiers"]:
            self.seen.update({k: n for k, n in tier.items() if isinstance(n, int)})
        self.reads += sum(e.reads - e.late_reads for e in sim.engines)


def run_batch(number: int) -> Batch:
    batch = Batch()
    for seed in range(number, SEEDS, BATCHES):
        told = run_seed(seed, look=batch.look)
        batch.failed += [] if told is None else [told]
    return batch


Told = dict[int, ApplyResult[Batch]]


@pytest.fixture(scope="module")
def told(cores: Pool, selected: dict[str, list[Any]]) -> Told:
    batches = selected.get("batch", range(2))
    return {batch: cores.apply_async(run_batch, (batch,)) for batch in batches}


@pytest.mark.parametrize(
    "batch", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, BATCHES))]
)
def test_seeds_hold_every_law(batch: int, told: Told) -> None:
    failed = told[batch].get().failed
    assert not failed, "\n".join(failed)


def test_a_seed_is_a_run() -> None:
    traces = []
    for _ in range(2):
        sim = Simulation(7)
        sim.run()
        traces.append(dump_trace(sim))
    assert traces[0] == traces[1]


def test_the_world_gets_around(told: Told) -> None:
    """Every way a reservation or lease can end, and every way room is made, happens by itself."""
    batches = [one.get() for one in told.values()]
    seen, reads = Counter[str](), sum(one.reads for one in batches)
    for one in batches:
        seen.update(one.seen)
    assert reads > 60
    for name in ("aborted", "cancelled", "cleared", "late", "writer_lost"):
        assert seen[f"discarded_{name}"], name
    for name in ("hit_chunks", "lapsed_leases", "ended_bad_frame", "refused_not_yours"):
        assert seen[name], name
    assert seen["evicted_capacity"]
    assert seen["evicted_handed_over"]
    for name in ("promoted_chunks", "promotions_late", "promotions_cut", "promotions_not_worth_it"):
        assert seen[name], name
    for name in ("session_fetches", "sessions_ended", "session_rows_ended"):
        assert seen[name], name
    for name in ("chunks_indexed", "chunks_unindexed", "segment_tokens"):
        assert seen[name], name
    for name in ("loaded_rows", "load_misses", "stored_rows", "store_failures", "epochs_unknown"):
        assert seen[name], name


def test_a_broken_core_is_told_by_seed_and_leaves_a_trace_to_replay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert simulator.main(["--seeds", "3", "--start", "5", "--jobs", "1"]) == 0
    assert "3 seeds from 5: 0 failed" in capsys.readouterr().out
    with monkeypatch.context() as broken:
        broken.setattr(Settlement, "rank_lost", lambda *_: None)
        assert simulator.main(["--seeds", "6", "--jobs", "1", "--traces", str(tmp_path)]) == 1
        told = capsys.readouterr().err
        traces = sorted(tmp_path.glob("sim-*.jsonl"))
        trace = traces[0]
        assert f"seed {trace.stem.removeprefix('sim-')} failed: " in told
        assert str(trace) in told
        with pytest.raises(AssertionError):
            simulator.main(["--replay", str(trace)])
    assert any(replays(each) for each in traces)


def replays(trace: Path) -> bool:
    """Whether no law is broken. Where a trace ends, a process may still live, so that the core that
    is not broken goes on waiting for it."""
    try:
        return simulator.main(["--replay", str(trace)]) == 0
    except AssertionError:
        return False
