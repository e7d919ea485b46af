"""Laws 2-4 and 12, writing: every shard in time, or nothing; a slot being written is nobody's."""

from __future__ import annotations

import math

import pytest

from kvass import messages as m
from kvass.core.effects import ProcessEnded, Watch
from kvass.types import DEVICE_S, PAGE, Timing
from tests.core.rig import BOOT, GRACE_S, RESERVE_S, WIDTH, Rig, digests, layout

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


def test_slots_come_in_the_order_of_the_groups_in_the_mask(rig: Rig) -> None:
    e = rig.engine(layout=layout(1, 2, 3))
    grant = e.reserve("a", groups=0b110)
    (second, third) = (s.offsets(0, n * PAGE)[0] for s, n in zip(grant.slots, (2, 3), strict=True))
    assert second != third
    e.hand_over(reservations=(grant.reservation,))
    e.commit(grant.reservation)
    used = [g["used_bytes"] for g in rig.status["namespaces"][0]["groups"]]
    assert used == [0, 2 * PAGE, 3 * PAGE]


def test_ready_once_every_writer_committed(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    grant = e.begin("a")
    e.commit(grant.reservation, 0)
    assert e.holds("a") == 0
    assert e.commit(grant.reservation, 0) == []
    assert e.holds("a") == 0
    e.commit(grant.reservation, 1)
    assert e.holds("a") == 1
    assert held(rig) == CLEAN


def test_a_key_being_written_is_not_granted_again(rig: Rig) -> None:
    one, two = rig.engine("one"), rig.engine("two")
    assert one.reserve("a").chunks == (0,)
    assert two.reserve("a", "b").chunks == (1,)
    grant = two.reserve("a")
    assert (grant.reservation, grant.chunks, grant.slots) == (0, (), ())


def test_a_key_named_twice_is_granted_once(rig: Rig) -> None:
    e = rig.engine()
    assert e.reserve("a", "a").chunks == (0,)
    item = m.ReserveItem(request="r", digests=digests("b"))
    assert [g.chunks for g in e.reserve_items(item, item)] == [(0,), ()]


# ---------------------------------------------------------------- late, dead, aborted


def test_a_commit_after_the_deadline_frees_and_publishes_nothing(rig: Rig) -> None:
    e = rig.engine()
    grant = e.begin("a", "b")
    assert rig.machine.next_deadline() == rig.now + RESERVE_S
    rig.wait(RESERVE_S)
    assert held(rig) == (1, 2 * PAGE)
    rig.wait(1000)
    assert held(rig) == (1, 2 * PAGE)
    e.commit(grant.reservation)
    assert held(rig) == CLEAN
    assert e.holds("a") == 0
    assert rig.count("discarded_late") == 1


def test_a_discarded_key_may_be_granted_anew_elsewhere(rig: Rig) -> None:
    e = rig.engine()
    late = e.begin("a")
    rig.wait(RESERVE_S)
    anew = e.reserve("a")
    assert anew.slots[0].offsets(0, PAGE) != late.slots[0].offsets(0, PAGE)
    e.commit(anew.reservation)
    e.commit(late.reservation)
    assert e.holds("a") == 1


def test_quarantined_slots_are_nobodys_until_the_last_rank_settled(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    grant = e.begin("a")
    e.abort(grant.reservation, 0)
    assert held(rig) == (1, 2 * PAGE)
    e.abort(grant.reservation, 0)
    assert held(rig) == (1, 2 * PAGE)
    e.commit(grant.reservation, 1)
    assert held(rig) == CLEAN
    assert e.holds("a") == 0
    assert rig.count("discarded_aborted") == 1


def test_a_dead_writers_slots_come_clean_after_the_dma_grace(rig: Rig) -> None:
    e = rig.engine()
    e.begin("a")
    rig.lose(e.workers[0])
    assert held(rig) == (1, PAGE)
    assert rig.machine.next_deadline() == rig.now + GRACE_S
    rig.wait(GRACE_S - 0.01)
    assert held(rig) == (1, PAGE)
    rig.wait(0.01)
    assert held(rig) == CLEAN
    assert rig.gauge("rows") == (0,)


def test_an_exiting_writers_slots_wait_for_its_end_however_late(rig: Rig) -> None:
    e = rig.engine()
    e.begin("a")
    rig.lose(e.workers[0], exiting=True)
    assert rig.last == [Watch(e.workers[0], math.inf)]
    rig.wait(100 * (GRACE_S + RESERVE_S))
    assert held(rig) == (1, PAGE)
    assert rig.machine.next_deadline() is None
    rig.step(ProcessEnded(e.workers[0]))
    assert held(rig) == (1, PAGE)
    rig.wait(min(DEVICE_S, GRACE_S))
    assert held(rig) == CLEAN


def test_the_end_of_a_writers_process_frees_its_slots_before_a_long_grace() -> None:
    rig = Rig(core={"timing": Timing(dma_grace_s=300.0)})
    e = rig.engine()
    e.begin("a")
    rig.lose(e.workers[0])
    assert rig.last == [Watch(e.workers[0], rig.now + 300.0)]
    rig.wait(10.0)
    rig.step(ProcessEnded(e.workers[0]))
    rig.wait(DEVICE_S - 0.01)
    assert held(rig) == (1, PAGE)
    rig.wait(0.01)
    assert held(rig) == CLEAN


def test_an_end_late_in_the_grace_does_not_prolong_it(rig: Rig) -> None:
    e = rig.engine()
    e.begin("a")
    rig.lose(e.workers[0])
    rig.wait(GRACE_S - 0.01)
    rig.step(ProcessEnded(e.workers[0]))
    rig.wait(0.01)
    assert held(rig) == CLEAN
    rig.step(ProcessEnded(e.workers[0]))
    assert held(rig) == CLEAN


def test_each_lost_writer_is_waited_for(rig: Rig) -> None:
    """The end of one process says nothing about another one's device."""
    e = rig.engine(ranks=2)
    e.begin("a")
    rig.lose(*e.workers, exiting=True)
    for worker in e.workers:
        rig.wait(GRACE_S)
        assert held(rig) == (1, 2 * PAGE)
        rig.step(ProcessEnded(worker))
    rig.wait(GRACE_S)
    assert held(rig) == CLEAN


def test_who_owed_nothing_is_not_watched(rig: Rig) -> None:
    e = rig.engine()
    lease = e.store("a") and e.lookup("a").lease
    assert lease
    assert rig.machine.owes(e.workers[0])
    assert not rig.machine.owes(e.scheduler)
    rig.lose(e.scheduler, *e.workers, exiting=True)
    assert not any(isinstance(effect, Watch) for effect in rig.last)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dead_writers_keys_are_anybodys_at_once(rig: Rig, ranks: int) -> None:
    """Only its slots wait for the grace."""
    victim, other = rig.engine("victim", ranks), rig.engine("other", ranks)
    lost = victim.begin("a", "b")
    rig.lose(victim.workers[0])
    anew = other.reserve("a", "b")
    assert anew.chunks == (0, 1)
    for rank in range(ranks):
        (old, new) = (set(g.slots[0].offsets(rank, PAGE)) for g in (lost, anew))
        assert old.isdisjoint(new)
    other.hand_over(reservations=(anew.reservation,))
    for rank in range(ranks):
        other.commit(anew.reservation, rank)
    assert other.holds("a", "b") == 2
    assert held(rig) == (1, 2 * ranks * PAGE)


def test_after_a_writers_death_the_others_still_have_to_settle(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    grant = e.begin("a")
    rig.lose(e.workers[0])
    rig.wait(GRACE_S)
    assert held(rig) == (1, 2 * PAGE)
    e.commit(grant.reservation, 1)
    assert held(rig) == CLEAN
    assert rig.gauge("rows") == (0,)


def test_the_longest_grace_counts(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    e.reserve("a")
    rig.lose(e.workers[0])
    rig.wait(GRACE_S / 2)
    rig.lose(e.workers[1])
    rig.wait(GRACE_S / 2)
    assert held(rig) == (1, 2 * PAGE)
    rig.wait(GRACE_S / 2)
    assert held(rig) == CLEAN


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


def test_losing_the_scheduler_cancels_only_what_was_not_handed_over(rig: Rig) -> None:
    e = rig.engine()
    kept, lost = e.reserve("a"), e.reserve("b")
    e.hand_over(reservations=(kept.reservation,))
    rig.lose(e.scheduler)
    assert held(rig) == (1, 0)
    e.commit(kept.reservation)
    e.commit(lost.reservation)
    assert rig.gauge("rows") == (1,)
    assert rig.count("discarded_cancelled") == 1


def test_a_rank_that_came_back_owes_nothing_of_its_former_life(rig: Rig) -> None:
    e = rig.engine()
    grant = e.begin("a")
    rig.lose(e.workers[0])
    e.workers[0] = rig.open()
    rig.register(e.workers[0], rank=0)
    assert e.commit(grant.reservation) == []
    assert e.holds("a") == 0
    assert held(rig) == (1, PAGE)


# ---------------------------------------------------------------- clear


def test_clear_forgets_what_is_ready(rig: Rig) -> None:
    e, twin, other = rig.engine(), rig.engine("e2"), rig.engine("o", identity={"model": "o"})
    e.store("a", "b")
    other.store("a")
    assert e.clear() == 2
    assert [x.holds("a") for x in (e, twin, other)] == [0, 0, 1]
    assert e.clear() == 0


def test_what_was_reserved_before_a_clear_is_discarded_at_commit(rig: Rig) -> None:
    e = rig.engine()
    before = e.begin("a")
    assert e.clear() == 0
    after = e.reserve("a")
    assert after.chunks == (0,)
    e.commit(before.reservation)
    assert e.holds("a") == 0
    e.hand_over(reservations=(after.reservation,))
    e.commit(after.reservation)
    assert e.holds("a") == 1
    assert rig.count("discarded_cleared") == 1


def test_a_row_that_is_read_while_cleared_is_freed_at_its_last_release(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    one, two = e.lookup("a").lease, e.lookup("a").lease
    e.clear()
    e.release(one)
    assert rig.gauge("rows", "pins") == (0, 1)
    rig.wait(0)
    assert rig.status["l1_used_bytes"] > 0
    e.release(two)
    rig.wait(0)
    assert rig.gauge("pins", "l1_used_bytes") == (0, 0)


def test_an_engine_clears_its_own_namespace_only(rig: Rig) -> None:
    e = rig.engine()
    assert rig.code(e.scheduler, m.Clear(seq=3, everything=True)) == "forbidden"
    assert rig.code(e.scheduler, m.Clear(seq=3, namespace=e.namespace)) == "forbidden"


def test_a_visitor_clears_one_namespace_or_all(rig: Rig) -> None:
    one, two = rig.engine("one"), rig.engine("two", identity={"model": "o"})
    one.store("a")
    two.store("a")
    visitor = rig.open()
    assert rig.ask(visitor, m.Clear(seq=3, namespace=one.namespace)).rows == 1
    assert (one.holds("a"), two.holds("a")) == (0, 1)
    assert rig.ask(visitor, m.Clear(seq=3, everything=True)).rows == 1
    assert two.holds("a") == 0
    assert rig.code(visitor, m.Clear(seq=3, namespace=b"?")) == "bad_value"
    assert rig.code(visitor, m.Clear(seq=3)) == "bad_value"


def test_an_incomplete_instance_cannot_clear_yet(rig: Rig) -> None:
    session = rig.open()
    rig.register(session)
    assert rig.code(session, m.Clear(seq=3)) == "not_registered"


# ---------------------------------------------------------------- limits and refusals


def test_one_instance_writes_at_most_its_share(rig: Rig) -> None:
    e, other = rig.engine(), rig.engine("other")
    names = [f"k{i}" for i in range(40)]
    assert e.reserve(*names).chunks == tuple(range(16))
    assert e.reserve("x").chunks == ()
    assert other.reserve("x").chunks == (0,)


def test_the_share_comes_back_when_slots_do(rig: Rig) -> None:
    e = rig.engine()
    grant = e.begin(*range(16))
    rig.wait(RESERVE_S)
    assert e.reserve("x").chunks == ()
    e.abort(grant.reservation, 0)
    assert e.reserve("x").chunks == (0,)


def test_open_reservations_are_limited() -> None:
    rig = Rig(reservations_per_instance=2)
    e = rig.engine()
    assert e.reserve("a").reservation
    assert e.reserve("b").reservation
    assert not e.reserve("c").reservation


def test_keys_of_all_items_of_a_message_are_limited() -> None:
    rig = Rig(keys_per_message=3)
    e = rig.engine()
    items = [m.ReserveItem(request="r", digests=digests("a", "b"))] * 2
    assert rig.code(e.scheduler, m.Reserve(seq=3, items=items, width=WIDTH)) == "limit"
    assert held(rig) == CLEAN


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"groups": 0}, "bad_value"),
        ({"groups": -1}, "bad_value"),
        ({"groups": 2}, "bad_value"),
        ({"first": 9}, "bad_value"),
        ({"request": ""}, "bad_value"),
    ],
)
def test_a_reserve_that_makes_no_sense_is_refused_whole(
    rig: Rig, wrong: dict[str, object], code: str
) -> None:
    e = rig.engine(ranks=2)
    good = {"request": "r", "digests": digests("a")}
    items = [m.ReserveItem(**good), m.ReserveItem(**{**good, **wrong})]  # type: ignore[arg-type]
    assert rig.code(e.scheduler, m.Reserve(seq=3, items=items, width=WIDTH)) == code
    assert held(rig) == CLEAN


def test_a_reserve_before_all_ranks_registered_is_refused_and_asked_again(rig: Rig) -> None:
    session = rig.open()
    rig.register(session)
    item = m.ReserveItem(request="r", digests=digests("a"))
    message = m.Reserve(seq=3, items=[item], width=WIDTH)
    assert rig.code(session, message) == "not_registered"
    rig.register(rig.open(), rank=0)
    assert rig.ask(session, message).grants[0].reservation


def test_a_reservation_of_another_instance_is_not_yours(rig: Rig) -> None:
    one, two = rig.engine("one"), rig.engine("two")
    grant = one.reserve("a")
    for answer in (
        two.commit(grant.reservation),
        two.abort(grant.reservation),
        two.abort(grant.reservation, 0),
        two.hand_over(reservations=(grant.reservation,)),
    ):
        assert [x.code for x in answer] == ["not_yours"]
    assert held(rig) == (1, 0)


def test_a_refused_handover_hands_nothing_over(rig: Rig) -> None:
    one, two = rig.engine("one"), rig.engine("two")
    mine, theirs = one.reserve("a"), two.reserve("b")
    both = (mine.reservation, theirs.reservation)
    assert [x.code for x in one.hand_over(reservations=both)] == ["not_yours"]
    assert one.abort(mine.reservation) == []
    assert held(rig) == (1, 0)


def test_unknown_reservations_wrong_boots_and_foreign_ranks_are_refused(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    number = e.reserve("a").reservation
    for bad in (number + 1, 0, -1, 1 << 62):
        message = m.Commit(boot=BOOT, reservation=bad)
        assert rig.code(e.workers[0], message) == "unknown_reservation"
    for kind in (m.Commit, m.Abort):
        assert rig.code(e.workers[0], kind(boot=b"", reservation=number, rank=0)) == "wrong_boot"
        message2 = kind(boot=BOOT, reservation=number, rank=1)
        assert rig.code(e.workers[0], message2) == "bad_rank"
    assert rig.code(e.scheduler, m.Commit(boot=BOOT, reservation=number, rank=0)) == "bad_rank"
    assert held(rig) == (1, 0)


def test_an_unregistered_session_settles_nothing(rig: Rig) -> None:
    number = rig.engine().reserve("a").reservation
    visitor = rig.open()
    for message in (
        m.Commit(boot=BOOT, reservation=number),
        m.Abort(boot=BOOT, reservation=number),
        m.HandedOver(boot=BOOT, reservations=(number,)),
        m.Release(boot=BOOT, lease=number),
    ):
        assert rig.code(visitor, message) == "not_registered"
