"""What becomes of registered memory when its arena ends; in a child that a fork made, too."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from kvass.transfer import pins
from kvass.transfer.device import Fault
from kvass.transfer.pins import Pins
from kvass.types import PAGE
from tests.support.gpu.fake_gpu import FakeGpu

WINDOWS = 4
TAKES_S = 0.25


class Rig:
    """``WINDOWS`` windows of an arena, all of them registered."""

    def __init__(self) -> None:
        self.fake = FakeGpu(1)
        self.now = 100.0
        self.pins = Pins(self.fake, PAGE, lambda: self.now)
        unregister = self.fake.unregister

        def slow(address: int) -> Fault | None:
            self.now += TAKES_S
            return unregister(address)

        self.fake.unregister = slow  # type: ignore[method-assign]
        self.arena = self.fake.map(WINDOWS * PAGE)
        assert self.pins.of(self.arena).want(np.arange(WINDOWS), WINDOWS * PAGE).all()

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
    for left in range(WINDOWS - 1, -1, -1):
        assert rig.fake.mapped
        assert rig.pins.reap()
        assert rig.left == left
        assert not rig.pins.reap()
        rig.now += TAKES_S / 2
        assert not rig.pins.reap()
        rig.now += TAKES_S / 2
    assert not rig.fake.mapped
    assert not rig.fake.violations


def test_in_the_end_all_is_unpinned(rig: Rig) -> None:
    rig.pins.close()
    assert not rig.left
    del rig.arena
    assert not rig.fake.mapped


@pytest.mark.parametrize("why", ["abandoned", "abandoned, half done", "refused"])
def test_what_is_registered_stays_mapped(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The driver goes by addresses: what comes there next would be taken for pinned. The process's
    end unpins it."""
    monkeypatch.setattr(pins, "_kept", kept := list[object]())
    if why == "refused":
        rig.fake.plans.fail["unregister"] = {1}
        rig.pins.close()
        assert rig.left == 1
        del rig.arena
    else:
        if why == "abandoned, half done":
            del rig.arena
            assert rig.pins.reap()
        rig.pins.abandon()
        rig.__dict__.pop("arena", None)
        rig.now += 1
        assert not rig.pins.reap()
    del rig.pins
    gc.collect()
    assert rig.fake.mapped
    assert not rig.fake.violations
    kept.clear()
    gc.collect()
    assert not rig.fake.mapped, "nobody else keeps it"


def test_a_child_that_a_fork_made_asks_the_driver_nothing(rig: Rig) -> None:
    """... and takes no lock when its copy of an arena ends: a thread that it does not have may hold
    it."""
    child = os.fork()
    if not child:
        del rig.arena
        os._exit(0 if rig.left == WINDOWS else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rig.fake.mapped
