"""What becomes of registered memory when its arena ends: in a child too, and beside jobs."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest

from kvass.transfer import pins
from kvass.transfer.pins import Pins
from kvass.transfer.runtime import Fault
from kvass.types import PAGE
from tests.support.gpu.fake_cuda import FakeCuda

WINDOWS = 4
TAKES_S = 0.25


class Rig:
    """``WINDOWS`` windows of an arena, all of them registered."""

    def __init__(self) -> None:
        self.fake = FakeCuda(1)
        self.lock = threading.Lock()
        self.now, self.takes_s = 100.0, TAKES_S
        self.pins = Pins(self.fake, PAGE, wake=self.wake, clock=lambda: self.now)
        unregister = self.fake.unregister

        def slow(address: int) -> Fault | None:
            self.now += self.takes_s
            return unregister(address)

        self.fake.unregister = slow  # type: ignore[method-assign]
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


def test_windows_are_unpinned_one_by_one(rig: Rig) -> None:
    """As long as one took the engine has the driver's locks to itself."""
    assert not rig.pins.reap(), "nothing has ended"
    del rig.arena
    assert rig.pins.reap()
    assert rig.left == WINDOWS - 1
    assert not rig.pins.reap()
    rig.now += TAKES_S / 2
    assert not rig.pins.reap()
    rig.now += TAKES_S / 2
    assert rig.pins.reap()
    assert rig.left == WINDOWS - 2
    assert rig.fake.mapped
    for _ in range(2):
        rig.now += TAKES_S
        assert rig.pins.reap()
    assert not rig.pins.ended
    assert not rig.fake.mapped
    assert not rig.fake.violations


def test_in_the_end_all_is_unpinned(rig: Rig) -> None:
    rig.pins.let_go()
    assert not rig.left
    del rig.arena
    assert not rig.fake.mapped


@pytest.mark.parametrize("why", ["no time", "abandoned", "abandoned, half done", "refused"])
def test_what_is_registered_stays_mapped(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The driver goes by addresses: what comes there next would be taken for pinned. The process's
    end unpins it."""
    monkeypatch.setattr(pins, "_left", kept := list[object]())
    if why == "no time":
        rig.takes_s = pins.PATIENCE_S / 2
        rig.pins.let_go()
        assert rig.left == WINDOWS - 2
        del rig.arena
    elif why == "refused":
        rig.fake.plans.fail["unregister"] = {1}
        rig.pins.let_go()
        assert rig.left == 1
        del rig.arena
    else:
        if why == "abandoned, half done":
            del rig.arena
            assert rig.pins.reap()
        rig.pins.abandon()
        rig.__dict__.pop("arena", None)
        assert not rig.pins.ended
        assert not rig.pins.reap()
    del rig.pins, rig.pinned
    gc.collect()
    assert rig.fake.mapped
    assert not rig.fake.violations
    kept.clear()
    gc.collect()
    assert not rig.fake.mapped, "nobody else keeps it"


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
