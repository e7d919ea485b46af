"""Promotion: what L1 lacks comes from the tiers, once, as far as it fits, and in bounded time."""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import (
    Faulted,
    Stopping,
    TierEpoch,
    TierLoad,
    TierProbe,
    TierStore,
)
from kvass.core.pending.promotion import PROMOTION_BYTES
from kvass.core.pending.tier_state import Speed
from kvass.core.tiers import epochs
from kvass.core.tiers.flush import REST_S
from kvass.types import PAGE, GroupLayout, RankLayout
from tests.core.rig import BOOT, LEASE_S, WIDTH, Engine, Rig, digests, layout
from tests.core.tier_rig import TierRig, another_boot, names

BUDGET_S = 0.1


@pytest.fixture
def rig() -> TierRig:
    return TierRig()


def prefetch(e: Engine, *chunks: object) -> m.Prefetch:
    return m.Prefetch("p", digests(*chunks), WIDTH, namespace=e.namespace, seq=5)


def quiet(rig: Rig) -> bool:
    return rig.gauge("leases", "pins", "rows_loading", "promotions") == (0, 0, 0, 0)


def test_what_the_tier_has_is_promoted_and_matched(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    (found,) = rig.look_up(e, "a", "b", "c", "d")
    assert (found.seq, found.first, found.chunks, len(found.slots[0])) == (7, 0, 3, 3)
    assert found.deadline_s == rig.now + LEASE_S
    assert rig.gauge("leases", "pins", "rows", "promotions") == (1, 3, 3, 0)
    e.hand_over(leases=(found.lease,))
    e.release(found.lease)
    assert quiet(rig)
    assert rig.look_up(e, "a", "b", "c")[0].chunks == 3
    assert not rig.open_ops(TierLoad)


def test_what_l1_has_is_answered_at_once(rig: TierRig) -> None:
    e = rig.ready()
    e.store("a", "b")
    rig.settle()
    rig.begin(e, "a", "b")
    assert [r.chunks for r in rig.replies(e.scheduler)] == [2]
    assert not rig.asked


def test_only_what_l1_lacks_is_asked_for_and_loaded(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    e.store("a")
    rig.settle()
    rig.begin(e, "a", "b", "c")
    (probe,) = rig.open_ops(TierProbe)
    assert [len(batch.keys) for batch in probe.batches] == [2]
    rig.answer(probe)
    (load,) = rig.open_ops(TierLoad)
    assert len(load.records.keys) == 2
    rig.settle()
    assert rig.replies(e.scheduler)[0].chunks == 3


def test_a_gap_ends_what_is_loaded(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    rig.shelves[0] = {one for one in rig.shelves[0] if not one[3].startswith(b"b")}
    (found,) = rig.look_up(e, "a", "b", "c")
    assert found.chunks == 1
    assert rig.status["rows"] == 1


def test_concurrent_lookups_share_one_load(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    for _ in range(32):
        message = m.Lookup(seq=7, request="r", digests=digests("a", "b"), width=WIDTH)
        rig.say(e.scheduler, message)
    rig.settle(TierProbe)
    assert len(rig.open_ops(TierLoad)) == 1
    rig.settle()
    assert [r.chunks for r in rig.replies(e.scheduler)] == [2] * 32
    assert rig.gauge("leases", "pins") == (32, 64)
    e.quit()
    assert quiet(rig)


def test_a_row_that_failed_shrinks_every_match_that_waits_for_it(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    for _ in range(2):
        message = m.Lookup(seq=7, request="r", digests=digests("a", "b", "c"), width=WIDTH)
        rig.say(e.scheduler, message)
    rig.settle(TierProbe)
    (load,) = rig.open_ops(TierLoad)
    rig.answer(load, True, False, True)
    assert [r.chunks for r in rig.replies(e.scheduler)] == [1, 1]
    e.quit()
    assert quiet(rig)
    assert rig.status["rows"] == 2  # the third is there, and of no use yet


def test_a_spare_chunk_that_failed_shrinks_the_match_too(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    rig.begin(e, "a", "b", "c", spare=1)
    rig.settle(TierProbe)
    (load,) = rig.open_ops(TierLoad)
    rig.answer(load, True, True, False)
    assert [r.chunks for r in rig.replies(e.scheduler)] == [1]
    e.quit()
    assert quiet(rig)


@pytest.mark.parametrize("good", [True, False])
def test_at_the_deadline_the_answer_is_what_is_there(rig: TierRig, good: bool) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    e.store("a")
    rig.settle()
    rig.begin(e, "a", "b")
    rig.settle(TierProbe)
    assert rig.machine.next_deadline() == rig.now + BUDGET_S
    rig.wait(BUDGET_S)
    (found,) = rig.replies(e.scheduler)
    assert found.chunks == 1
    assert rig.status["rows_loading"] == 1  # the tier may still write there
    rig.answer(rig.open_ops(TierLoad)[0], good)
    assert rig.status["rows_loading"] == 0
    assert rig.status["rows"] == 1 + good
    assert not rig.replies(e.scheduler)


def test_the_asker_says_how_long_it_waits(rig: TierRig) -> None:
    e = rig.ready()
    rig.begin(e, "a", budget_ms=2500.0)
    rig.wait(2.4)
    assert not rig.replies(e.scheduler)
    rig.wait(0.1)
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0]
    rig.settle()  # the probe's answer comes too late for anybody
    assert quiet(rig)


def test_an_asker_hears_at_once_that_tiers_are_at_work(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.begin(e, "a")
    assert rig.promoting == [m.Promoting(seq=7)]
    rig.settle()
    assert [r.chunks for r in rig.replies(e.scheduler)] == [1]
    rig.begin(e, "a")
    assert [type(r) for r in rig.replies(e.scheduler)] == [m.Matched], "L1 has it"
    assert rig.promoting == []


def test_who_leaves_waits_no_more_and_the_load_goes_on(rig: TierRig) -> None:
    e, other = rig.ready(), rig.ready("other")
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a", "b")
    rig.settle(TierProbe)
    e.quit()
    assert rig.gauge("promotions", "pins", "rows_loading") == (0, 0, 2)
    rig.begin(other, "a", "b")
    rig.settle()
    assert rig.replies(other.scheduler)[0].chunks == 2


def test_what_a_lost_scheduler_asked_for_is_not_loaded() -> None:
    """Though its lookups end in slices, and the tier answers before their turn comes."""
    rig = TierRig(core={"slice_ends": 1})
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a")
    rig.begin(e, "b")
    rig.lose(e.scheduler)
    assert rig.status["promotions"] == 1
    rig.settle(TierProbe)
    assert not rig.open_ops(TierLoad)
    assert quiet(rig)


def test_a_rank_that_left_meanwhile_makes_it_a_miss(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.begin(e, "a")
    rig.settle(TierProbe)
    rig.lose(e.workers[0])
    rig.settle()
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0]
    assert quiet(rig)


# ---------------------------------------------------------------- clears


def test_a_clear_makes_what_waits_a_miss_and_what_loads_worthless(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a", "b")
    rig.settle(TierProbe)
    (load,) = rig.open_ops(TierLoad)
    rig.say(e.scheduler, m.Clear(seq=11))
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0]  # Cleared waits for the tier
    rig.settle()
    assert load not in rig.asked
    (cleared,) = rig.replies(e.scheduler)
    assert isinstance(cleared, m.Cleared)
    assert rig.gauge("rows", "rows_loading", "pins") == (0, 0, 0)
    assert rig.look_up(e, "a", "b")[0].chunks == 0


def test_a_cleared_tier_is_not_used_until_it_has_noted_it(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.say(e.scheduler, m.Clear(seq=11))
    rig.begin(e, "a")
    e.store("b")
    assert not rig.open_ops(TierProbe)
    assert not rig.open_ops(TierStore)
    rig.settle()
    assert [r.chunks for r in rig.replies(e.scheduler) if isinstance(r, m.Matched)] == [0]
    assert len({one[1] for one in rig.shelves[0]}) == 2  # the new row's epoch is another


def test_an_epoch_that_was_asked_for_before_a_clear_is_not_used_after_it(rig: TierRig) -> None:
    """The clear's own question fails, and the older one is answered after that."""
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    again = another_boot(rig)
    e = again.engine()
    again.say(e.scheduler, m.Clear(seq=11))
    first, renewal = again.open_ops(TierEpoch)
    again.down = True
    again.answer(renewal)
    again.down = False
    again.answer(first)
    for _ in range(3):
        assert [r.chunks for r in again.look_up(e, "a") if isinstance(r, m.Matched)] == [0]
        again.wait(1.0)
    assert again.notes[0][e.namespace] != first.fresh


def test_a_worker_that_must_go_hears_no_more_of_its_clear(rig: TierRig) -> None:
    """It owes a commit, so its session lives on, half-closed."""
    e = rig.ready()
    e.begin("a")
    rig.say(e.workers[0], m.Clear(seq=11))
    rig.step(Faulted(e.workers[0], "bad_frame", "garbage"))
    rig.replies(e.workers[0])
    rig.settle()
    assert rig.replies(e.workers[0]) == []


def test_a_clear_that_a_tier_does_not_note_is_refused_and_owed(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.down = True
    rig.say(e.scheduler, m.Clear(seq=11))
    rig.settle()
    (refused,) = rig.replies(e.scheduler)
    assert (refused.seq, refused.code) == (11, "tier_down")
    rig.down = False
    assert rig.look_up(e, "a")[0].chunks == 0  # not asked again yet
    rig.wait(1.0)
    rig.look_up(e, "a")
    assert rig.look_up(e, "a")[0].chunks == 0  # the tier goes by a fresh epoch now
    rig.only_in_tiers(e, "a")
    assert rig.look_up(e, "a")[0].chunks == 1


def test_an_epoch_outlives_the_daemon_and_a_lost_one_matches_nothing(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    again = another_boot(rig)
    e = again.ready()
    assert again.look_up(e, "a")[0].chunks == 1
    third = TierRig(core={"boot": b"a third boot 456"})
    third.shelves = rig.shelves
    assert third.look_up(third.ready(), "a")[0].chunks == 0


def test_a_lookup_waits_for_the_tiers_first_word(rig: TierRig) -> None:
    """Right after a restart: the epoch is being asked for when the first lookup comes."""
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    again = another_boot(rig)
    e = again.engine()
    again.begin(e, "a")
    assert not again.replies(e.scheduler)
    again.settle()
    assert [r.chunks for r in again.replies(e.scheduler)] == [1]


def test_a_first_word_that_does_not_come_is_a_miss_in_time(rig: TierRig) -> None:
    e = rig.engine()
    rig.begin(e, "a")
    rig.wait(BUDGET_S)
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0]
    rig.down = True
    rig.begin(e, "b")
    rig.settle()
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0]
    assert quiet(rig)


def test_a_tier_that_cannot_tell_its_epoch_is_not_used(rig: TierRig) -> None:
    rig.down = True
    e = rig.ready()
    e.store("a")
    assert not rig.asked
    assert rig.look_up(e, "a", "b")[0].chunks == 1
    rig.down = False
    rig.wait(1.0)
    rig.look_up(e, "a", "b")
    rig.settle()
    rig.forget_l1()
    assert rig.look_up(e, "a", "b")[0].chunks == 1  # what was queued went there after all


# ---------------------------------------------------------------- room


def test_when_too_many_bytes_wait_the_answer_is_what_l1_has() -> None:
    """A shorter match and no error; of one instance a quarter may wait."""
    chunk_bytes = 32 + 8  # a key, and which tier holds its row
    two_bytes = 2 * (PROMOTION_BYTES + len("r")) + 10 * chunk_bytes
    rig = TierRig(waiting_bytes=4 * two_bytes)
    one, *others, last = [rig.ready(f"e{i}") for i in range(5)]
    rig.begin(one, *range(6))
    rig.begin(one, *range(4))
    assert rig.status["promotions"] == 2
    rig.begin(one, "a")
    assert [r.chunks for r in rig.replies(one.scheduler)] == [0]
    assert rig.ask(one.scheduler, m.Prefetch("p", digests("a"), WIDTH)).chunks == 0
    assert rig.count("lookups_not_waited") == 2
    for other in others:
        rig.begin(other, *range(6))
        rig.begin(other, *range(4))
    assert rig.status["promotions"] == 8
    rig.begin(last, "a")
    assert [r.chunks for r in rig.replies(last.scheduler)] == [0]
    rig.wait(BUDGET_S)
    assert rig.status["promotions"] == 0
    rig.begin(one, *range(10))
    assert rig.status["promotions"] == 1


def test_loading_takes_half_of_l1_at_most() -> None:
    rig = TierRig(pages=16, extent=1)
    e = rig.ready()
    for start in range(0, 24, 4):
        rig.only_in_tiers(e, *range(start, start + 4))
    rig.begin(e, *range(24))
    rig.settle(TierProbe)
    assert rig.status["rows_loading"] == 8
    rig.begin(e, *range(24))
    rig.settle(TierProbe)
    assert rig.status["rows_loading"] == 8
    rig.settle()
    assert [r.chunks for r in rig.replies(e.scheduler)] == [8, 8]


def test_with_everything_pinned_the_answer_is_what_is_there() -> None:
    rig = TierRig(pages=16, extent=1)
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c", "d")
    for start in range(0, 16, 4):
        e.store(*range(start, start + 4))
        rig.settle()
    held = e.lookup(*range(16))
    assert held.chunks == 16
    assert rig.look_up(e, "a", "b")[0].chunks == 0
    e.give_back(held.lease)
    assert rig.look_up(e, "a", "b")[0].chunks == 2


def test_a_promotion_does_not_evict_its_own_prefix() -> None:
    rig = TierRig(pages=8, extent=1)
    e = rig.ready()
    for start in (0, 2, 4, 6, 8, 10):
        rig.only_in_tiers(e, start, start + 1)
    assert rig.look_up(e, 0, 1, 2)[0].chunks == 3
    rig.wait(LEASE_S)
    (found,) = rig.look_up(e, *range(12))
    assert found.chunks == 7  # three were there, four may be LOADING
    rig.wait(LEASE_S)
    (found,) = rig.look_up(e, *range(12))
    assert found.chunks == 8


def test_windows_of_a_shorter_hit_are_loaded_if_all_does_not_fit() -> None:
    """What does not fit at the end of a prompt moves the window that a hit needs."""
    groups = RankLayout(
        (
            GroupLayout("full", 16, ("a",), (PAGE,)),
            GroupLayout("sliding_window", 16, ("b",), (PAGE,), window_tokens=17),
        )
    )
    rig = TierRig(pages=32, extent=1, core={"retain_promoted": True})
    e = rig.ready(layout=groups)
    for start in range(0, 12, 2):
        rig.only_in_tiers(e, start, start + 1, groups=3)
    small = TierRig(pages=16, extent=1)
    small.shelves, small.notes = rig.shelves, rig.notes
    e = small.ready(layout=groups)
    (found,) = small.look_up(e, *range(12))
    assert found.chunks == 7
    assert [len(slots) for slots in found.slots] == [7, 1]


# ---------------------------------------------------------------- worth


def measured(weigh: bool) -> tuple[TierRig, Engine]:
    """A tier that loads 4 KiB in 50 ms has ``a`` and ``b``."""
    rig = TierRig(core={"weigh_loads": weigh})
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a")
    rig.settle(TierProbe)
    rig.now += 0.05
    rig.settle()
    rig.wait(LEASE_S)
    rig.forget_l1()
    return rig, e


@pytest.mark.parametrize("weigh", [True, False])
def test_what_is_sooner_computed_is_not_loaded(weigh: bool) -> None:
    rig, e = measured(weigh)
    found = rig.look_up(e, "a", "b", prefill_tokens_s=1_000_000.0)[0]
    assert (found.chunks, rig.count("promotions_not_worth_it")) == ((0, 1) if weigh else (2, 0))
    assert rig.look_up(e, "a", "b", prefill_tokens_s=100.0)[0].chunks == 2


@pytest.mark.parametrize("speed", [float("inf"), float("nan"), -1.0, 1e300])
def test_no_speed_that_an_engine_tells_breaks_anything(speed: float) -> None:
    rig, e = measured(weigh=True)
    assert rig.look_up(e, "a", "b", prefill_tokens_s=speed)[0].chunks in (0, 2)


def test_a_slow_tier_is_tried_again_and_its_speed_stays_a_number() -> None:
    speed = Speed(bytes_s=1.0)
    for _ in range(10_000):
        speed.doubt()
    assert 1e6 < speed.bytes_s <= 1e15


# ---------------------------------------------------------------- several tiers


def test_tiers_are_asked_in_order_for_what_those_before_have_not() -> None:
    rig = TierRig(tiers=2)
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    rig.shelves[0] = {one for one in rig.shelves[0] if one[3].startswith(b"a")}
    rig.begin(e, "a", "b", "c")
    (probe,) = rig.open_ops(TierProbe)
    assert (probe.tier, len(probe.batches[0].keys)) == (0, 3)
    rig.answer(probe)
    (probe,) = rig.open_ops(TierProbe)
    assert (probe.tier, len(probe.batches[0].keys)) == (1, 2)
    rig.answer(probe)
    assert sorted((load.tier, len(load.records.keys)) for load in rig.open_ops(TierLoad)) == [
        (0, 1),
        (1, 2),
    ]
    rig.settle()
    assert rig.replies(e.scheduler)[0].chunks == 3
    assert len(rig.shelves[0]) == 3  # the first one has been given what it lacked


def test_a_long_prompt_nobody_knows_costs_a_short_probe(rig: TierRig) -> None:
    e = rig.ready()
    rig.begin(e, *range(500))
    (probe,) = rig.open_ops(TierProbe)
    assert len(probe.batches[0].keys) == 16
    rig.answer(probe)
    assert not rig.asked
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0]


def test_a_long_prompt_is_probed_in_few_steps() -> None:
    rig = TierRig(pages=2048, tiers=2)
    e = rig.ready()
    rig.only_in_tiers(e, *range(500))
    rig.begin(e, *range(500))
    sizes = []
    while probes := rig.open_ops(TierProbe):
        sizes.append((probes[0].tier, len(probes[0].batches[0].keys)))
        rig.answer(probes[0])
    assert sizes == [(0, 16), (0, 48), (0, 192), (0, 244)]
    rig.settle()
    assert rig.replies(e.scheduler)[0].chunks == 500


# ---------------------------------------------------------------- after the promotion


def test_rows_that_are_not_retained_leave_at_the_last_release() -> None:
    rig = TierRig(core={"retain_promoted": False})
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a", "b")
    rig.begin(e, "a", "b")
    rig.settle()
    rig.begin(e, "a", "b")  # while they are read, they match
    one, two = list(rig.machine.state.leases.all)[:2]
    (three,) = rig.replies(e.scheduler)
    for lease in (one, two):
        e.give_back(lease)
        assert rig.status["rows"] == 2
    e.give_back(three.lease)
    assert rig.gauge("rows", "pins") == (0, 0)


def test_what_leaves_while_the_tiers_are_asked_for_the_rest_is_asked_for_too() -> None:
    """A lookup pins nothing while tiers are probed, and L1 may not keep what others promoted."""
    rig = TierRig(core={"retain_promoted": False})
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    (first,) = rig.look_up(e, "a", "b")
    e.hand_over(leases=(first.lease,))
    rig.begin(e, "a", "b", "c", "d")
    (probe,) = rig.open_ops(TierProbe)
    assert [len(batch.keys) for batch in probe.batches] == [2]
    e.release(first.lease)
    assert rig.status["rows"] == 0
    rig.answer(probe)
    (again,) = rig.open_ops(TierProbe)
    assert [len(batch.keys) for batch in again.batches] == [3], "the one that is in none, too"
    rig.settle()
    assert [r.chunks for r in rig.replies(e.scheduler)] == [3]


def test_what_was_prefetched_stays_for_its_first_reader() -> None:
    rig = TierRig(core={"retain_promoted": False})
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.say(rig.open(), prefetch(e, "a", "b"))
    rig.settle()
    assert rig.gauge("rows", "pins") == (2, 0)
    (found,) = rig.look_up(e, "a", "b")
    e.give_back(found.lease)
    assert rig.gauge("rows", "pins") == (0, 0)


@pytest.mark.parametrize("end", ["late", "failed"])
def test_what_is_not_retained_is_there_for_a_shorter_match_too(end: str) -> None:
    rig = TierRig(core={"retain_promoted": False})
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a", "b")
    rig.settle(TierProbe)
    rig.begin(e, "a", "b", "c")
    rig.settle(TierProbe)
    (load,) = rig.open_ops(TierLoad)
    if end == "failed":
        rig.answer(load, True, False)
        assert [r.chunks for r in rig.replies(e.scheduler)] == [1, 1]
    else:
        rig.answer(load)
        assert [r.chunks for r in rig.replies(e.scheduler)] == [2, 2]
    e.quit()
    assert rig.gauge("rows", "pins") == (0, 0)


def test_the_rest_of_a_prompt_is_waited_for_its_share_of_the_time() -> None:
    rig = TierRig(pages=256)
    e = rig.ready()
    for start in range(0, 100, 10):
        e.store(*range(start, start + 10))
        rig.settle()
    rig.begin(e, *range(101), budget_ms=16_160.0, prefill_tokens_s=100.0)
    assert rig.machine.state.promotions.next_due == pytest.approx(rig.now + 0.16)
    rig.wait(0.2)
    assert [r.chunks for r in rig.replies(e.scheduler)] == [100]
    rig.begin(e, *range(200, 300), budget_ms=20_000.0, prefill_tokens_s=100.0)
    assert rig.machine.state.promotions.next_due == pytest.approx(rig.now + 20)


# ---------------------------------------------------------------- prefetch


def test_a_prefetch_holds_nothing(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    looker = rig.open()
    rig.replies(looker)
    rig.say(looker, prefetch(e, "a", "b"))
    rig.settle()
    assert [(r.seq, r.chunks) for r in rig.replies(looker)] == [(5, 2)]
    assert quiet(rig)
    rig.begin(e, "a", "b")
    assert rig.replies(e.scheduler)[0].chunks == 2


def test_a_namespace_that_is_forgotten_meanwhile_is_a_miss(rig: TierRig) -> None:
    """Its last engine left; another model comes, and the tier's answer after it."""
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    looker = rig.open()
    rig.say(looker, prefetch(e, "a"))
    (probe,) = rig.open_ops(TierProbe)
    e.quit()
    rig.replies(looker)
    rig.engine("other", identity={"model": "other"})
    assert [r.chunks for r in rig.replies(looker)] == [0]
    rig.answer(probe)
    rig.settle()
    assert quiet(rig)


def test_prefetching_for_others_is_forbidden(rig: TierRig) -> None:
    e = rig.ready()
    assert rig.code(e.scheduler, prefetch(e, "a")) == "forbidden"
    unknown = m.Prefetch(seq=5, request="p", digests=digests("a"), width=WIDTH, namespace=bytes(32))
    assert rig.code(rig.open(), unknown) == "bad_value"
    assert rig.code(e.workers[0], m.Prefetch(seq=5, request="p", digests=b"")) == "bad_rank"


# ---------------------------------------------------------------- flushing


def test_what_is_ready_is_flushed_while_it_is_pinned(rig: TierRig) -> None:
    e = rig.ready()
    e.store("a", "b")
    (store,) = rig.open_ops(TierStore)
    assert rig.gauge("pins") == (2,)
    assert store.shard_bytes == (PAGE,)
    rig.settle()
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
    rig.settle()
    assert len(rig.shelves[0]) == 8
    assert rig.count("flushes_lost") == 4
    assert not rig.flushing()


def test_what_a_tier_that_is_down_could_not_take_waits_for_it(rig: TierRig) -> None:
    """It is asked again after a second, and gets what is still there."""
    e = rig.ready()
    rig.down = True
    e.store("a", "b")
    for _ in range(3):
        rig.settle()
        assert rig.machine.next_deadline() == rig.now + REST_S
        assert not rig.flushing()
        rig.wait(REST_S)
        assert rig.open_ops(TierStore)
    rig.down = False
    rig.settle()
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
    rig.settle()
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
    rig.settle()
    assert len(rig.shelves[0]) == (0 if down else 12)
    assert not rig.flushing()


@pytest.mark.parametrize("told", [False, True])
def test_stopping_asks_a_tier_that_was_down_once_more(rig: TierRig, told: bool) -> None:
    """Also one that has not ``told`` its epoch yet."""
    e = rig.ready() if told else rig.engine()
    rig.down = True
    rig.settle()
    e.store("a")
    rig.settle()
    rig.down = False
    rig.step(Stopping())
    assert rig.flushing()
    rig.settle()
    assert len(rig.shelves[0]) == 1
    assert rig.machine.unflushed() == []


def test_what_a_tier_was_promised_and_did_not_take_is_told(rig: TierRig) -> None:
    e = rig.ready()
    e.store("a", "b", "c")
    assert rig.machine.unflushed() == [("tier0", 3)]
    rig.step(Stopping())
    rig.down = True
    rig.settle()
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
    big.settle()
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
    rig.settle()
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


def test_what_is_loaded_for_a_namespace_that_was_cleared_and_forgotten_is_nobodys() -> None:
    rig = TierRig()
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.begin(e, "a")
    rig.settle(TierProbe)
    (load,) = rig.open_ops(TierLoad)
    rig.say(e.scheduler, m.Clear(seq=11))
    e.quit()
    rig.engine("other", chunk_tokens=32)
    rig.answer(load, True)
    rig.wait(0)
    assert rig.gauge("rows", "rows_loading", "l1_used_bytes") == (0, 0, 0)


def test_lookups_that_wait_for_an_epoch_go_on_in_slices() -> None:
    rig = TierRig(core={"slice_ends": 2})
    e = rig.engine("e")
    for i in range(7):
        rig.begin(e, f"prompt {i}")
    rig.settle(TierEpoch)
    asked = len(rig.open_ops(TierProbe))
    assert asked == 2, "two go on in the step that brings the epoch"
    for _ in range(3):
        rig.wait(0)
    assert len(rig.open_ops(TierProbe)) == 7
    rig.wait(BUDGET_S)
    assert rig.status["promotions"] == 5
    for _ in range(3):
        rig.wait(0)
    assert rig.status["promotions"] == 0
