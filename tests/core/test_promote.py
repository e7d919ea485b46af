"""Promotions: how they begin, what wakes them, and how they end in bounded time (law 5)."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.effects import (
    TierEpoch,
    TierLoad,
    TierProbe,
)
from kvass.core.pending.promotion import PROMOTION_BYTES
from tests.core.rig import LEASE_S, WIDTH, Engine, digests
from tests.core.tier_rig import BUDGET_S, TierRig, another_boot, prefetch


@pytest.fixture
def rig() -> TierRig:
    return TierRig()


def test_what_the_tier_has_is_promoted_and_matched(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    (found,) = rig.look_up(e, "a", "b", "c", "d")
    assert (found.seq, found.first, found.chunks, len(found.slots[0])) == (7, 0, 3, 3)
    assert found.deadline_s == rig.now + LEASE_S
    assert rig.gauge("leases", "pins", "rows", "promotions") == (1, 3, 3, 0)
    e.hand_over(leases=(found.lease,))
    e.release(found.lease)
    assert rig.quiet()
    assert rig.look_up(e, "a", "b", "c")[0].chunks == 3
    assert not rig.open_ops(TierLoad)


def test_what_l1_has_is_answered_at_once(rig: TierRig) -> None:
    e = rig.ready()
    e.store("a", "b")
    rig.answer_all()
    rig.begin(e, "a", "b")
    assert [r.chunks for r in rig.replies(e.scheduler)] == [2]
    assert not rig.asked


@pytest.mark.parametrize("good", [True, False])
def test_at_the_deadline_the_answer_is_what_is_there(rig: TierRig, good: bool) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    e.store("a")
    rig.answer_all()
    rig.begin(e, "a", "b")
    rig.answer_all(TierProbe)
    assert rig.machine.next_deadline() == rig.now + BUDGET_S
    rig.wait(BUDGET_S)
    (found,) = rig.replies(e.scheduler)
    assert found.chunks == 1
    assert rig.count("promotions_late") == 1
    (ns,) = rig.status["namespaces"]
    assert {why: n for why, n in ns["miss_tokens"].items() if n} == {"late": 16}
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
    rig.answer_all()  # the probe's answer comes too late for anybody
    assert rig.quiet()


def test_an_asker_hears_at_once_that_tiers_are_at_work(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.begin(e, "a")
    assert rig.promoting == [m.Promoting(seq=7)]
    rig.answer_all()
    assert [r.chunks for r in rig.replies(e.scheduler)] == [1]
    rig.begin(e, "a")
    assert [type(r) for r in rig.replies(e.scheduler)] == [m.Matched], "L1 has it"
    assert rig.promoting == []


def test_who_leaves_waits_no_more_and_the_load_goes_on(rig: TierRig) -> None:
    e, other = rig.ready(), rig.ready("other")
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a", "b")
    rig.answer_all(TierProbe)
    e.quit()
    assert rig.gauge("promotions", "pins", "rows_loading") == (0, 0, 2)
    rig.begin(other, "a", "b")
    rig.answer_all()
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
    rig.answer_all(TierProbe)
    assert not rig.open_ops(TierLoad)
    assert rig.quiet()


def test_a_clear_makes_what_waits_a_miss_and_what_loads_worthless(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a", "b")
    rig.answer_all(TierProbe)
    (load,) = rig.open_ops(TierLoad)
    rig.say(e.scheduler, m.Clear(seq=11))
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0]  # Cleared waits for the tier
    rig.answer_all()
    assert load not in rig.asked
    (cleared,) = rig.replies(e.scheduler)
    assert isinstance(cleared, m.Cleared)
    assert rig.gauge("rows", "rows_loading", "pins") == (0, 0, 0)
    assert rig.look_up(e, "a", "b")[0].chunks == 0


def test_a_lookup_waits_for_the_tiers_first_word(rig: TierRig) -> None:
    """Right after a restart: the epoch is being asked for when the first lookup comes."""
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    again = another_boot(rig)
    e = again.engine()
    again.begin(e, "a")
    assert not again.replies(e.scheduler)
    again.answer_all()
    assert [r.chunks for r in again.replies(e.scheduler)] == [1]


def test_a_first_word_that_does_not_come_is_a_miss_in_time(rig: TierRig) -> None:
    e = rig.engine()
    rig.begin(e, "a")
    rig.wait(BUDGET_S)
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0]
    rig.down = True
    rig.begin(e, "b")
    rig.answer_all()
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0]
    assert rig.quiet()


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
    rig.answer_all()
    assert rig.quiet()


def test_lookups_that_wait_for_an_epoch_go_on_in_slices() -> None:
    rig = TierRig(core={"slice_ends": 2})
    e = rig.engine("e")
    for i in range(7):
        rig.begin(e, f"prompt {i}")
    rig.answer_all(TierEpoch)
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


@pytest.fixture
def waiting() -> tuple[TierRig, Engine]:
    """Ten lookups of two chunks wait for one load; two of them go on in a step."""
    rig = TierRig(pages=64, extent=4, instance_write_share=1.0, core={"slice_ends": 2})
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    for _ in range(10):
        message = m.Lookup(seq=7, request="r", digests=digests("a", "b"), width=WIDTH)
        rig.say(e.scheduler, message)
    rig.answer_all(TierProbe)
    rig.replies(e.scheduler)
    return rig, e


@pytest.mark.parametrize("good", [True, False])
def test_lookups_that_wait_for_one_load_are_answered_in_slices(
    waiting: tuple[TierRig, Engine], good: bool
) -> None:
    """A row that the tier could not fill is free when the last of them has let it go."""
    rig, e = waiting
    (load,) = rig.open_ops(TierLoad)
    rig.answer(load, True, good)
    assert [r.chunks for r in rig.replies(e.scheduler)] == [1 + good] * 2
    assert rig.finish() == 4
    assert [r.chunks for r in rig.replies(e.scheduler)] == [1 + good] * 8
    assert rig.gauge("rows", "rows_loading", "leases") == (1 + good, 0, 10)
    e.quit()
    rig.finish()
    assert rig.gauge("pins", "promotions") == (0, 0)


def test_lookups_of_a_lost_scheduler_end_in_slices(waiting: tuple[TierRig, Engine]) -> None:
    rig, e = waiting
    rig.lose(e.scheduler)
    assert rig.gauge("promotions") == (8,)
    rig.answer_all(TierLoad)
    rig.finish()
    assert rig.gauge("promotions", "pins", "leases", "rows") == (0, 0, 0, 2)
    assert not rig.replies(e.scheduler)


def test_lookups_that_a_clear_makes_miss_are_answered_in_slices(
    waiting: tuple[TierRig, Engine],
) -> None:
    rig, e = waiting
    rig.say(e.scheduler, m.Clear(seq=9))
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0, 0]
    rig.answer_all(TierLoad)
    assert rig.finish() > 2
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0] * 8
    assert rig.gauge("promotions", "pins", "leases", "rows") == (0, 0, 0, 0)


def test_a_promotion_that_two_writers_wake_in_one_step_is_continued_once() -> None:
    """The reservations of a lost rank end in slices, and so do the wakes of the lookups: the second
    wake finds a promotion that waits for a tier by then."""
    rig = TierRig(512)
    writer, reader = rig.ready("w"), rig.ready("r")
    rig.only_in_tiers(writer, "a", "b", "c", "d")
    writer.begin("a", "b")
    for number in range(34):
        writer.begin(f"x{number}")
    writer.begin("a", "b", "c", "d", first=2)
    for _ in range(40):
        rig.begin(reader, "a", budget_ms=5000.0, writing=True)
    rig.begin(reader, "a", "b", "c", "d", budget_ms=5000.0, writing=True)
    rig.lose(writer.workers[0])
    rig.finish()
    rig.answer_all()
    rig.finish()
    assert [r.chunks for r in rig.replies(reader.scheduler)][-1] == 4
    assert rig.gauge("promotions") == (0,)
