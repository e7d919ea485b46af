"""``CacheMachine``: one step at a time, and when the next one is due."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.effects import Faulted, Lost, Received, TierEpoch, TierReport, TiersAre
from tests.core.rig import LEASE_S, RESERVE_S, Rig
from tests.core.tier_rig import TierRig


def test_events_of_sessions_that_are_gone_do_nothing(rig: Rig) -> None:
    assert rig.step(Lost(5)) == []
    assert rig.step(Received(5, m.Ping(seq=1))) == []
    assert rig.step(Faulted(5, "bad_frame", "too long")) == []


def test_time_does_not_go_back(rig: Rig) -> None:
    rig.wait(5)
    rig.now -= 1
    with pytest.raises(AssertionError, match="time went back"):
        rig.open()


def test_a_request_of_a_machine_that_has_nothing_to_do_leaves_it_without_a_deadline(
    rig: Rig,
) -> None:
    rig.engine()
    assert rig.machine.next_deadline() is None


def test_the_next_step_is_due_when_the_first_lease_or_reservation_ends(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    e.reserve("b")
    assert rig.machine.next_deadline() == rig.now + RESERVE_S
    e.lookup("a")
    assert rig.machine.next_deadline() == rig.now + LEASE_S
    rig.wait(LEASE_S)
    assert rig.machine.next_deadline() == rig.now + RESERVE_S - LEASE_S


def test_the_next_step_is_due_now_while_cleared_memory_is_left() -> None:
    rig = Rig(core={"slice_slots": 1})
    e = rig.engine()
    e.store(*range(16))
    e.clear()
    assert rig.machine.next_deadline() == rig.now
    assert rig.finish() == 3
    assert rig.machine.next_deadline() is None


def test_a_reply_has_the_number_of_its_request_and_a_refusal_is_counted(rig: Rig) -> None:
    session = rig.open()
    assert rig.ask(session, m.Ping(seq=41)).seq == 41
    assert rig.code(session, m.Lookup(seq=42, request="r", digests=b"")) == "not_registered"
    assert rig.count("refused_not_registered") == 1


def test_a_session_owes_from_its_grant_to_its_commit(rig: Rig) -> None:
    e = rig.engine()
    (worker,) = e.workers
    assert not rig.machine.owes(worker)
    grant = e.begin("a")
    assert rig.machine.owes(worker)
    assert not rig.machine.owes(e.scheduler)
    e.commit(grant.reservation)
    assert not rig.machine.owes(worker)


def test_a_session_has_a_namespace_while_all_ranks_are_there(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    ns = rig.machine.namespace(e.scheduler)
    assert ns is not None
    assert ns.digest == e.namespace
    rig.lose(e.workers[1])
    assert rig.machine.namespace(e.scheduler) is None
    assert rig.machine.namespace(e.workers[1]) is None
    assert rig.machine.namespace(rig.open()) is None


def test_an_added_tier_has_the_number_of_a_removed_one_of_its_name_or_the_next() -> None:
    rig = TierRig(core={"tiers": ("a", "b")})
    assert rig.machine.tier_number("a", {0, 1}) == 2
    assert rig.machine.tier_number("a", {1}) == 2, "the one of that name is used"
    rig.step(TiersAre((1,), ("b",)))
    assert rig.machine.tier_number("a", {1}) == 0
    assert rig.machine.tier_number("c", {1}) == 2
    assert rig.machine.tier_number("a", {0, 1}) == 2


def test_a_tier_that_comes_back_up_is_asked_for_its_epochs_again() -> None:
    rig = TierRig()
    rig.ready()
    rig.step(TierReport(0, {"up": False}))
    assert not rig.open_ops(TierEpoch)
    rig.step(TierReport(0, {"up": False}))
    assert not rig.open_ops(TierEpoch)
    rig.step(TierReport(0, {"up": True}))
    assert len(rig.open_ops(TierEpoch)) == 1
