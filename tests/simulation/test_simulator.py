"""300 seeds of the simulated world, and that a broken one says its seed and leaves a trace."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvass.core.settlement import Settlement
from kvass.testing import simulator
from kvass.testing.simulator import Simulation, run_seed
from kvass.testing.traces import dump_trace, replay

SEEDS = 300
BATCHES = 10


Told = dict[int, Future[list[str]]]


def run_batch(batch: int) -> list[str]:
    """What the seeds that failed say."""
    told = [run_seed(seed) for seed in range(batch, SEEDS, BATCHES)]
    return [one for one in told if one is not None]


@pytest.fixture(scope="module")
def told(cores: ProcessPoolExecutor, selected: dict[str, list[Any]]) -> Told:
    return {batch: cores.submit(run_batch, batch) for batch in selected["batch"]}


@pytest.mark.parametrize("batch", range(BATCHES))
def test_seeds_hold_every_law(batch: int, told: Told) -> None:
    failed = told[batch].result()
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_a_seed_is_a_run(seed: int) -> None:
    traces = []
    for _ in range(2):
        sim = Simulation(seed)
        sim.run()
        traces.append([*dump_trace(sim.machine.state.config, sim.roomy, sim.trace)])
    assert traces[0] == traces[1]


def what_happens(seed: int) -> tuple[Counter[str], int]:
    """What a seed's last daemon counted, and how many reads were in time."""
    sim = Simulation(seed)
    sim.run()
    seen = Counter[str](sim.machine.status()["counters"])
    for tier in sim.machine.status()["tiers"]:
        seen.update({k: n for k, n in tier.items() if isinstance(n, int)})
    return seen, sum(e.reads - e.late_reads for e in sim.engines)


def test_the_world_gets_around(cores: ProcessPoolExecutor) -> None:
    """Every way a reservation or lease can end, and every way room is made, happens by itself."""
    seen: Counter[str] = Counter()
    reads = 0
    for counted, read in cores.map(what_happens, range(60, 120), chunksize=5):
        seen.update(counted)
        reads += read
    assert reads > 60
    for name in ("aborted", "cancelled", "cleared", "late", "writer_lost"):
        assert seen[f"discarded_{name}"], name
    for name in ("hit_chunks", "lapsed_leases", "bad_rows", "ended_bad_frame", "refused_not_yours"):
        assert seen[name], name
    assert seen["evicted_capacity"]
    assert seen["evicted_handed_over"]
    for name in ("promoted_chunks", "promotions_late", "promotions_cut", "promotions_not_worth_it"):
        assert seen[name], name
    for name in ("loaded_rows", "load_misses", "stored_rows", "store_failures", "epochs_unknown"):
        assert seen[name], name


def test_a_broken_core_is_told_by_seed_and_leaves_a_trace_to_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(Settlement, "rank_lost", lambda *_: None)
        seed, told = next((s, told) for s in range(30) if (told := run_seed(s, trace_to=tmp_path)))
        assert told.startswith(f"seed {seed} failed: ")
        trace = tmp_path / f"sim-{seed}.jsonl"
        assert str(trace) in told
        with pytest.raises(AssertionError):
            replay(trace.read_text().splitlines())
    replay(trace.read_text().splitlines())


def test_the_command_line_counts_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert simulator.main(["--seeds", "3", "--start", "5", "--jobs", "1"]) == 0
    assert "3 seeds from 5: 0 failed" in capsys.readouterr().out
    monkeypatch.setattr(simulator, "ProcessPoolExecutor", InProcess)
    monkeypatch.setattr(Settlement, "rank_lost", lambda *_: None)
    assert simulator.main(["--seeds", "30", "--traces", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert " failed: " in told.err
    assert "30 seeds from 0: 0 failed" not in told.out


class InProcess:
    """A pool that runs everything here, where the core is broken."""

    def __init__(self, max_workers: int) -> None:
        self.map = lambda f, xs, chunksize: map(f, xs)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass
