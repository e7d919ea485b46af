"""Flushing: rows are pinned while a tier stores them, and a tier that is down gets them later."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvass.core.effects import (
    Stopping,
    TierReport,
    TierStore,
)
from kvass.core.tiers import epochs, flush
from kvass.core.tiers.flush import REST_S
from kvass.types import PAGE
from tests.core.rig import BOOT, layout
from tests.core.tier_rig import TierRig, names


@pytest.fixture
def rig() -> TierRig:
    return TierRig()


def test_what_is_ready_is_flushed_while_it_is_pinned(rig: TierRig) -> None:
    e = rig.ready()
    e.store("a", "b")
    (store,) = rig.open_ops(TierStore)
    assert rig.gauge("pins") == (2,)
    assert store.shard_bytes == (PAGE,)
    rig.answer_all()
    assert rig.gauge("pins") == (0,)
    assert len(rig.shelves[0]) == 2


def test_an_aborted_store_is_not_flushed(rig: TierRig) -> None:
    e = rig.ready()
    grant = e.begin("a")
    e.abort(grant.reservation, 0)
    rig.wait(100)
    assert not rig.open_ops(TierStore)


def test_flushing_is_bounded_and_goes_on(rig: TierRig) -> None:
    """An eighth of L1 at a time; what was evicted before its turn is counted."""
    e = rig.ready()
    e.store(*range(12))
    assert sum(len(op.records.keys) for op in rig.open_ops(TierStore)) == 8
    assert rig.status["tiers"][0]["flush_queue_rows"] == 4
    rig.forget_l1()
    rig.answer_all()
    assert len(rig.shelves[0]) == 8
    assert rig.count("flushes_lost") == 4
    assert not rig.flushing()


def test_what_a_tier_that_is_down_could_not_take_waits_for_it(rig: TierRig) -> None:
    """It is asked again after a second, and gets what is still there."""
    e = rig.ready()
    rig.down = True
    e.store("a", "b")
    for _ in range(3):
        rig.answer_all()
        assert rig.machine.next_deadline() == rig.now + REST_S
        assert not rig.flushing()
        rig.wait(REST_S)
        assert rig.open_ops(TierStore)
    rig.down = False
    rig.answer_all()
    assert len(rig.shelves[0]) == 2
    assert rig.machine.next_deadline() is None


def test_a_row_that_a_tier_refuses_is_not_offered_again(rig: TierRig) -> None:
    e = rig.ready()
    e.store("a", "b")
    (store,) = rig.open_ops(TierStore)
    rig.answer(store, True, False)
    assert not rig.asked
    assert rig.machine.next_deadline() is None
    assert rig.status["tiers"][0]["store_failures"] == 1


def test_what_fails_after_a_good_time_is_counted_until_a_store_works(rig: TierRig) -> None:
    e = rig.ready()
    for key, good, failing in (("a", True, 0), ("b", False, 1), ("c", False, 2), ("d", True, 0)):
        e.store(key)
        (store,) = rig.open_ops(TierStore)
        rig.answer(store, good)
        assert rig.status["tiers"][0]["failing_rows"] == failing


def test_stopping_flushes_what_was_promised_and_nothing_new(rig: TierRig) -> None:
    e = rig.ready()
    e.store(*range(12))
    rig.step(Stopping())
    assert rig.flushing()
    rig.answer_all()
    assert len(rig.shelves[0]) == 12
    assert not rig.flushing()
    e.store("more")
    assert not rig.flushing()


@pytest.mark.parametrize("down", [False, True])
def test_stopping_waits_for_an_epoch_that_is_asked_for(rig: TierRig, down: bool) -> None:
    e = rig.engine()
    e.store(*range(12))
    assert not rig.open_ops(TierStore)
    rig.step(Stopping())
    assert rig.flushing()
    rig.down = down
    rig.answer_all()
    assert len(rig.shelves[0]) == (0 if down else 12)
    assert not rig.flushing()


@pytest.mark.parametrize("told", [False, True])
def test_stopping_asks_a_tier_that_was_down_once_more(rig: TierRig, told: bool) -> None:
    """Also one that has not ``told`` its epoch yet."""
    e = rig.ready() if told else rig.engine()
    rig.down = True
    rig.answer_all()
    e.store("a")
    rig.answer_all()
    rig.down = False
    rig.step(Stopping())
    assert rig.flushing()
    rig.answer_all()
    assert len(rig.shelves[0]) == 1
    assert rig.machine.unflushed() == []


def test_what_a_tier_was_promised_and_did_not_take_is_told(rig: TierRig) -> None:
    e = rig.ready()
    e.store("a", "b", "c")
    assert rig.machine.unflushed() == [("tier0", 3)]
    rig.step(Stopping())
    rig.down = True
    rig.answer_all()
    assert not rig.flushing()
    assert rig.machine.unflushed() == [("tier0", 3)]


def test_what_waits_for_a_dead_tiers_epoch_costs_little(rig: TierRig) -> None:
    """However much is queued, a step looks at a little; all of it goes once the tier tells."""
    big = TierRig(pages=4096)
    e = big.engine()
    for i in range(250):
        e.store(i)
    looked = 0
    usable = epochs.usable

    def counted(*args: Any) -> list[int]:
        nonlocal looked
        looked += 1
        return usable(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epochs, "usable", counted)
        e.store("one more")
    assert looked < 50
    big.answer_all()
    assert len(big.shelves[0]) == 251


def test_on_evict_flushes_the_oldest_when_room_is_short() -> None:
    rig = TierRig(pages=16, extent=1, core={"flush": "on_evict"})
    e = rig.ready()
    for start in range(0, 12, 4):
        e.store(*range(start, start + 4))
    assert not rig.asked
    for start in range(12, 32, 4):
        rig.only_in_tiers(e, *range(start, start + 4))
    assert rig.look_up(e, *range(4))[0].chunks == 4


def test_none_flushes_nothing() -> None:
    rig = TierRig(pages=16, extent=1, core={"flush": "none"})
    e = rig.ready()
    for start in range(0, 32, 4):
        e.store(*range(start, start + 4))
    rig.step(Stopping())
    assert not rig.asked


def test_a_slot_that_has_changed_hands_is_not_flushed_for_its_former_row(rig: TierRig) -> None:
    e = rig.ready()
    e.store(*range(12))
    rig.forget_l1()
    e.store(*range(100, 104))
    rig.answer_all()
    assert rig.count("flushes_lost") == 4
    assert len(rig.shelves[0]) == 12


def test_a_row_of_several_shards_is_one_record(rig: TierRig) -> None:
    e = rig.ready(ranks=2)
    e.store("a")
    (store,) = rig.open_ops(TierStore)
    assert (len(store.records.keys), store.shard_bytes) == (1, (PAGE, PAGE))
    assert len(store.slots.extents[0]) == 2


def test_records_are_named_after_namespace_epoch_group_and_chunk(rig: TierRig) -> None:
    e = rig.ready(layout=layout(1, 2))
    e.store("a", groups=3)
    stores = rig.open_ops(TierStore)
    assert {one[2] for op in stores for one in names(op.records)} == {0, 1}
    for op in stores:
        ((space, epoch, _, key),) = names(op.records)
        assert space == e.namespace
        assert epoch == rig.notes[0][e.namespace]
        assert key == b"a".ljust(32, b"\0")
    assert BOOT not in {e.namespace}


def test_the_queue_of_a_dead_tier_stays_in_proportion_to_l1() -> None:
    """Rows that left L1 leave the queue, a few at a time; what is still there is flushed later."""
    rig = TierRig(pages=256, extent=4, instance_write_share=1.0)
    e = rig.ready()
    rig.down = True
    for first in range(0, 3_000, 10):
        e.store(*range(first, first + 10))
        rig.answer_all(TierStore)
        assert rig.status["tiers"][0]["flush_queue_rows"] <= 3 * 256 + 256
    rig.down = False
    rig.wait(300)
    rig.answer_all()
    assert len(rig.shelves[0]) == 256


# ---------------------------------------------------------------- a write budget


def over(rig: TierRig, *tiers: int, is_over: bool = True) -> None:
    for tier in tiers:
        rig.step(TierReport(tier, {"up": True, "over_budget": is_over}))


def stored_in(rig: TierRig, tier: int) -> set[bytes]:
    """The chunks that a tier has."""
    return {chunk.rstrip(b"\0") for _, _, _, chunk in rig.shelves[tier]}


def test_over_its_budget_a_tier_gets_a_row_at_its_first_hit() -> None:
    """The other tier, which is not over, gets all at once. A second hit queues nothing."""
    rig = TierRig(tiers=2)
    e = rig.ready()
    e.store("before")
    rig.answer_all()
    over(rig, 0)
    e.store("a", "b")
    rig.answer_all()
    assert stored_in(rig, 0) == {b"before"}
    assert stored_in(rig, 1) == {b"before", b"a", b"b"}
    assert [tier["rows_over_budget"] for tier in rig.status["tiers"]] == [2, 0]
    assert e.holds("a") == 1
    assert {store.tier for store in rig.open_ops(TierStore)} == {0}
    rig.answer_all()
    assert stored_in(rig, 0) == {b"before", b"a"}
    assert e.holds("a") == 1
    assert not rig.asked
    over(rig, 0, is_over=False)
    e.store("c")
    rig.answer_all()
    assert stored_in(rig, 0) == {b"before", b"a", b"c"}


def test_a_row_that_was_hit_while_it_was_queued_is_stored_over_the_budget(rig: TierRig) -> None:
    e = rig.ready()
    e.store(*range(12))  # 8 are being stored, 4 are queued
    assert e.holds(*range(9)) == 9
    over(rig, 0)
    rig.answer_all()
    assert stored_in(rig, 0) == {str(i).encode() for i in range(9)}
    assert rig.status["tiers"][0]["rows_over_budget"] == 3
    assert not rig.flushing()


def test_without_a_budget_a_hit_queues_nothing(rig: TierRig) -> None:
    e = rig.ready()
    e.store("a")
    rig.answer_all()
    assert e.holds("a") == 1
    assert not rig.asked


def test_a_long_queue_over_the_budget_is_left_out_in_many_steps(
    rig: TierRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step leaves out 2 rows here, and asks to be called again at once."""
    monkeypatch.setattr(flush, "_LEAVE_OUT", 2)
    e = rig.ready()
    rig.down = True
    for i in range(7):
        e.store(i)
    rig.answer_all()
    over(rig, 0)
    rig.down = False
    rig.wait(REST_S)
    left = [rig.status["tiers"][0]["flush_queue_rows"]]
    while rig.machine.next_deadline() == rig.now:
        rig.wait(0)
        left.append(rig.status["tiers"][0]["flush_queue_rows"])
    assert left[0] > 0 == left[-1]
    assert all(a - b in (1, 2) for a, b in itertools.pairwise(left))
    assert rig.status["tiers"][0]["rows_over_budget"] == 7
    assert not rig.shelves[0]


@pytest.mark.parametrize("is_over", [True, False])
def test_on_evict_over_the_budget_flushes_only_what_was_hit(is_over: bool) -> None:
    """A row that leaves L1 later without a hit is not stored. One that is hit later is."""
    rig = TierRig(pages=16, extent=1, core={"flush": "on_evict"})
    e = rig.ready()
    over(rig, 0, is_over=is_over)
    e.store(*range(4))
    assert e.holds(0, 1) == 2
    for start in range(4, 16, 4):
        e.store(*range(start, start + 4))
    rig.answer_all()
    have = stored_in(rig, 0)
    assert {b"0", b"1"} <= have
    assert (b"2" in have) is not is_over
    assert e.holds(2) == 1
    rig.answer_all()
    assert b"2" in stored_in(rig, 0)
