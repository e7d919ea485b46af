"""What becomes of registered memory when its arena ends: in a child too, and beside jobs."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from kvass.testing.fake_cuda import FakeCuda
from kvass.transfer import pins
from kvass.transfer.pins import Pins
from kvass.types import PAGE

WINDOWS = 4


class Rig:
    """``WINDOWS`` windows of an arena, all of them registered."""

    def __init__(self) -> None:
        self.fake = FakeCuda(1)
        self.lock = threading.Lock()
        self.pins = Pins(self.fake, PAGE, wake=self.wake)
        self.arena = self.fake.map(WINDOWS * PAGE)
        self.pinned = self.pins.of(self.arena)
        assert self.pinned.want(range(WINDOWS), WINDOWS * PAGE)

    def wake(self) -> None:
        with self.lock:
            pass

    @property
    def left(self) -> int:
        return len(self.fake.registered)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_beside_jobs_a_window_is_unpinned_now_and_then(rig: Rig) -> None:
    """It takes long, and the thread that does it is the one that sees to jobs."""
    now = 100.0
    assert not rig.pins.reap(now, busy=False), "nothing has ended"
    del rig.arena
    assert rig.pins.reap(now, busy=True)
    assert not rig.pins.reap(now, busy=True)
    assert rig.left == WINDOWS - 1
    now += pins.EVERY_S
    assert rig.pins.reap(now, busy=True)
    assert rig.left == WINDOWS - 2
    assert rig.fake.mapped
    assert rig.pins.reap(now, busy=False)
    assert rig.pins.reap(now, busy=False)
    assert not rig.pins.reap(now, busy=False)
    assert not rig.fake.mapped
    assert not rig.fake.violations


def test_in_the_end_all_is_unpinned(rig: Rig) -> None:
    rig.pins.let_go(lambda: 0.0)
    assert not rig.left
    del rig.arena
    assert not rig.fake.mapped


def test_what_takes_too_long_stays_mapped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's end unpins it; unmapping it before would not."""
    kept: list[pins.Pinned] = []
    monkeypatch.setattr(pins, "_left", kept)
    times = iter([0.0, 0.0, pins.PATIENCE_S / 2, pins.PATIENCE_S])
    rig.pins.let_go(lambda: next(times))
    assert rig.left == WINDOWS - 2
    del rig.arena
    assert rig.fake.mapped
    assert kept == [rig.pinned]
    assert not rig.fake.violations


def test_a_child_that_a_fork_made_takes_no_lock_when_an_arena_ends(rig: Rig) -> None:
    """... for it may be held, by a thread that the child does not have."""
    with rig.lock:  # as the copy thread might
        child = os.fork()
        if not child:
            signal.alarm(10)
            del rig.arena
            os._exit(0 if rig.pinned._mapping is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del rig.arena
    assert rig.pins.ended
    assert rig.left == WINDOWS, "the parent's are as they were"
