"""What goes on until a daemon that is stopped has ended."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.effects import Stopping
from tests.core.rig import WIDTH, Rig, digests


@pytest.fixture
def rig() -> Rig:
    return Rig(core={"lasting": True})


def test_what_is_being_written_is_waited_for_and_nothing_more_is_granted(rig: Rig) -> None:
    e = rig.engine()
    grant = e.begin("a")
    rig.step(Stopping())
    item = m.ReserveItem(request="r", digests=digests("b"))
    assert rig.code(e.scheduler, m.Reserve(seq=4, items=[item], width=WIDTH)) == "shutting_down"
    busy = [rig.machine.busy]
    e.commit(grant.reservation)
    assert [*busy, rig.machine.busy] == [True, False]
    assert e.holds("a") == 1, "it answers to the end"


def test_what_nobody_can_complete_is_not_waited_for(rig: Rig) -> None:
    e = rig.engine()
    e.begin("a")
    rig.step(Stopping())
    rig.lose(*e.workers)
    assert not rig.machine.busy


def test_a_daemon_whose_memory_ends_with_it_waits_for_nobody() -> None:
    """The control: nobody could read the row."""
    rig = Rig()
    e = rig.engine()
    e.begin("a")
    rig.step(Stopping())
    assert not rig.machine.busy
    e.store("b")
