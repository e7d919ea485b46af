"""Short runs go through a stage where that is faster, and the bytes are the same."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bench.geometries import geometry
from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import staging
from kvass.transfer.base import Job, U8Array
from kvass.transfer.batch import Batch, Kind, Region, Stage, Staging, Stagings
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.device import Fault, Stream
from kvass.transfer.self_check import NO_KERNEL
from kvass.transfer.staging import STAGES, choose_stagings, shortest
from tests.support.gpu.fake_gpu import FakeGpu
from tests.support.gpu.fake_scratch import FakeScratch
from tests.support.gpu.stepped_mover import SteppedMover
from tests.support.gpu.timed_gpu import CALL_S, COPY_BYTES_S, TimedGpu

KIB = 1024
SMALL = staging.STAGE_BYTES // 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less is measured, and stages are as much smaller."""
    monkeypatch.setattr(staging, "STAGE_BYTES", SMALL)
    monkeypatch.setattr(staging, "PROBE_BYTES", 2 * SMALL)
    monkeypatch.setattr(staging, "ROUNDS", 1)


def layers(run: int, number: int = 8, blocks: int = 400) -> GroupPlanes:
    """Layers outermost, with gaps between."""
    planes = tuple(Plane(i * (blocks * run + 64), run, run) for i in range(number))
    return GroupPlanes(0, planes, blocks, chunk_blocks=8)


def memory_of(fake: FakeGpu, planes: GroupPlanes) -> tuple[list[Region], U8Array]:
    region, memory = fake.allocate(max(p.end(planes.blocks) for p in planes.planes))
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
    return [region], memory


def choose(fake: TimedGpu, *groups: GroupPlanes, below: Any = KERNEL_BELOW) -> dict[Kind, Staging]:
    """What is chosen. The pages are as before, and the device was used well."""
    regions, memory = memory_of(fake, groups[0])
    before = memory.copy()
    with fake.engine_thread():
        found = choose_stagings(fake, regions, groups, below, lambda: FakeScratch(fake), fake.clock)
    assert np.array_equal(memory, before)
    assert fake.violations == []
    assert not fake.registered
    return dict(found)


# ---------------------------------------------------------------- what is chosen


def test_the_faster_way_is_chosen_by_what_was_measured(caplog: pytest.LogCaptureFixture) -> None:
    """Also for runs that are somewhat longer than those that were measured."""
    with caplog.at_level(logging.INFO):
        found = choose(TimedGpu(), layers(8 * KIB))
    assert min(found["store"].below, found["load"].below) > 8 * KIB
    stages = [stage for one in found.values() for stage in one.stages]
    assert len({stage.address for stage in stages}) == 2 * STAGES, "each belongs to one stream"
    assert "stores of 8 KiB pieces" in caplog.text
    assert "they go through a stage" in caplog.text


@pytest.mark.parametrize(("device_bytes_s", "kinds"), [(3e9, set()), (12e9, {"store"})])
def test_where_stages_are_slower_there_are_none(device_bytes_s: float, kinds: set[Kind]) -> None:
    """Loads without a stage are faster than stores, because a kernel reads the host's memory."""
    assert set(choose(TimedGpu(device_bytes_s=device_bytes_s), layers(8 * KIB))) == kinds


def test_long_runs_and_odd_ones_are_not_even_measured() -> None:
    for run in (64 * KIB, 4 * KIB + 4):
        fake = TimedGpu()
        assert not choose(fake, layers(run, 1, 40))
        assert "open_stage" not in fake.plans.calls
        assert not fake.copied


def test_the_group_with_the_shortest_runs_is_measured() -> None:
    long, short, empty = layers(32 * KIB), layers(8 * KIB), GroupPlanes(2, (), 40, 8)
    assert shortest([long, short, empty]) is short
    assert shortest([layers(8 * KIB, blocks=16)]) is None, "too few blocks for a row and its gaps"


@pytest.mark.parametrize("below", [NO_KERNEL, {}])
def test_without_a_kernel_that_is_right_there_are_none(below: Any) -> None:
    fake = TimedGpu()
    assert not choose(fake, layers(8 * KIB), below=below)
    assert not fake.copied


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(("nth", "kinds"), [(0, set()), (1, set()), (2, {"store"})])
def test_without_memory_copies_are_as_before(nth: int, kinds: set[Kind]) -> None:
    fake = TimedGpu()
    fake.plans.fail["open_stage"] = {nth}
    assert set(choose(fake, layers(8 * KIB))) == kinds


def test_without_memory_for_the_test_too(caplog: pytest.LogCaptureFixture) -> None:
    def scratch() -> Any:
        raise RuntimeError("out of memory\nmore")

    fake, planes = TimedGpu(), layers(8 * KIB)
    regions, _ = memory_of(fake, planes)
    assert not choose_stagings(fake, regions, [planes], KERNEL_BELOW, scratch)
    assert "copied one by one: out of memory" in caplog.text


class Spoiled(TimedGpu):
    """Its stages are exchanged, from the ``first`` staged batch on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._left = first

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        if batch.way == "staged":
            self._left -= 1
            if self._left < 0:
                same = np.flatnonzero(batch.bytes == batch.bytes[0])
                batch.source[same] = batch.source[same[::-1]]
        return super().copy(stream, batch)


@pytest.mark.parametrize("first", [0, 6])
def test_what_is_wrong_in_a_stage_is_noticed_before_it_is_used(
    first: int, caplog: pytest.LogCaptureFixture
) -> None:
    fake = Spoiled(first)
    assert choose(fake, layers(8 * KIB)) == {}
    assert "copied one by one on this device: a store left wrong bytes" in caplog.text


class Elsewhere(TimedGpu):
    """Its kernel runs on another stream: a stage is emptied before it is filled, and filled before
    it is empty."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        opened = self.open_stream("store")
        assert not isinstance(opened, Fault)
        self._elsewhere: Any = opened

    def _kernel(self, *args: Any) -> None:
        with self._elsewhere:
            super()._kernel(*args)


@pytest.mark.parametrize("seed", range(5))
def test_a_stage_that_is_not_in_order_is_noticed(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(Elsewhere(seed), layers(8 * KIB)) == {}
    assert "copied one by one on this device: a " in caplog.text


def test_a_copy_that_fails_is_no_measurement() -> None:
    class Failing(TimedGpu):
        def copy(self, stream: Stream, batch: Batch) -> Fault | None:
            big = batch.stage is not None and batch.stage.bytes == SMALL
            return Fault("no more") if big else super().copy(stream, batch)

    assert choose(Failing(), layers(8 * KIB)) == {}


# ---------------------------------------------------------------- the bytes


def stage_of(fake: FakeGpu, size: int, number: int = STAGES) -> tuple[Stage, ...]:
    stages = [fake.open_stage(size) for _ in range(number)]
    assert all(isinstance(one, Stage) for one in stages)
    return tuple(one for one in stages if isinstance(one, Stage))


def stored(planes: GroupPlanes, stagings: bool) -> tuple[U8Array, FakeGpu]:
    """The arena after a store of three rows whose slots lie apart, and the device."""
    fake = FakeGpu(3)
    regions, _ = memory_of(fake, planes)
    both = Staging(1 << 20, stage_of(fake, 64 * KIB))
    mover = SteppedMover(fake, regions, [planes], stagings={"store": both} if stagings else {})
    table = np.random.default_rng(2).permutation(np.arange(1, planes.blocks))[:24].reshape(3, 8)
    arena = fake.map(8 * planes.shard_bytes)
    arena[:] = 0x77
    slots = planes.shard_bytes * np.array([6, 0, 3])
    with fake.engine_thread():
        mover.submit(Job("store", (plan_copy(planes, table, slots),), arena))
    mover.settle()
    mover.close()
    assert mover.poll()[0].ok
    assert mover.ways == {"staged" if stagings else "dma"}
    assert fake.violations == []
    return arena, fake


def test_a_row_is_the_same_in_l1_whichever_way_it_came() -> None:
    """Its padding and its neighbours, too: engines and ranks that copy in other ways read it."""
    planes = layers(1000, 5)
    (one, plain), (other, through) = (stored(planes, staged) for staged in (False, True))
    assert np.array_equal(one, other)
    assert sum(len(batch.bytes) for batch in plain.copied) == 3 * 8 * 5
    assert sum(len(batch.firsts) for batch in through.copied if batch.firsts is not None) == 4


def test_while_no_table_is_free_a_staged_batch_goes_one_by_one() -> None:
    planes = layers(1000, 5)
    fake = FakeGpu(3, watched=False)
    regions, memory = memory_of(fake, planes)
    stagings: Stagings = {"store": Staging(1 << 20, stage_of(fake, 64 * KIB))}
    assert fake.tables is not None
    fake.tables.free.clear()
    mover = SteppedMover(fake, regions, [planes], stagings=stagings)
    arena = fake.map(planes.shard_bytes)
    with fake.engine_thread():
        mover.submit(Job("store", (plan_copy(planes, [range(8, 0, -1)], [0]),), arena))
    mover.settle()
    mover.close()
    assert mover.poll()[0].ok
    assert np.array_equal(arena[:1000], memory[8 * 1000 :][:1000])
    assert fake.violations == []


# ---------------------------------------------------------------- what it is for, by the model

MODELS = ("llama_70b_tp8", "deepseek_v3")


def speeds(name: str, staged: Sequence[Kind], *kinds: Kind, tokens: int = 1024) -> float:
    """How much is copied in a second, of what one pinned copy copies."""
    one, fake = geometry(name), TimedGpu()
    groups = one.planes(one.blocks(tokens, 2))
    region, _ = fake.allocate(one.region_bytes(groups[0].blocks))
    stagings = {kind: Staging(1 << 20, stage_of(fake, 16 << 20)) for kind in staged}
    mover = SteppedMover(fake, [region], groups, clock=fake.clock, stagings=stagings)
    tables = one.tables(tokens, 2, np.random.default_rng(0))
    arena = fake.map(2 * one.arena_bytes(tokens))
    total = 0
    for number, kind in enumerate(kinds):
        plans = one.plans(groups, tables[number], number * one.arena_bytes(tokens))
        total += sum(plan.bytes for plan in plans)
        mover.submit(Job(kind, plans, arena))
    mover.settle()
    mover.close()
    assert all(done.ok for done in mover.poll())
    return (CALL_S + total / COPY_BYTES_S) / fake.clock()


@pytest.mark.parametrize("name", MODELS)
def test_short_stores_run_at_most_of_a_pinned_copys_speed(name: str) -> None:
    """And a store and a load at once faster than one after the other. The device is a model."""
    plain, through = (speeds(name, staged, "store") for staged in ((), ("store",)))
    assert plain < 0.45 < 0.6 < through
    both = speeds(name, ("store", "load"), "store", "load")
    alone = [speeds(name, (kind,), kind) for kind in ("store", "load")]
    assert both / 2 * sum(1 / one for one in alone) > 1.4
