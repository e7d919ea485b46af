"""The rank's half of loads inside steps: when they are copied, what is reported, what is stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from kvass.client.parallel import ParallelStrategy
from kvass.engine import copier
from kvass.engine.boundary import Boundary
from kvass.engine.step_work import Load, StepWork, Store
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer.device_mover import DeviceMover
from kvass.transfer.host import HostMover
from kvass.types import PAGE, Slots

NEVER: Final = 1e12
PLANES: Final = GroupPlanes(0, (Plane(0, PAGE, PAGE),), blocks=8, chunk_blocks=2)


class Client:
    """A worker's client with one arena, full of 7, that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.buffer = np.full(8 * PAGE, 7, np.uint8)

    def arena(self, *of: Any) -> Any:
        def nothing(*_: Any) -> None:
            """No memory is to be allocated or closed."""

        return SimpleNamespace(
            buffer=self.buffer, populated=8 * PAGE, prepare=nothing, close=nothing
        )

    def __getattr__(self, name: str) -> Any:
        return lambda *about: self.told.append((name, about[-1] if about else 0))


class Side:
    """A copier over eight blocks of zeros."""

    def __init__(self) -> None:
        setup: Any = SimpleNamespace(strategy=ParallelStrategy())
        self.copier = copier.Copier(setup, 0, Boundary())
        self.memory, self.client = np.zeros(8 * PAGE, np.uint8), Client()
        self.copier._mover = HostMover([self.memory], [PLANES])
        self.copier._planes = (PLANES,)
        self.copier._client = self.client  # type: ignore[assignment]

    def step(self, number: int, *loads: Load, recovered: int = 0, computed: int = 0) -> bool:
        """One step. Whether it has stored what step ``computed`` has computed."""
        slots = Slots(((0,),), b"\0\0", (0).to_bytes(4, "little"))
        store = Store(number, b"boot", number, 0.0, NEVER, (slots,), ((1, 2),), computed or number)
        work = StepWork(number, [*loads], [store], number=number, recovered=recovered)
        self.copier.load(work)
        self.copier.store(work)
        assert self.copier._mover is not None
        assert self.copier._mover.drain(10)
        return ("commit", number) in self.client.told


def inside(name: str, deadline_s: float = NEVER) -> Load:
    slots = Slots(((0,),), b"\0\0", (0).to_bytes(4, "little"))
    return Load(name, b"boot", 1, 0.0, deadline_s, (slots,), ((3, 4),), (0,), in_step=(3, 4, 5))


@pytest.fixture
def side() -> Any:
    side = Side()
    yield side
    side.copier.close()


def test_it_has_ended_before_the_forward_pass_and_is_not_reported_as_asynchronous(
    side: Side,
) -> None:
    side.copier.load(StepWork(loads=[inside("a")], number=1))
    assert (side.memory.reshape(8, PAGE)[[2, 3, 4, 5], 0] == [0, 7, 7, 0]).all()
    assert side.client.told == [("release", 1)]
    assert side.copier.take_bad_blocks() == set()
    assert side.copier.results() == (set(), set())
    report = side.copier.take_report()
    assert report is not None
    assert (report.in_step, report.failed_step) == ({"a": True}, 0)


@pytest.mark.parametrize("verified", [False, True])
def test_whether_the_first_loads_were_verified_is_reported(side: Side, verified: bool) -> None:
    """Before that the scheduler plans no loads inside steps."""
    verifier: Any = SimpleNamespace(
        loads_verified=lambda planes: verified and planes == (PLANES,),
        check=lambda job, holds: ("done", ""),
        difference="",
        take_counts=dict,
    )
    side.copier._verifier = verifier
    side.copier.load(StepWork(loads=[inside("a")], number=1))
    assert side.copier.results() == (set(), set())
    report = side.copier.take_report()
    assert report is not None
    (copied,) = report.copied.values()
    assert (copied.bytes, copied.verified, copied.in_step) == (2 * PAGE, verified, True)


@pytest.mark.parametrize("why", ["late", "without a lease", "refused"])
def test_one_that_fails_is_reported_with_its_blocks_and_nothing_is_stored(
    side: Side, why: str
) -> None:
    assert side.step(1)
    load = inside("a", deadline_s=0.0 if why == "late" else NEVER)
    if why == "without a lease":
        load = Load("a", in_step=(3, 4, 5))
    client = side.copier._client
    side.copier._client = None if why == "refused" else client
    side.copier.load(StepWork(loads=[load], number=2))
    side.copier._client = client
    assert side.copier.take_bad_blocks() == {3, 4, 5}
    assert side.copier.take_bad_blocks() == set()
    assert side.copier.results() == (set(), set())
    report = side.copier.take_report()
    assert report is not None
    assert (report.in_step, report.failed_step) == ({"a": False}, 2)
    assert not side.step(2)
    assert not side.step(3)
    assert side.step(4, computed=1), "what an earlier step has computed is right"


def test_it_stores_again_once_all_failed_steps_are_taken_back(side: Side) -> None:
    """Step 3 fails, too, before the scheduler has heard of step 2."""
    assert side.step(1)
    assert not side.step(2, inside("a", 0.0))
    assert not side.step(3, inside("b", 0.0))
    assert side.step(4, recovered=2, computed=2), "the scheduler gave up what it had not sent"
    assert not side.step(5, recovered=2, computed=3)
    assert not side.step(6, recovered=2)
    assert side.step(7, recovered=3)


def test_only_a_mover_that_copies_in_this_thread_says_that_it_can() -> None:
    assert (HostMover.copies_now, DeviceMover.copies_now) == (True, False)
