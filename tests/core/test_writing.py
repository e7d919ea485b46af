"""The messages of a store: reserve, abort and handing over; what is refused changes nothing."""

from __future__ import annotations

from kvass import messages as m
from tests.core.rig import BOOT, RESERVE_S, WIDTH, Rig, digests

CLEAN = (0, 0)


def held(rig: Rig) -> tuple[int, ...]:
    return rig.gauge("reservations", "quarantined_bytes")


def test_a_grant_names_its_chunks_slots_and_deadline(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    message = m.Reserve(
        seq=5, items=[m.ReserveItem(request="r", digests=digests("a", "b", "c"))], width=WIDTH
    )
    reply = rig.ask(e.scheduler, message)
    assert (reply.seq, reply.boot, reply.deadline_s) == (5, BOOT, rig.now + RESERVE_S)
    (grant,) = reply.grants
    assert grant.chunks == (1, 2)
    assert len(grant.slots[0]) == 2


def test_a_scheduler_cancels_before_the_handover_and_the_slots_are_free_at_once(rig: Rig) -> None:
    e = rig.engine()
    grant = e.reserve("a")
    assert e.abort(grant.reservation) == []
    assert held(rig) == CLEAN
    assert e.abort(grant.reservation) == e.commit(grant.reservation) == []
    assert e.holds("a") == 0


def test_after_the_handover_only_ranks_abort(rig: Rig) -> None:
    e = rig.engine()
    grant = e.begin("a")
    assert [x.code for x in e.abort(grant.reservation)] == ["bad_rank"]
    e.commit(grant.reservation)
    assert e.holds("a") == 1


def test_a_reserve_before_all_ranks_registered_is_refused_and_asked_again(rig: Rig) -> None:
    session = rig.open()
    rig.register(session)
    item = m.ReserveItem(request="r", digests=digests("a"))
    message = m.Reserve(seq=3, items=[item], width=WIDTH)
    assert rig.code(session, message) == "not_registered"
    rig.register(rig.open(), rank=0)
    assert rig.ask(session, message).grants[0].reservation


def test_a_refused_handover_hands_nothing_over(rig: Rig) -> None:
    one, two = rig.engine("one"), rig.engine("two")
    mine, theirs = one.reserve("a"), two.reserve("b")
    both = (mine.reservation, theirs.reservation)
    assert [x.code for x in one.hand_over(reservations=both)] == ["not_yours"]
    assert one.abort(mine.reservation) == []
    assert held(rig) == (1, 0)
