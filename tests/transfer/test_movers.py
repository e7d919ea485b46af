"""The promises of ``transfer/base.py``: order, ends, deadlines, errors. The GPU is a fake."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from kvass.errors import UsageError
from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import host
from kvass.transfer.base import Done, Job, Kind, Mover, U8Array
from kvass.transfer.device_mover import DeviceMover
from kvass.transfer.host import HostMover
from tests.support.gpu.fake_gpu import FakeGpu
from tests.support.waiting import eventually

PLANES = GroupPlanes(0, (Plane(0, 4096, 4096),), blocks=64, chunk_blocks=1)
SLOT = PLANES.shard_bytes
FOREIGN = GroupPlanes(1, (Plane(0, 4096, 4096),), blocks=64, chunk_blocks=1)


class Jobs:
    """A mover between 64 blocks, each full of its own number, and an arena of zeros.

    Rigs also have ``hold`` (no copy ends until ``let_go``), ``begun`` (a copy is under way, or has
    been) and ``fail_once`` (the next copy fails).
    """

    now = 100.0
    memory: U8Array
    arena: U8Array
    mover: Mover

    def job(self, kind: Kind, *blocks: int, **more: Any) -> Job:
        return Job(kind, (plan(*blocks),), self.arena, name=blocks, **more)

    def submit(self, kind: Kind, *blocks: int, **more: Any) -> None:
        self.mover.submit(self.job(kind, *blocks, **more))

    def ends(self) -> list[tuple[object, str]]:
        """What was settled since the last call, once all is."""
        assert self.mover.drain(10)
        return [(done.job.name, done.outcome) for done in self.mover.poll()]


class HostRig(Jobs):
    """``rows``: the first blocks of the rows that were copied. ``waiting``: copies on hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.entered, self.failing = threading.Event(), threading.Event(), False
        self.helper_opened = threading.Event()
        self.let_go()
        self.rows: list[int] = []
        self.waiting, self.lock = 0, threading.Lock()
        for kind in ("store", "load"):
            monkeypatch.setattr(host.Bundle, kind, self._wrap(getattr(host.Bundle, kind)))
        self.memory = np.repeat(np.arange(64, dtype=np.uint8), 4096)
        self.arena = np.zeros(64 * SLOT, np.uint8)
        self.mover = HostMover([self.memory], [PLANES], clock=lambda: self.now)

    def _wrap(self, right: Any) -> Any:
        def gated(bundle: Any, arena: U8Array, row: Any) -> None:
            self.entered.set()
            with self.lock:
                self.waiting += 1
            helps = threading.current_thread().name == "kvass-copy-2"
            assert (self.helper_opened if helps else self.opened).wait(10)
            with self.lock:
                self.waiting -= 1
            failing, self.failing = self.failing, False
            if failing:
                raise MemoryError("no room")
            self.rows.append(int(row.blocks[0]))
            right(bundle, arena, row)

        return gated

    def hold(self) -> None:
        self.helper_opened.clear()
        self.opened.clear()

    def hold_helper(self) -> None:
        """No copy of the second thread ends, and every other does."""
        self.helper_opened.clear()
        self.opened.set()

    def let_go(self) -> None:
        self.helper_opened.set()
        self.opened.set()

    def begun(self) -> bool:
        return self.entered.is_set()

    def fail_once(self) -> None:
        self.failing = True


class DeviceRig(Jobs):
    mover: DeviceMover

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None, **more: Any) -> None:
        self.fake = FakeGpu(1)
        region, self.memory = self.fake.allocate(64 * 4096)
        self.memory[:] = np.repeat(np.arange(64, dtype=np.uint8), 4096)
        self.arena = self.fake.map(64 * SLOT)
        self.mover = DeviceMover(self.fake, [region], [PLANES], clock=lambda: self.now, **more)

    def hold(self) -> None:
        self.fake.stopped = True

    def let_go(self) -> None:
        self.fake.stopped = False

    def begun(self) -> bool:
        return bool(self.fake.copied)

    def fail_once(self) -> None:
        self.fake.plans.fail["copy"] = {0}


Rig = HostRig | DeviceRig


def plan(*blocks: int) -> CopyPlan:
    return plan_copy(PLANES, [[b] for b in blocks], [SLOT * b for b in blocks])


@pytest.fixture(params=[HostRig, DeviceRig])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig: Rig = request.param(monkeypatch)
    yield rig
    rig.let_go()
    rig.mover.close()
    assert not isinstance(rig, DeviceRig) or rig.fake.violations == []


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostRig]:
    rig = HostRig(monkeypatch)
    yield rig
    rig.let_go()
    rig.mover.close()


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostRig]:
    """The thread that helps with loads ends at once: the order is that of one thread."""
    monkeypatch.setattr(HostMover, "_help", lambda mover, cpus: None)
    rig = HostRig(monkeypatch)
    yield rig
    rig.let_go()
    rig.mover.close()


# ------------------------------------------------------------ settling


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_job_without_plans_waits_for_nothing(rig: Rig, kind: Kind) -> None:
    """A rank without layers of a group has none, and the engine may be busy."""
    rig.hold()
    rig.mover.submit(Job(kind, (), rig.arena))
    assert rig.mover.drain(10)
    assert [done.outcome for done in rig.mover.poll()] == ["done"]


def test_a_verification_that_raises_fails_its_job_alone(rig: Rig) -> None:
    def raises(job: Job) -> Any:
        raise ValueError("a defect")

    rig.mover.submit(Job("store", (plan(1),), rig.arena, verify=raises))
    rig.mover.submit(Job("store", (plan(2),), rig.arena))
    assert rig.mover.drain(10)
    ends = {done.outcome: done.error for done in rig.mover.poll()}
    assert ends == {"failed": "ValueError: a defect", "done": ""}


def test_submit_does_not_wait_and_poll_tells_in_order(rig: Rig) -> None:
    rig.hold()
    rig.submit("store", 1, 2)
    rig.submit("store", 3, 4)
    assert eventually(rig.begun)
    assert rig.mover.poll() == []
    assert not rig.mover.drain(0.01)
    rig.let_go()
    assert rig.ends() == [((1, 2), "done"), ((3, 4), "done")]
    assert rig.mover.poll() == []
    assert rig.arena[SLOT * 4] == 4


def test_callback_runs_on_the_copy_thread_before_poll(rig: Rig) -> None:
    seen: list[tuple[int, str]] = []

    def on_done(done: Done) -> None:
        assert rig.mover.poll() == []
        seen.append((threading.get_ident(), done.outcome))

    rig.submit("store", 1, on_done=on_done)
    assert rig.mover.drain(10)
    ((thread, outcome),) = seen
    assert thread != threading.get_ident()
    assert outcome == "done"


def test_a_raising_callback_costs_nobody_an_end(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def on_done(done: Done) -> None:
        raise ValueError("mine")

    rig.submit("store", 1, on_done=on_done)
    rig.submit("store", 2)
    assert rig.ends() == [((1,), "done"), ((2,), "done")]
    assert "on_done of job (1,)" in caplog.text


def test_a_job_without_rows_is_done(rig: Rig) -> None:
    nothing = plan_copy(PLANES, np.empty((0, 1), np.int64), [])
    rig.mover.submit(Job("load", (nothing,), rig.arena))
    rig.mover.submit(Job("load", (), rig.arena))
    assert rig.ends() == [(None, "done")] * 2


def test_a_copy_that_fails_fails_its_job_only(rig: Rig) -> None:
    rig.fail_once()
    rig.submit("store", 1, 2, 3)
    assert rig.ends() == [((1, 2, 3), "failed")]
    rig.submit("store", 4)
    assert rig.ends() == [((4,), "done")]
    assert not rig.arena[SLOT * 3] or isinstance(rig, DeviceRig), "it is not gone on with"


def test_past_its_deadline_a_job_touches_nothing(rig: Rig) -> None:
    """Law 5."""
    rig.submit("store", 1, deadline_s=rig.now)
    rig.submit("store", 2, deadline_s=rig.now + 1)
    assert rig.ends() == [((1,), "late"), ((2,), "done")]
    assert (rig.arena[SLOT * 1], rig.arena[SLOT * 2]) == (0, 2)


def test_a_load_that_ends_late_is_late(rig: Rig) -> None:
    """Law 5; and until then it is not settled, because its copy may still write."""
    rig.hold()
    rig.submit("load", 1, deadline_s=rig.now + 1)
    assert eventually(rig.begun)
    rig.now += 1
    assert not rig.mover.drain(0.02)
    rig.let_go()
    assert rig.mover.drain(10)
    (done,) = rig.mover.poll()
    assert (done.outcome, done.ok, done.seconds) == ("late", False, 1.0)


def test_without_a_thread_a_job_is_refused_and_the_next_one_tries_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that may have no more threads for a while."""

    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="new thread"):
            rig.submit("store", 1)
    rig.submit("store", 2)
    assert rig.ends() == [((2,), "done")]


def test_an_idle_mover_keeps_no_arena_alive(rig: Rig) -> None:
    gone = weakref.ref(rig.arena)
    rig.submit("store", 1)
    assert rig.ends() == [((1,), "done")]
    del rig.arena
    if isinstance(rig, DeviceRig):  # of the copies it was asked for, it remembers all
        rig.fake.copied.clear()
    assert eventually(lambda: gc.collect() >= 0 and gone() is None)


# ------------------------------------------------------------ order


def test_equal_jobs_keep_their_order(rig: Rig) -> None:
    names = [(1, 2), (3, 4), (5, 6)]
    for blocks in names:
        rig.submit("load", *blocks)
    assert [name for name, _ in rig.ends()] == names


def test_loads_go_first_and_wait_for_one_row_only(on_host: HostRig) -> None:
    on_host.hold()
    on_host.submit("store", 1, 2, 3)
    assert eventually(on_host.begun)
    on_host.submit("load", 11, 12)
    on_host.let_go()
    on_host.ends()
    assert on_host.rows == [1, 11, 12, 2, 3]


def test_the_time_of_copying_is_that_of_the_rows_without_the_wait(
    on_host: HostRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "monotonic", lambda: on_host.now)
    on_host.hold()
    on_host.submit("load", 1, 2, 3)
    assert eventually(on_host.begun)
    on_host.submit("load", 4, 5, 6)

    def tick(_: Done) -> None:
        on_host.now += 10.0

    on_host.now += 1.0
    on_host.mover.submit(on_host.job("load", 7, on_done=tick))
    on_host.let_go()
    assert on_host.mover.drain(10)
    took = {done.job.name: done.copying_s for done in on_host.mover.poll()}
    assert took == {(1, 2, 3): 1.0, (7,): 0.0, (4, 5, 6): 0.0}


def test_what_is_copied_now_waits_for_nothing_that_is_queued(on_host: HostRig) -> None:
    ended, go_on, where = threading.Event(), threading.Event(), list[object]()

    def blocks(_: Done) -> None:
        ended.set()
        assert go_on.wait(10)

    on_host.submit("load", 1, on_done=blocks)
    assert ended.wait(10)
    on_host.submit("load", 2)
    job = on_host.job("load", 3, 4, on_done=lambda _: where.append(threading.current_thread()))
    on_host.mover.copy_now(job)
    assert where == [threading.current_thread()]
    assert [done.job for done in on_host.mover.poll()] == [job]
    assert on_host.rows == [1, 3, 4]
    go_on.set()
    assert on_host.ends() == [((1,), "done"), ((2,), "done")]


def test_what_is_copied_now_has_the_same_ends(on_host: HostRig) -> None:
    def end(**more: Any) -> str:
        on_host.mover.copy_now(on_host.job("load", 1, 2, **more))
        (done,) = on_host.mover.poll()
        return done.outcome

    assert end() == "done"
    on_host.rows.clear()
    assert end(deadline_s=on_host.now) == "late"
    assert on_host.rows == [], "past its deadline it touches nothing"
    assert end(verify=lambda _: ("differs", "why")) == "differs"
    on_host.fail_once()
    assert end() == "failed"
    with pytest.raises(UsageError):
        on_host.mover.copy_now(Job("load", (), np.zeros(8, np.float32)))
    on_host.mover.close()
    with pytest.raises(UsageError):
        end()


def test_a_copy_that_ends_after_its_deadline_is_late_though_it_was_copied_now(
    on_host: HostRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(mover: Any, *args: Any) -> None:
        on_host.now += 1.0

    monkeypatch.setattr(HostMover, "_copy", slow)
    on_host.mover.copy_now(on_host.job("load", 1, deadline_s=on_host.now + 1.0))
    assert [done.outcome for done in on_host.mover.poll()] == ["late"]


def test_a_short_load_overtakes_a_long_one_that_no_one_starves(on_host: HostRig) -> None:
    """Of short loads arriving all the time, only those go first that came before the long one's
    own number of bytes had moved."""
    on_host.hold()
    on_host.submit("load", 1, 2, 3, 4)
    assert eventually(on_host.begun)
    arrivals = iter(range(21, 29))

    def one_more(_: Done) -> None:
        if (block := next(arrivals, None)) is not None:
            on_host.submit("load", block, on_done=one_more)

    on_host.submit("load", 20, on_done=one_more)
    on_host.let_go()
    on_host.ends()
    rows = on_host.rows
    assert rows[:3] == [1, 20, 21]
    long = [i for i, block in enumerate(rows) if block < 5]
    assert long[-1] < len(rows) - 1
    assert long[-1] <= 2 * 4


# ------------------------------------------------------------ the second thread


def test_two_threads_copy_a_load_and_one_copies_a_store(two_threads: HostRig) -> None:
    two_threads.hold()
    two_threads.submit("store", 1, 2, 3)
    assert not eventually(lambda: two_threads.waiting > 1, 0.05)
    two_threads.submit("load", 11, 12)
    assert eventually(lambda: two_threads.waiting == 2), "the second thread copies the load"
    two_threads.let_go()
    assert sorted(two_threads.ends()) == [((1, 2, 3), "done"), ((11, 12), "done")]
    assert sorted(two_threads.rows) == [1, 2, 3, 11, 12]


def test_a_job_is_settled_when_the_second_thread_has_left_it(two_threads: HostRig) -> None:
    two_threads.hold()
    two_threads.submit("load", 1, 2, 3, 4)
    two_threads.submit("store", 5)
    assert eventually(lambda: two_threads.waiting == 2)
    two_threads.hold_helper()
    assert eventually(lambda: len(two_threads.rows) == 3)
    assert not two_threads.mover.drain(0.05)
    assert 5 not in two_threads.rows, "the load is settled first"
    two_threads.let_go()
    assert two_threads.ends() == [((1, 2, 3, 4), "done"), ((5,), "done")]


def test_a_failed_job_is_settled_when_the_second_thread_has_left_it(two_threads: HostRig) -> None:
    two_threads.hold()
    two_threads.submit("load", 1, 2, 3, 4)
    assert eventually(lambda: two_threads.waiting == 2)
    two_threads.fail_once()
    two_threads.hold_helper()
    assert not two_threads.mover.drain(0.05)
    two_threads.let_go()
    assert two_threads.ends() == [((1, 2, 3, 4), "failed")]
    assert two_threads.rows in ([1], [2])


def test_a_cancelled_job_is_settled_when_the_second_thread_has_left_it(
    two_threads: HostRig,
) -> None:
    two_threads.hold()
    two_threads.submit("load", 1, 2, 3, 4)
    assert eventually(lambda: two_threads.waiting == 2)
    closing = threading.Thread(target=two_threads.mover.close)
    closing.start()
    assert eventually(lambda: two_threads.mover._closed)
    two_threads.hold_helper()
    assert not two_threads.mover.drain(0.05)
    two_threads.let_go()
    closing.join(10)
    assert two_threads.ends() == [((1, 2, 3, 4), "cancelled")]
    assert sorted(two_threads.rows) == [1, 2]


# ------------------------------------------------------------ close


def test_close_settles_every_job_once(rig: Rig) -> None:
    ends: list[tuple[object, str]] = []

    def on_done(done: Done) -> None:
        ends.append((done.job.name, done.outcome))

    rig.hold()
    for blocks in ((1, 2), (3, 4), (5, 6)):
        rig.submit("store", *blocks, on_done=on_done)
    assert eventually(rig.begun)

    def let_go_once_closing() -> None:
        assert eventually(lambda: rig.mover._closed)
        rig.let_go()

    threading.Thread(target=let_go_once_closing).start()
    rig.mover.close()
    rig.mover.close()
    assert [(done.job.name, done.outcome) for done in rig.mover.poll()] == ends
    # A GPU's copy that is under way ends after the jobs that close() cancels.
    assert sorted(str(name) for name, _ in ends) == ["(1, 2)", "(3, 4)", "(5, 6)"]
    if isinstance(rig, HostRig):
        assert ends[-1] == ((5, 6), "cancelled")
        assert rig.rows == [1]
    with pytest.raises(UsageError, match="closed"):
        rig.submit("store", 5)


def test_close_from_a_callback_is_misuse(rig: Rig) -> None:
    said: list[str] = []

    def on_done(done: Done) -> None:
        try:
            rig.mover.close()
        except UsageError as e:
            said.append(str(e))

    rig.submit("store", 1, on_done=on_done)
    assert rig.mover.drain(10)
    assert said == ["close() was called from on_done; call it from another thread"]


# ------------------------------------------------------------ misuse: typed, before a byte moves


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda a: Job("store", (plan(1, 2),), a[: 2 * SLOT]), "another boot"),
        (lambda a: Job("store", (plan_copy(FOREIGN, [[1]], [0]),), a), "mover has not"),
        (lambda a: Job("store", (plan(1),), a.view(np.uint16)), "flat uint8"),
        (lambda a: Job("store", (plan(1),), a[::2]), "flat uint8"),
        (lambda a: Job("load", (plan_copy(PLANES, [[1], [1]], [0, SLOT]),), a), "into one block"),
        (lambda a: Job("load", (plan(1),), np.frombuffer(bytes(64 * SLOT), np.uint8)), "read-only"),
    ],
)
def test_a_job_that_does_not_fit_is_refused(rig: Rig, bad: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        rig.mover.submit(bad(rig.arena))
    assert rig.mover.drain(0)
    assert not rig.arena.any()


def test_planes_outside_their_region_are_refused() -> None:
    with pytest.raises(UsageError, match="ends at byte"):
        HostMover([np.zeros(64 * 4096 - 1, np.uint8)], [PLANES])


# ------------------------------------------------------------ how the host copies


@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("scattered", [True, False])
def test_the_copy_does_not_hold_the_gil(kind: Kind, scattered: bool) -> None:
    """While one row of 128 MiB is copied this thread goes on; holding the GIL it never could. Of
    slices with so few pages numpy does not release it by itself.

    A busy machine may have had no core for this thread just then: it gets more than one chance.
    """
    count, page_bytes = 128, 1 << 20
    planes = GroupPlanes(0, (Plane(0, page_bytes, page_bytes),), count + 1, count)
    region, arena = (
        np.ones((count + 1) * page_bytes, np.uint8),
        np.ones(count * page_bytes, np.uint8),
    )
    ids = np.arange(count)[None] + 1
    if scattered:
        ids = np.random.default_rng(0).permutation(ids, axis=1)
    to, first, last = arena, 0, (count - 1) * page_bytes
    if kind == "load":
        to, first, last = region, int(ids[0, 0]) * page_bytes, int(ids[0, -1]) * page_bytes
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    during, chances = 0, 30
    try:
        with closing(HostMover([region], [planes])) as mover:
            while not during and chances:
                chances -= 1
                to[:] = 0
                mover.submit(Job(kind, (plan_copy(planes, ids, [0]),), arena))
                while not mover.drain(0):
                    during += bool(to[last] != to[first])
                assert mover.poll()[0].ok
                arena[:] = region[:] = 1
    finally:
        sys.setswitchinterval(interval)
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
    assert len(host.bundles_of(group, regions)) == bundles
