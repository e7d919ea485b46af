"""DeviceMover over the hostile fake: seeded histories, planted breaks, and its threads and errors.

What it promises as every mover does: ``test_movers.py``.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.pool import Pool
from typing import Any

import numpy as np
import pytest

from kvass.errors import UsageError
from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import device_mover
from kvass.transfer.base import Job, Kind
from kvass.transfer.batch import MAX_DESCRIPTORS, Region
from kvass.transfer.device_mover import DeviceMover
from tests.support import processes
from tests.support.gpu.fake_device import Wait
from tests.support.gpu.fake_gpu import FakeGpu
from tests.support.gpu.fake_torch import FakeEvent
from tests.support.mutants import TIMEOUT_S, UNBROKEN, Mutant
from tests.support.waiting import eventually
from tests.transfer.device_mutants import MUTANTS, notice
from tests.transfer.gpu_world import run_seed
from tests.transfer.test_movers import PLANES, SLOT, DeviceRig, plan


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_seeded_histories(first: int) -> None:
    assert [told for seed in range(first, first + 100) if (told := run_seed(seed))] == []


@pytest.fixture(scope="module")
def forked() -> Iterator[Pool]:
    """A new process for each task, in which nothing of the mover is imported."""
    with processes.pool(1) as pool:
        yield pool


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_every_break_is_noticed(mutant: Mutant, forked: Pool) -> None:
    told = forked.apply_async(notice, (mutant,)).get(TIMEOUT_S)
    assert told, f"nothing notices: {mutant.name}"


def test_an_unbroken_mover_is_not_blamed(forked: Pool) -> None:
    assert forked.apply(notice, (UNBROKEN, 50)) == ""


# ------------------------------------------------------------ with its thread


@pytest.fixture
def new_rig() -> Iterator[Callable[..., DeviceRig]]:
    """Makes rigs, and sees to their ends."""
    made: list[DeviceRig] = []

    def make(**more: Any) -> DeviceRig:
        made.append(DeviceRig(**more))
        return made[-1]

    yield make
    for rig in made:
        rig.let_go()
        rig.mover.close()
        assert rig.fake.violations == []
        assert rig.fake.dead or rig.mover._dead or not rig.fake.registered


@pytest.fixture
def rig(new_rig: Callable[..., DeviceRig]) -> DeviceRig:
    return new_rig()


def test_regions_on_two_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="several devices"):
        DeviceMover(
            FakeGpu(1), [Region(0, 1 << 20, "cuda:0"), Region(1 << 30, 1 << 20, "cuda:1")], [PLANES]
        )


def test_the_copy_thread_uses_the_device_of_the_pages(rig: DeviceRig) -> None:
    """Else it would make a context on device 0, of some 500 MB, in each worker."""
    rig.fake._device = "fake:3"
    rig.submit("store", 1)
    assert rig.ends() == [((1,), "done")]
    assert rig.fake.devices == [3]


# ------------------------------------------------------------ pinning


def test_what_has_no_memory_yet_is_not_pinned(
    new_rig: Callable[..., DeviceRig], caplog: pytest.LogCaptureFixture
) -> None:
    """Pinning would fault it in: charged to the worker, and waited for. Copies are right meanwhile,
    nothing is said of it, and it is pinned once the daemon has populated it."""
    window = 8 * SLOT
    rig = new_rig(window=window)
    with caplog.at_level(logging.WARNING):
        for populated, ways in (
            (0, {"pageable"}),
            (window - 1, {"pageable"}),
            (window, {"pageable", "dma"}),
            (2 * window, {"dma"}),
            (0, {"dma"}),
        ):
            rig.fake.copied.clear()
            rig.submit("store", 3, 12, populated=populated)
            assert rig.ends() == [((3, 12), "done")]
            assert {batch.way for batch in rig.fake.copied} == ways
    assert (rig.arena[SLOT * 3], rig.arena[SLOT * 12]) == (3, 12)
    assert caplog.records == []


def test_a_call_that_may_block_is_given_less(new_rig: Callable[..., DeviceRig]) -> None:
    """Where memory cannot be pinned: the driver's locks are held for as long as it blocks."""
    for populated, calls in ((0, [4, 4, 4, 4]), (64 * SLOT, [16])):
        rig = new_rig(batch_bytes=16 * SLOT)
        rig.submit("store", *range(1, 33, 2), populated=populated)
        assert [outcome for _, outcome in rig.ends()] == ["done"]
        assert [len(batch.bytes) for batch in rig.fake.copied] == calls


def test_a_store_to_memory_that_cannot_be_had_fails_before_it_writes(
    new_rig: Callable[..., DeviceRig],
) -> None:
    rig, asked = new_rig(), list[tuple[int, int]]()

    def prepare(lo: int, hi: int) -> None:
        asked.append((lo, hi))
        if lo > 5 * SLOT:
            raise OSError(28, "No space left on device")

    jobs: list[tuple[Kind, int]] = [("store", 1), ("store", 5), ("store", 6), ("load", 7)]
    for kind, slot in jobs:
        rig.submit(kind, slot, populated=4 * SLOT, prepare=prepare)
    assert dict(rig.ends()) == {(1,): "done", (5,): "done", (6,): "failed", (7,): "done"}
    assert [lo // SLOT for lo, _ in asked] == [1, 5, 6]
    assert not rig.arena[SLOT * 6]


def test_the_arenas_last_window_may_be_shorter(new_rig: Callable[..., DeviceRig]) -> None:
    rig = new_rig(window=48 * SLOT)
    rig.submit("store", 60, populated=64 * SLOT)
    rig.ends()
    assert [batch.way for batch in rig.fake.copied] == ["dma"]


def test_a_job_pins_what_its_next_copies_touch_and_not_all_at_once(
    new_rig: Callable[..., DeviceRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its first copies do not wait for its last."""
    rig = new_rig(window=8 * SLOT)
    register, seen = rig.fake.register, []

    def count(address: int, size: int) -> Any:
        seen.append(len(rig.fake.copied))
        return register(address, size)

    monkeypatch.setattr(rig.fake, "register", count)
    many = [plan(*range(8 * n + 1, 8 * n + 5)) for n in range(8)]
    rig.mover.submit(Job("store", tuple(many), rig.arena))
    rig.ends()
    assert len(seen) == 8
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] > 0


def test_an_arenas_end_waits_for_the_driver_on_the_copy_thread(
    rig: DeviceRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the engine's thread be the last to use it; and the copy thread have nothing to do."""
    monkeypatch.setattr(device_mover, "IDLE_S", 0.01)
    rig.submit("store", 1)
    rig.ends()
    assert rig.fake.registered
    with rig.fake.engine_thread():
        del rig.arena
    assert eventually(lambda: not rig.fake.registered and not rig.fake.mapped)


# ------------------------------------------------------------ what goes wrong


def test_what_a_dead_device_may_still_read_is_kept(
    rig: DeviceRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Table:
        pass

    tables, copy = list[weakref.ref[Table]](), rig.fake.copy

    def keeping(stream: Any, batch: Any) -> Any:
        table = Table()
        tables.append(weakref.ref(table))
        batch.keep.append(table)
        return copy(stream, batch)

    monkeypatch.setattr(rig.fake, "copy", keeping)
    rig.hold()
    rig.submit("load", 1)
    assert eventually(rig.begun)
    rig.fake.kill()
    assert rig.ends() == [((1,), "lost")]
    rig.fake.copied.clear()
    for ops in rig.fake.streams.values():
        ops.clear()
    gc.collect()
    assert tables
    assert all(table() is not None for table in tables)
    arenas = [arena for kept in device_mover._lost if isinstance(kept, list) for arena in kept]
    assert any(arena is rig.arena for arena in arenas)


@pytest.mark.parametrize("driver_hangs", [False, True])
def test_close_ends_though_the_device_or_a_call_hangs(
    rig: DeviceRig, monkeypatch: pytest.MonkeyPatch, driver_hangs: bool
) -> None:
    """What runs then is never settled, and keeps its memory; unless it ends after all."""
    monkeypatch.setattr(device_mover, "PATIENCE_S", 0.05)
    within, leave, copy = threading.Event(), threading.Event(), rig.fake.copy

    def hanging(*args: Any) -> Any:
        within.set()
        if driver_hangs:
            leave.wait(60)
        return copy(*args)

    monkeypatch.setattr(rig.fake, "copy", hanging)
    rig.hold()
    rig.submit("store", 1)
    assert within.wait(10)
    rig.mover.close()
    assert rig.mover.poll() == []
    leave.set()
    rig.let_go()
    assert rig.ends()[0][1] in ("done", "cancelled")
    monkeypatch.undo()


def raising(*_: object) -> Any:
    raise ValueError("not a value")


def test_who_fails_twice_knows_nothing_any_more(
    rig: DeviceRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.fake, "mark", raising)
    monkeypatch.setattr(rig.fake, "idle", raising)
    rig.submit("store", 1)
    assert rig.ends() == [((1,), "lost")]
    rig.submit("store", 2)
    assert rig.ends() == [((2,), "failed")]


def test_a_wait_that_does_nothing_is_noticed(
    rig: DeviceRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy ends before the engine's work that it must wait for."""
    monkeypatch.setattr(rig.fake, "wait", lambda *_: None)
    never = FakeEvent(rig.fake)
    rig.fake._events[never] = False
    rig.fake.streams[rig.fake.compute].append(Wait(never))
    with rig.fake.engine_thread():
        rig.submit("store", 1)
    assert rig.ends() == [((1,), "failed")]
    rig.fake._events[never] = True
    monkeypatch.undo()
    with rig.fake.engine_thread():
        rig.submit("store", 1)
    assert rig.ends() == [((1,), "done")]


# ------------------------------------------------------------ what is in flight


def test_a_short_job_does_not_wait_for_a_long_one(new_rig: Callable[..., DeviceRig]) -> None:
    rig = new_rig(batch_bytes=1, flying_bytes=1)
    rig.hold()
    rig.submit("load", *range(1, 40, 2))  # runs of their own
    assert eventually(rig.begun)
    rig.submit("load", 50)
    rig.let_go()
    assert rig.ends()[0] == ((50,), "done")


def test_a_row_moves_in_as_few_descriptors_as_it_has_runs() -> None:
    planes = GroupPlanes(0, (Plane(0, 64, 64), Plane(4096, 64, 64)), blocks=40, chunk_blocks=16)
    fake = FakeGpu(1)
    region, _ = fake.allocate(8192)
    mover = DeviceMover(fake, [region], [planes])
    one = plan_copy(planes, [[*range(1, 9), *range(20, 28)]], [0])
    mover.submit(Job("store", (one,), fake.map(4096)))
    assert mover.drain(10)
    mover.close()
    assert [len(batch.bytes) for batch in fake.copied] == [4]


@pytest.mark.parametrize("most", [70, MAX_DESCRIPTORS])
def test_what_flies_is_bounded_in_descriptors_for_each_direction(most: int) -> None:
    """Behind an engine that is busy: a driver may block who gives it more than a stream takes. Two
    batches of at most as many as the runtime takes, and no third."""
    planes = GroupPlanes(0, (Plane(0, 64, 64),), blocks=40_000, chunk_blocks=100)
    fake = FakeGpu(1, eager=4000)
    fake.batch_runs = most
    region, _ = fake.allocate(64 * 40_000)
    tables = [np.arange(start, start + 19_800, 2).reshape(-1, 100) for start in (1, 20_000)]
    mover = DeviceMover(fake, [region], [planes])
    kinds: list[Kind] = ["store", "load"]
    fake.stopped = True
    fake.queue(lambda: None)
    with fake.engine_thread():
        for kind, table in zip(kinds, tables, strict=True):
            slots = np.arange(len(table)) * planes.shard_bytes
            arena = fake.map(len(table) * planes.shard_bytes)
            mover.submit(Job(kind, (plan_copy(planes, table.tolist(), slots.tolist()),), arena))

    def given(kind: str) -> int:
        return sum(len(batch.bytes) for batch in list(fake.copied) if batch.kind == kind)

    for kind in kinds:
        assert eventually(lambda kind=kind: given(kind) > most)  # type: ignore[misc]
    assert not mover.drain(0.1)
    assert all(most < given(kind) <= 2 * most for kind in kinds)
    fake.stopped = False
    assert mover.drain(60)
    assert [given(kind) for kind in kinds] == [9900, 9900]
    assert max(len(batch.bytes) for batch in fake.copied) <= most
    mover.close()
    assert fake.violations == []


def test_a_call_that_may_block_waits_for_all_that_its_stream_waits_for(rig: DeviceRig) -> None:
    """A smaller job, submitted later, overtook it: the stream waits for that one's place, too."""
    rig.hold()
    rig.fake.queue(lambda: None)
    with rig.fake.engine_thread():
        rig.submit("store", 1, 3, 5, populated=0)
    assert eventually(lambda: bool(rig.fake.plans.calls.get("done"))), "asked for its turn"
    rig.fake.queue(lambda: None)
    with rig.fake.engine_thread():
        rig.submit("store", 7)
    assert eventually(rig.begun)
    rig.fake.queue(lambda: None)
    for _ in range(2):  # the engine comes to the first job's place, and not to the second's
        rig.fake.step()
    assert not rig.mover.drain(0.05)
    assert [batch.way for batch in rig.fake.copied] == ["dma"]
    rig.let_go()
    assert {outcome for _, outcome in rig.ends()} == {"done"}
    assert [batch.way for batch in rig.fake.copied] == ["dma", "pageable"]


def test_who_waits_for_the_engine_long_looks_less_often(
    rig: DeviceRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes the GIL; and once something is over, the next batch is soon over, too."""
    pauses, wait = list[float | None](), rig.mover._changed.wait

    def noted(timeout: float | None = None) -> bool:
        pauses.append(timeout)
        return wait(timeout)

    monkeypatch.setattr(rig.mover._changed, "wait", noted)
    rig.hold()
    rig.submit("store", 1)
    assert eventually(lambda: len(pauses) > 5)
    assert min(filter(None, pauses)) == device_mover.POLL_S
    rig.now += 8 * 200e-6
    assert eventually(lambda: pytest.approx(200e-6) == pauses[-1])
    rig.now += 60
    assert eventually(lambda: pauses[-1] == device_mover.LONGEST_POLL_S)
    rig.let_go()
    rig.ends()
    rig.hold()
    pauses.clear()
    rig.submit("store", 2)
    assert eventually(lambda: device_mover.POLL_S in pauses)
    assert device_mover.LONGEST_POLL_S not in pauses
