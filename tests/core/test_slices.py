"""Work that would take long goes on in slices; what it is about has ended at once all the same."""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import Send, TierLoad, TierProbe, TierStore
from kvass.core.handlers import clearing, writing
from tests.core.rig import BOOT, GRACE_S, RESERVE_S, WIDTH, Engine, Rig, digests
from tests.core.tier_rig import TierRig


@pytest.fixture
def few() -> Rig:
    """Ends two leases or reservations at a time."""
    return Rig(pages=64, extent=4, instance_write_share=1.0, core={"slice_ends": 2})


@pytest.fixture
def waiting() -> tuple[TierRig, Engine]:
    """Ten lookups of two chunks wait for one load; two of them go on in a step."""
    rig = TierRig(pages=64, extent=4, instance_write_share=1.0, core={"slice_ends": 2})
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    for _ in range(10):
        message = m.Lookup(seq=7, request="r", digests=digests("a", "b"), width=WIDTH)
        rig.say(e.scheduler, message)
    rig.settle(TierProbe)
    rig.replies(e.scheduler)
    return rig, e


def ticks(rig: Rig) -> int:
    """How many slices are left to do."""
    done = 0
    while (due := rig.machine.next_deadline()) is not None and due <= rig.now:
        rig.wait(0)
        done += 1
        assert done < 1000
    return done


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
    ticks(rig)
    assert rig.gauge("reservations", "quarantined_bytes", "l1_used_bytes") == (0, 0, 0)


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
    assert ticks(few) > 3
    assert few.gauge("leases", "reservations") == (0, 8)
    few.wait(GRACE_S)
    ticks(few)
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
    ticks(few)
    assert few.gauge("reservations", "quarantined_bytes") == (0, 0)


def test_what_a_lost_scheduler_never_handed_over_ends_slice_by_slice(few: Rig) -> None:
    e = few.engine()
    e.store(*range(8))
    for i in range(8):
        e.lookup(i)
        e.reserve(100 + i)
    few.lose(e.scheduler)
    assert few.gauge("leases", "reservations") != (0, 0)
    ticks(few)
    assert few.gauge("leases", "reservations", "quarantined_bytes") == (0, 0, 0)


def test_a_late_commit_publishes_nothing_before_its_turn_comes(few: Rig) -> None:
    e = few.engine()
    grants = [e.reserve(i).reservation for i in range(9)]
    e.hand_over(reservations=tuple(grants))
    few.now += RESERVE_S
    e.commit(grants[-1])
    assert e.holds(8) == 0
    ticks(few)
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
    ticks(few)
    assert few.count("discarded_moved") == 20


def test_a_reserve_that_would_take_long_is_decided_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "COST_A_STEP", 3 * writing.COST_OF_AN_ITEM)
    monkeypatch.setattr(writing, "ROWS_A_STEP", 4)
    rig = Rig(pages=64, extent=4, instance_write_share=1.0)
    e = rig.engine()
    items = [m.ReserveItem(request="r", digests=digests(f"{i}a", f"{i}b")) for i in range(5)]
    grants = e.reserve_items(*items)
    assert [g.chunks for g in grants] == [(0, 1), (0, 1), (), (), ()]
    assert [g.later for g in grants] == [-1, -1, 0, 0, 0]
    grants = e.reserve_items(*items[2:])
    assert [g.chunks for g in grants] == [(0, 1), (0, 1), ()]
    long = m.ReserveItem(request="l", digests=digests(*range(10)), first=1)
    (grant,) = e.reserve_items(long)
    assert (grant.chunks, grant.later) == ((1, 2, 3, 4), 5)
    long.first = grant.later
    (grant,) = e.reserve_items(long)
    assert (grant.chunks, grant.later) == ((5, 6, 7, 8), 9)


@pytest.mark.parametrize("good", [True, False])
def test_lookups_that_wait_for_one_load_are_answered_in_slices(
    waiting: tuple[TierRig, Engine], good: bool
) -> None:
    """A row that the tier could not fill is free when the last of them has let it go."""
    rig, e = waiting
    (load,) = rig.open_ops(TierLoad)
    rig.answer(load, True, good)
    assert [r.chunks for r in rig.replies(e.scheduler)] == [1 + good] * 2
    assert ticks(rig) == 4
    assert [r.chunks for r in rig.replies(e.scheduler)] == [1 + good] * 8
    assert rig.gauge("rows", "rows_loading", "leases") == (1 + good, 0, 10)
    e.quit()
    ticks(rig)
    assert rig.gauge("pins", "promotions") == (0, 0)


def test_lookups_of_a_lost_scheduler_end_in_slices(waiting: tuple[TierRig, Engine]) -> None:
    rig, e = waiting
    rig.lose(e.scheduler)
    assert rig.gauge("promotions") == (8,)
    rig.settle(TierLoad)
    ticks(rig)
    assert rig.gauge("promotions", "pins", "leases", "rows") == (0, 0, 0, 2)
    assert not rig.replies(e.scheduler)


def test_lookups_that_a_clear_makes_miss_are_answered_in_slices(
    waiting: tuple[TierRig, Engine],
) -> None:
    rig, e = waiting
    rig.say(e.scheduler, m.Clear(seq=9))
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0, 0]
    rig.settle(TierLoad)
    assert ticks(rig) > 2
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0] * 8
    assert rig.gauge("promotions", "pins", "leases", "rows") == (0, 0, 0, 0)


def test_a_clear_of_everything_goes_on_namespace_by_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is answered once, at the end. Others are served meanwhile: an engine clears its own
    namespace at once, one is forgotten, and what is stored in a new one stays."""
    monkeypatch.setattr(clearing, "MOST_CLEARS", 1)
    rig = Rig(pages=64, namespaces=5, core={"slice_ends": 2})
    engines = [rig.engine(f"e{i}", identity={"model": f"m{i}"}) for i in range(5)]
    for e in engines:
        e.store("a")
    visitor = rig.open()
    assert rig.say(visitor, m.Clear(seq=9, everything=True)) == []
    assert rig.gauge("rows") == (3,)
    assert rig.code(visitor, m.Clear(seq=10, everything=True)) == "limit"
    assert engines[0].clear() == 1
    engines[1].quit()
    new = rig.engine("new", identity={"model": "new"})
    new.store("b")
    said = []
    while rig.machine.next_deadline() == rig.now:
        rig.wait(0)
        said += [x.message for x in rig.last if isinstance(x, Send) and x.session == visitor]
    assert said == [m.Cleared(seq=9, rows=3)]
    assert rig.gauge("rows") == (1,)
    assert new.holds("b") == 1


def test_a_clear_of_everything_goes_on_though_its_asker_is_gone(few: Rig) -> None:
    for i in range(5):
        few.engine(f"e{i}", identity={"model": f"m{i}"}).store("a")
    visitor = few.open()
    few.say(visitor, m.Clear(seq=9, everything=True))
    few.lose(visitor)
    assert ticks(few) >= 2
    assert few.gauge("rows") == (0,)


def test_the_queue_of_a_dead_tier_stays_in_proportion_to_l1() -> None:
    """Rows that left L1 leave the queue, a few at a time; what is still there is flushed later."""
    rig = TierRig(pages=256, extent=4, instance_write_share=1.0)
    e = rig.ready()
    rig.down = True
    for first in range(0, 3_000, 10):
        e.store(*range(first, first + 10))
        rig.settle(TierStore)
        assert rig.status["tiers"][0]["flush_queue_rows"] <= 3 * 256 + 256
    rig.down = False
    rig.wait(300)
    rig.settle()
    assert len(rig.shelves[0]) == 256
