"""Who may have the daemon stop (``TakeOver``), and what goes on until it has."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.effects import Leave, Stopping
from tests.core.rig import WIDTH, Rig, digests

PLACE = "/dev/shm/kvass"


@pytest.fixture
def rig() -> Rig:
    return Rig(core={"place": PLACE})


def take_over(rig: Rig) -> m.Leaving:
    reply = rig.ask(rig.open(own=True), m.TakeOver(seq=3, arena=PLACE, within_s=2.0))
    assert isinstance(reply, m.Leaving)
    return reply


def test_the_daemon_leaves_within_the_given_time(rig: Rig) -> None:
    assert take_over(rig).seq == 3
    assert [e for e in rig.last if isinstance(e, Leave)] == [Leave(2.0)]


def test_only_the_daemons_own_user_takes_over_and_no_engine(rig: Rig) -> None:
    message = m.TakeOver(seq=3, arena=PLACE)
    assert rig.code(rig.open(uid=7), message) == "forbidden"
    assert rig.code(rig.engine(own=True).scheduler, message) == "forbidden"
    assert not any(isinstance(e, Leave) for e in rig.last)
    assert not rig.machine.busy


@pytest.mark.parametrize("arena", ["", "/dev/shm/other"])
def test_memory_that_is_elsewhere_is_not_lost_by_mistake(rig: Rig, arena: str) -> None:
    e = rig.engine()
    reply = rig.ask(rig.open(own=True), m.TakeOver(seq=3, arena=arena))
    assert isinstance(reply, m.Error)
    assert f"this daemon's is {PLACE}" in reply.text
    assert e.reserve("a").chunks == (0,), "it goes on as before"


def test_what_is_being_written_is_waited_for_and_nothing_more_is_granted(rig: Rig) -> None:
    e = rig.engine()
    grant = e.begin("a")
    take_over(rig)
    item = m.ReserveItem(request="r", digests=digests("b"))
    assert rig.code(e.scheduler, m.Reserve(seq=4, items=[item], width=WIDTH)) == "shutting_down"
    busy = [rig.machine.busy]
    e.commit(grant.reservation)
    assert [*busy, rig.machine.busy] == [True, False]
    assert e.holds("a") == 1, "it answers to the end"


def test_what_nobody_can_complete_is_not_waited_for(rig: Rig) -> None:
    e = rig.engine()
    e.begin("a")
    take_over(rig)
    rig.lose(*e.workers)
    assert not rig.machine.busy


@pytest.mark.parametrize("place", [PLACE, ""])
def test_a_daemon_that_is_stopped_waits_if_its_memory_lasts(place: str) -> None:
    rig = Rig(core={"place": place})
    e = rig.engine()
    grant = e.begin("a")
    rig.step(Stopping())
    assert rig.machine.busy == bool(place), "without a place nobody could read the row"
    item = m.ReserveItem(request="r", digests=digests("b"))
    granted = rig.ask(e.scheduler, m.Reserve(seq=4, items=[item], width=WIDTH))
    assert isinstance(granted, m.Error) == bool(place)
    e.commit(grant.reservation)
    assert not place or not rig.machine.busy
