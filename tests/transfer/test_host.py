"""The promises of ``transfer/base.py``, kept by HostMover: order, ends, deadlines, errors."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest

from kvass.errors import UsageError
from kvass.layout.copy_plan import CopyPlan, RowCopy, plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import host
from kvass.transfer.base import Done, Job, U8Array
from kvass.transfer.host import HostMover
from tests.support.waiting import eventually

PLANES = GroupPlanes(0, (Plane(0, 4096, 4096),), blocks=64, chunk_blocks=1)
SLOT = PLANES.shard_bytes
FOREIGN = GroupPlanes(1, (Plane(0, 4096, 4096),), blocks=64, chunk_blocks=1)


class Gate:
    """Holds the copy thread inside the first row until opened; records the order of rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()
        self.rows: list[int] = []
        for kind in ("store", "load"):
            right = getattr(host._Bundle, kind)
            monkeypatch.setattr(host._Bundle, kind, self.wrap(right))

    def wrap(self, right: Any) -> Any:
        def gated(bundle: Any, arena: U8Array, row: Any) -> None:
            self.entered.set()
            assert self.opened.wait(10)
            self.rows.append(int(row.blocks[0]))
            right(bundle, arena, row)

        return gated


def test_without_a_thread_a_job_is_refused_and_the_next_one_tries_again(
    arena: U8Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    mover = HostMover([np.zeros(64 * 4096, np.uint8)], [PLANES])
    job = Job("store", (plan_copy(PLANES, [[1]], [0]),), arena)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="new thread"):
            mover.submit(job)
    mover.submit(job)
    assert mover.drain(10)
    mover.close()
    assert [done.outcome for done in mover.poll()] == ["done"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def arena() -> U8Array:
    return np.zeros(64 * SLOT, np.uint8)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def mover(clock: Clock) -> Iterator[HostMover]:
    region = np.repeat(np.arange(64, dtype=np.uint8), 4096)
    mover = HostMover([region], [PLANES], clock=clock)
    yield mover
    mover.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def plan(*blocks: int) -> CopyPlan:
    return plan_copy(PLANES, [[b] for b in blocks], [SLOT * b for b in blocks])


def job(kind: Literal["store", "load"], arena: U8Array, *blocks: int, **more: Any) -> Job:
    return Job(kind, (plan(*blocks),), arena, name=blocks, **more)


def test_submit_does_not_wait_and_poll_tells_in_order(
    mover: HostMover, arena: U8Array, gate: Gate
) -> None:
    mover.submit(job("store", arena, 1, 2))
    mover.submit(job("store", arena, 3, 4))
    assert gate.entered.wait(10)
    assert mover.poll() == []
    assert not mover.drain(0.01)
    gate.opened.set()
    assert mover.drain(10)
    assert [(d.job.name, d.outcome) for d in mover.poll()] == [((1, 2), "done"), ((3, 4), "done")]
    assert mover.poll() == []
    assert arena[SLOT * 4] == 4


def test_loads_go_first_and_wait_for_one_row_only(
    mover: HostMover, arena: U8Array, gate: Gate
) -> None:
    mover.submit(job("store", arena, 1, 2, 3))
    assert gate.entered.wait(10)
    mover.submit(job("load", arena, 11, 12))
    gate.opened.set()
    assert mover.drain(10)
    assert gate.rows == [1, 11, 12, 2, 3]


def test_a_short_load_overtakes_a_long_one_that_no_one_starves(
    mover: HostMover, arena: U8Array, gate: Gate
) -> None:
    """Of short loads arriving all the time, only those go first that came before the long one's
    own number of bytes had moved."""
    mover.submit(job("load", arena, 1, 2, 3, 4))
    assert gate.entered.wait(10)
    arrivals = iter(range(21, 29))

    def one_more(_: Done) -> None:
        if (block := next(arrivals, None)) is not None:
            mover.submit(job("load", arena, block, on_done=one_more))

    mover.submit(job("load", arena, 20, on_done=one_more))
    gate.opened.set()
    assert mover.drain(10)
    assert gate.rows[:3] == [1, 20, 21]
    long = [i for i, block in enumerate(gate.rows) if block < 5]
    assert long[-1] < len(gate.rows) - 1
    assert long[-1] <= 2 * 4


def test_equal_jobs_keep_their_order(mover: HostMover, arena: U8Array, gate: Gate) -> None:
    for blocks in ((1, 2), (3, 4), (5, 6)):
        mover.submit(job("load", arena, *blocks))
    gate.opened.set()
    assert mover.drain(10)
    assert gate.rows == [1, 2, 3, 4, 5, 6]


def test_callback_runs_on_the_copy_thread_before_poll(mover: HostMover, arena: U8Array) -> None:
    seen: list[tuple[int, str]] = []

    def on_done(done: Done) -> None:
        assert mover.poll() == []
        seen.append((threading.get_ident(), done.outcome))

    mover.submit(job("store", arena, 1, on_done=on_done))
    assert mover.drain(10)
    ((thread, outcome),) = seen
    assert thread != threading.get_ident()
    assert outcome == "done"


def test_a_raising_callback_costs_nobody_an_end(
    mover: HostMover, arena: U8Array, caplog: pytest.LogCaptureFixture
) -> None:
    def on_done(done: Done) -> None:
        raise ValueError("mine")

    mover.submit(job("store", arena, 1, on_done=on_done))
    mover.submit(job("store", arena, 2))
    assert mover.drain(10)
    assert [d.outcome for d in mover.poll()] == ["done", "done"]
    assert "on_done of job (1,)" in caplog.text


def test_a_job_without_rows_is_done(mover: HostMover, arena: U8Array) -> None:
    nothing = plan_copy(PLANES, np.empty((0, 1), np.int64), [])
    mover.submit(Job("load", (nothing,), arena))
    mover.submit(Job("load", (), arena))
    assert mover.drain(10)
    assert [d.outcome for d in mover.poll()] == ["done", "done"]


# ------------------------------------------------------------ deadlines (law 5)


def test_past_its_deadline_a_job_touches_nothing(
    mover: HostMover, arena: U8Array, clock: Clock
) -> None:
    mover.submit(job("store", arena, 1, deadline_s=clock.now))
    mover.submit(job("store", arena, 2, deadline_s=clock.now + 1))
    assert mover.drain(10)
    assert [(d.job.name, d.outcome) for d in mover.poll()] == [((1,), "late"), ((2,), "done")]
    assert arena[SLOT * 1] == 0
    assert arena[SLOT * 2] == 2


def test_a_load_that_ends_late_is_late(
    mover: HostMover, arena: U8Array, clock: Clock, gate: Gate
) -> None:
    mover.submit(job("load", arena, 1, deadline_s=clock.now + 1))
    assert gate.entered.wait(10)
    clock.now += 1
    gate.opened.set()
    assert mover.drain(10)
    (done,) = mover.poll()
    assert (done.outcome, done.ok, done.seconds) == ("late", False, 1.0)


# ------------------------------------------------------------ ends


def test_a_copy_that_raises_fails_its_job_only(
    mover: HostMover, arena: U8Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = host._Bundle.store

    def store(bundle: host._Bundle, arena: U8Array, row: RowCopy) -> None:
        if row.blocks[0] == 2:
            raise MemoryError("no room")
        right(bundle, arena, row)

    monkeypatch.setattr(host._Bundle, "store", store)
    mover.submit(job("store", arena, 1, 2, 3))
    mover.submit(job("store", arena, 4))
    assert mover.drain(10)
    ends = {d.job.name: (d.outcome, d.error) for d in mover.poll()}
    assert ends == {(1, 2, 3): ("failed", "MemoryError: no room"), (4,): ("done", "")}
    assert arena[SLOT * 3] == 0


def open_once_closing(gate: Gate, mover: HostMover) -> None:
    assert eventually(lambda: mover._closed)
    gate.opened.set()


def test_close_settles_every_job_once(mover: HostMover, arena: U8Array, gate: Gate) -> None:
    ends: list[object] = []
    for blocks in ((1, 2), (3, 4), (5, 6)):
        mover.submit(
            job("store", arena, *blocks, on_done=lambda d: ends.append((d.job.name, d.outcome)))
        )
    assert gate.entered.wait(10)
    threading.Thread(target=open_once_closing, args=(gate, mover)).start()
    mover.close()
    mover.close()
    assert ends == [((n, n + 1), "cancelled") for n in (1, 3, 5)]
    assert [(d.job.name, d.outcome) for d in mover.poll()] == ends
    assert gate.rows == [1]
    with pytest.raises(UsageError, match="closed"):
        mover.submit(job("store", arena, 5))


def test_close_from_a_callback_is_misuse(mover: HostMover, arena: U8Array) -> None:
    said: list[str] = []

    def on_done(done: Done) -> None:
        try:
            mover.close()
        except UsageError as e:
            said.append(str(e))

    mover.submit(job("store", arena, 1, on_done=on_done))
    assert mover.drain(10)
    assert said == ["close() was called from on_done; call it from another thread"]


def test_close_without_a_job() -> None:
    mover = HostMover([], [])
    mover.close()
    assert mover.poll() == []
    assert mover.drain(0)
    mover.close()  # idempotent


def test_an_idle_mover_keeps_no_arena_alive(mover: HostMover) -> None:
    arena = np.zeros(4 * SLOT, np.uint8)
    gone = weakref.ref(arena)
    mover.submit(job("store", arena, 1))
    assert mover.drain(10)
    mover.poll()
    del arena
    for _ in range(100):
        gc.collect()
        if gone() is None:
            return
        time.sleep(0.01)
    pytest.fail("something still refers to the arena")


def test_the_copy_does_not_hold_the_gil() -> None:
    """While one row of 32 MiB is copied this thread goes on; holding the GIL it never could.

    A busy machine may have had no core for this thread just then: it gets more than one chance.
    """
    planes = GroupPlanes(0, (Plane(0, 32768, 32768),), blocks=1025, chunk_blocks=1024)
    region, arena = np.ones(1025 << 15, np.uint8), np.zeros(32 << 20, np.uint8)
    ids = np.random.default_rng(0).permutation(1024)[None] + 1
    mover = HostMover([region], [planes])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    during, chances = 0, 100
    try:
        while not during and chances:
            chances -= 1
            arena[:] = 0
            mover.submit(Job("store", (plan_copy(planes, ids, [0]),), arena))
            while not mover.drain(0):
                during += bool(arena[(ids.size - 1) << 15] == 0 and arena[0] == 1)
            assert mover.poll()[0].ok
    finally:
        sys.setswitchinterval(interval)
        mover.close()
    assert during > 0


@pytest.mark.parametrize(
    ("planes", "bundles"),
    [
        ([Plane(n * 64 * 4096, 4096, 4096) for n in range(32)], 1),  # layers outermost
        ([Plane(n * 4096, 32 * 4096, 4096) for n in range(32)], 1),  # blocks outermost
        ([Plane(n * 4096, 4096, 4096, n) for n in range(3)], 3),  # regions of their own
        ([Plane(0, 99, 9), Plane(9, 99, 9), Plane(18, 99, 4), Plane(22, 99, 4)], 2),
        ([Plane(0, 9, 9), Plane(600, 9, 9), Plane(1300, 9, 9)], 2),  # unevenly spaced
    ],
)
def test_layers_that_lie_evenly_move_in_one_call(planes: list[Plane], bundles: int) -> None:
    group = GroupPlanes(0, tuple(planes), blocks=64, chunk_blocks=2)
    regions = [np.zeros(32 * 64 * 4096, np.uint8)] * 3
    assert len(host._bundles(group, regions)) == bundles


# ------------------------------------------------------------ misuse: typed, before a byte moves


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda a: Job("store", (plan(1, 2),), a[: 2 * SLOT]), "another boot"),
        (lambda a: Job("store", (plan_copy(FOREIGN, [[1]], [0]),), a), "mover has not"),
        (lambda a: Job("store", (plan(1),), a.view(np.uint16)), "flat uint8"),
        (lambda a: Job("store", (plan(1),), a[::2]), "flat uint8"),
        (
            lambda a: Job("load", (plan_copy(PLANES, [[1], [1]], [0, SLOT]),), a),
            "into one block",
        ),
    ],
)
def test_a_job_that_does_not_fit_is_refused(
    mover: HostMover, arena: U8Array, bad: Any, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        mover.submit(bad(arena))
    assert mover.drain(0)
    assert not arena.any()


def test_read_only_memory_is_refused(mover: HostMover, arena: U8Array) -> None:
    arena.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        mover.submit(job("load", arena, 1))


def test_planes_outside_their_region_are_refused() -> None:
    with pytest.raises(UsageError, match="ends at byte"):
        HostMover([np.zeros(64 * 4096 - 1, np.uint8)], [PLANES])
