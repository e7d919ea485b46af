"""Leases and reservations end once, and no slot is reused while it may be written (laws 2-5, 7)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import ProcessEnded, Watch
from kvass.types import DEVICE_S, PAGE, Timing
from tests.core.rig import BOOT, GRACE_S, LEASE_S, RESERVE_S, Rig, digests


@pytest.fixture
def few() -> Rig:
    """Ends two leases or reservations at a time."""
    return Rig(pages=64, extent=4, instance_write_share=1.0, core={"slice_ends": 2})


def test_ready_once_every_writer_committed(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    grant = e.begin("a")
    e.commit(grant.reservation, 0)
    assert e.holds("a") == 0
    assert e.commit(grant.reservation, 0) == []
    assert e.holds("a") == 0
    e.commit(grant.reservation, 1)
    assert e.holds("a") == 1
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)


def test_a_commit_after_the_deadline_frees_and_publishes_nothing(rig: Rig) -> None:
    e = rig.engine()
    grant = e.begin("a", "b")
    assert rig.machine.next_deadline() == rig.now + RESERVE_S
    rig.wait(RESERVE_S)
    assert rig.gauge("reservations", "quarantined_bytes") == (1, 2 * PAGE)
    rig.wait(1000)
    assert rig.gauge("reservations", "quarantined_bytes") == (1, 2 * PAGE)
    e.commit(grant.reservation)
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)
    assert e.holds("a") == 0
    assert rig.count("discarded_late") == 1


def test_quarantined_slots_are_nobodys_until_the_last_rank_settled(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    grant = e.begin("a")
    e.abort(grant.reservation, 0)
    assert rig.gauge("reservations", "quarantined_bytes") == (1, 2 * PAGE)
    e.abort(grant.reservation, 0)
    assert rig.gauge("reservations", "quarantined_bytes") == (1, 2 * PAGE)
    e.commit(grant.reservation, 1)
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)
    assert e.holds("a") == 0
    assert rig.count("discarded_aborted") == 1


def test_a_dead_writers_slots_come_clean_after_the_dma_grace(rig: Rig) -> None:
    e = rig.engine()
    e.begin("a")
    rig.lose(e.workers[0])
    assert rig.gauge("reservations", "quarantined_bytes") == (1, PAGE)
    assert rig.machine.next_deadline() == rig.now + GRACE_S
    rig.wait(GRACE_S - 0.01)
    assert rig.gauge("reservations", "quarantined_bytes") == (1, PAGE)
    rig.wait(0.01)
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)
    assert rig.gauge("rows") == (0,)


def test_an_exiting_writers_slots_wait_for_its_end_however_late(rig: Rig) -> None:
    e = rig.engine()
    e.begin("a")
    rig.lose(e.workers[0], exiting=True)
    assert rig.last == [Watch(e.workers[0], math.inf)]
    rig.wait(100 * (GRACE_S + RESERVE_S))
    assert rig.gauge("reservations", "quarantined_bytes") == (1, PAGE)
    assert rig.machine.next_deadline() is None
    rig.step(ProcessEnded(e.workers[0]))
    assert rig.gauge("reservations", "quarantined_bytes") == (1, PAGE)
    rig.wait(min(DEVICE_S, GRACE_S))
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)


def test_the_end_of_a_writers_process_frees_its_slots_before_a_long_grace() -> None:
    rig = Rig(core={"timing": Timing(dma_grace_s=300.0)})
    e = rig.engine()
    e.begin("a")
    rig.lose(e.workers[0])
    assert rig.last == [Watch(e.workers[0], rig.now + 300.0)]
    rig.wait(10.0)
    rig.step(ProcessEnded(e.workers[0]))
    rig.wait(DEVICE_S - 0.01)
    assert rig.gauge("reservations", "quarantined_bytes") == (1, PAGE)
    rig.wait(0.01)
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)


def test_an_end_late_in_the_grace_does_not_prolong_it(rig: Rig) -> None:
    e = rig.engine()
    e.begin("a")
    rig.lose(e.workers[0])
    rig.wait(GRACE_S - 0.01)
    rig.step(ProcessEnded(e.workers[0]))
    rig.wait(0.01)
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)
    rig.step(ProcessEnded(e.workers[0]))
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)


def test_each_lost_writer_is_waited_for(rig: Rig) -> None:
    """The end of one process says nothing about another one's device."""
    e = rig.engine(ranks=2)
    e.begin("a")
    rig.lose(*e.workers, exiting=True)
    for worker in e.workers:
        rig.wait(GRACE_S)
        assert rig.gauge("reservations", "quarantined_bytes") == (1, 2 * PAGE)
        rig.step(ProcessEnded(worker))
    rig.wait(GRACE_S)
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)


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
    assert rig.gauge("reservations", "quarantined_bytes") == (1, 2 * ranks * PAGE)


def test_after_a_writers_death_the_others_still_have_to_settle(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    grant = e.begin("a")
    rig.lose(e.workers[0])
    rig.wait(GRACE_S)
    assert rig.gauge("reservations", "quarantined_bytes") == (1, 2 * PAGE)
    e.commit(grant.reservation, 1)
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)
    assert rig.gauge("rows") == (0,)


def test_the_longest_grace_counts(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    e.reserve("a")
    rig.lose(e.workers[0])
    rig.wait(GRACE_S / 2)
    rig.lose(e.workers[1])
    rig.wait(GRACE_S / 2)
    assert rig.gauge("reservations", "quarantined_bytes") == (1, 2 * PAGE)
    rig.wait(GRACE_S / 2)
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)


def test_losing_the_scheduler_cancels_only_reservations_not_handed_over(rig: Rig) -> None:
    e = rig.engine()
    kept, lost = e.reserve("a"), e.reserve("b")
    e.hand_over(reservations=(kept.reservation,))
    rig.lose(e.scheduler)
    assert rig.gauge("reservations", "quarantined_bytes") == (1, 0)
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
    assert rig.gauge("reservations", "quarantined_bytes") == (1, PAGE)


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


def test_the_share_comes_back_when_slots_do(rig: Rig) -> None:
    e = rig.engine()
    grant = e.begin(*range(16))
    rig.wait(RESERVE_S)
    assert e.reserve("x").chunks == ()
    e.abort(grant.reservation, 0)
    assert e.reserve("x").chunks == (0,)


def test_every_named_reader_owes_one_release(rig: Rig) -> None:
    e = rig.engine(ranks=3)
    e.store("a")
    lease = e.lookup("a", readers=(0, 2)).lease
    e.hand_over(leases=(lease,))
    assert e.release(lease, 1) == []
    e.release(lease, 0)
    assert rig.gauge("leases", "pins")[0] == 1
    e.release(lease, 2)
    assert rig.gauge("leases", "pins") == (0, 0)


def test_a_second_release_by_one_rank_changes_nothing(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    e.store("a")
    lease = e.lookup("a", readers=(0, 1)).lease
    e.hand_over(leases=(lease,))
    assert e.release(lease, 0) == e.release(lease, 0) == []
    assert rig.gauge("leases", "pins")[0] == 1


def test_a_lease_lapses_at_its_deadline_and_a_late_release_is_no_error(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    found = e.lookup("a")
    assert found.deadline_s == rig.now + LEASE_S == rig.machine.next_deadline()
    rig.wait(LEASE_S - 0.01)
    assert rig.gauge("leases", "pins") == (1, 1)
    rig.wait(0.01)
    assert rig.gauge("leases", "pins") == (0, 0)
    assert e.release(found.lease) == []
    assert rig.count("lapsed_leases") == 1


def test_losing_the_scheduler_ends_only_leases_not_handed_over(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    kept, _ = e.lookup("a").lease, e.lookup("a").lease
    e.hand_over(leases=(kept,))
    rig.lose(e.scheduler)
    assert rig.gauge("leases", "pins") == (1, 1)
    e.release(kept)
    assert rig.gauge("leases", "pins") == (0, 0)


def test_losing_a_rank_releases_for_it(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    e.store("a")
    lease = e.lookup("a", readers=(0, 1)).lease
    e.hand_over(leases=(lease,))
    rig.lose(e.workers[1])
    assert rig.gauge("leases", "pins")[0] == 1
    e.release(lease, 0)
    assert rig.gauge("leases", "pins") == (0, 0)


def test_a_digest_named_twice_is_pinned_once_per_lease(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    e.release(e.lookup("a", "a").lease)
    assert rig.gauge("rows", "pins") == (1, 0)


def test_of_a_lost_rank_everything_ends_slice_by_slice(few: Rig) -> None:
    e = few.engine(ranks=2, world_size=2)
    e.store(*range(8))
    leases = [e.lookup(i, readers=(0, 1)).lease for i in range(8)]
    grants = [e.reserve(100 + i).reservation for i in range(8)]
    e.hand_over(tuple(leases), tuple(grants))
    for i in range(8):
        e.release(leases[i], 1)
        e.commit(grants[i], 1)
    few.lose(e.workers[0])
    assert few.gauge("leases", "reservations") != (0, 8)
    assert few.finish() > 3
    assert few.gauge("leases", "reservations") == (0, 8)
    few.wait(GRACE_S)
    few.finish()
    assert few.gauge("reservations", "quarantined_bytes") == (0, 0)


def test_a_rank_that_is_back_commits_nothing_of_the_one_before_it(few: Rig) -> None:
    e = few.engine()
    grants = [e.reserve(i).reservation for i in range(40)]
    e.hand_over(reservations=tuple(grants))
    few.lose(e.workers[0])
    e.workers[0] = few.open()
    few.register(e.workers[0], rank=0)
    for grant in reversed(grants):
        e.commit(grant)
    assert [e.holds(i) for i in range(40)] == [0] * 40
    few.wait(GRACE_S)
    few.finish()
    assert few.gauge("reservations", "quarantined_bytes") == (0, 0)


def test_what_a_lost_scheduler_never_handed_over_ends_slice_by_slice(few: Rig) -> None:
    e = few.engine()
    e.store(*range(8))
    for i in range(8):
        e.lookup(i)
        e.reserve(100 + i)
    few.lose(e.scheduler)
    assert few.gauge("leases", "reservations") != (0, 0)
    few.finish()
    assert few.gauge("leases", "reservations", "quarantined_bytes") == (0, 0, 0)


def test_a_late_commit_publishes_nothing_before_its_turn_comes(few: Rig) -> None:
    e = few.engine()
    grants = [e.reserve(i).reservation for i in range(9)]
    e.hand_over(reservations=tuple(grants))
    few.now += RESERVE_S
    e.commit(grants[-1])
    assert e.holds(8) == 0
    few.finish()
    for grant in grants:
        e.commit(grant)
    assert [e.holds(i) for i in range(9)] == [0] * 9
    assert few.gauge("reservations", "quarantined_bytes") == (0, 0)


def test_a_move_of_many_reservations_goes_on_in_slices(few: Rig) -> None:
    e = few.engine()
    items = [m.ReserveItem(request="r", digests=digests(i)) for i in range(20)]
    grants = [g for i in range(0, 20, 5) for g in e.reserve_items(*items[i : i + 5])]
    e.hand_over(reservations=tuple(g.reservation for g in grants))
    terms: dict[str, Any] = {"instance": "e", "identity": {"model": "m"}, "chunk_tokens": 16}
    few.say(e.scheduler, m.Register(seq=2, generation=b"new", **terms))
    assert few.count("discarded_moved") == 2
    e.commit(grants[-1].reservation)
    assert few.count("discarded_moved") == 5, "two more, and the one that was named"
    assert e.holds(19) == 0
    few.finish()
    assert few.count("discarded_moved") == 20


def test_a_commit_of_a_namespace_that_is_gone_frees_its_slots() -> None:
    rig = Rig(pages=64, extent=4, namespaces=2, instance_write_share=1.0)
    e = rig.engine(ranks=2)
    grant = e.begin("a")
    e.clear()
    rig.lose(e.scheduler, e.workers[0])
    worker = e.workers[1]
    rig.engine("x", identity={"model": "x"})
    rig.engine("y", identity={"model": "y"})
    message = m.Commit(boot=BOOT, reservation=grant.reservation, rank=1)
    assert rig.say(worker, message) == []
    rig.wait(GRACE_S)
    rig.finish()
    assert rig.gauge("reservations", "quarantined_bytes", "l1_used_bytes") == (0, 0, 0)
