"""Epochs have an order: a store that goes back to a snapshot revives nothing that was cleared."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.effects import (
    EpochIs,
    Faulted,
    TierEpoch,
    TierProbe,
    TierReport,
    TierStore,
)
from kvass.core.tiers.epochs import LOOK_AGAIN_S, to_note
from tests.core.rig import Engine
from tests.core.tier_rig import TierRig, another_boot

NOW_S = 1_800_000_000.0


def asked(known: int = 0, renew: bool = False, fresh: int = 5) -> TierEpoch:
    return TierEpoch(0, 1, b"n" * 32, fresh=fresh, renew=renew, known=known)


def found_by_another_boot(rig: TierRig) -> int:
    again = another_boot(rig)
    chunks: int = again.look_up(again.ready(), "a")[0].chunks
    return chunks


@pytest.fixture
def rig() -> TierRig:
    return TierRig()


@pytest.fixture
def engine(rig: TierRig) -> Engine:
    """It stored ``a``; its tier has a snapshot of that; it cleared; its tier went back."""
    e = rig.ready()
    e.store("a")
    rig.answer_all()
    snapshot = set(rig.shelves[0]), dict(rig.notes[0])
    rig.say(e.scheduler, m.Clear(seq=11))
    rig.answer_all()
    rig.shelves[0], rig.notes[0] = snapshot
    return e


# ---------------------------------------------------------------- a store that goes back


@pytest.mark.parametrize("when", ["looks again", "tier is back"])
def test_a_daemon_sets_its_epoch_again_in_a_store_that_went_back(
    rig: TierRig, engine: Engine, when: str
) -> None:
    assert found_by_another_boot(rig) == 1  # what the daemon is there to prevent
    if when == "looks again":
        rig.wait(LOOK_AGAIN_S)
    else:
        rig.step(TierReport(0, {"up": False}))
        assert not rig.open_ops(TierEpoch)
        rig.step(TierReport(0, {"up": True}))
    rig.answer_all()
    assert found_by_another_boot(rig) == 0
    assert rig.look_up(engine, "a")[0].chunks == 0


def test_a_namespace_that_is_met_again_does_not_adopt_the_older_epoch(
    rig: TierRig, engine: Engine
) -> None:
    rig.lose(engine.scheduler, *engine.workers)
    other = rig.engine("other", chunk_tokens=32)
    assert engine.namespace not in rig.machine.state.by_digest  # it was forgotten
    rig.answer_all()
    rig.lose(other.scheduler, *other.workers)
    again = rig.ready("again")
    assert again.namespace == engine.namespace
    assert rig.look_up(again, "a")[0].chunks == 0
    assert found_by_another_boot(rig) == 0


def test_an_epoch_that_is_read_again_stays_in_use(rig: TierRig) -> None:
    """Also while the question is open, and if the tier cannot tell."""
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.step(TierReport(0, {"up": False}))
    rig.step(TierReport(0, {"up": True}))
    (question,) = rig.open_ops(TierEpoch)
    rig.begin(e, "a")
    rig.asked.remove(question)
    rig.answer_all()
    rig.step(EpochIs(question.op, None))
    assert [one.chunks for one in rig.replies(e.scheduler)] == [1]


def test_a_note_is_not_read_more_often_than_it_has_to_be(rig: TierRig) -> None:
    rig.ready()
    for _ in range(4):
        rig.wait(LOOK_AGAIN_S / 4 + 0.1)
    assert len(rig.open_ops(TierEpoch)) == 1
    rig.wait(LOOK_AGAIN_S)
    assert len(rig.open_ops(TierEpoch)) == 1  # that one is still open


def test_another_daemons_clear_is_remembered_and_not_adopted(rig: TierRig) -> None:
    """Its engines' weights may have changed, and ours have not."""
    e = rig.ready()
    (ours,) = rig.notes[0].values()
    theirs = to_note(asked(known=ours, renew=True), ours, 0.0)
    rig.notes[0][e.namespace] = theirs
    rig.wait(LOOK_AGAIN_S)
    rig.answer_all()
    e.store("a")
    rig.answer_all()
    assert {record[1] for record in rig.shelves[0]} == {ours}
    rig.notes[0][e.namespace] = ours  # the store goes back, and they are gone
    rig.wait(LOOK_AGAIN_S)
    rig.answer_all()
    assert rig.notes[0][e.namespace] == theirs


def test_of_a_clear_that_crossed_another_question_the_clears_epoch_is_used(rig: TierRig) -> None:
    e = rig.engine()
    rig.say(e.scheduler, m.Clear(seq=11))
    first, renewal = rig.open_ops(TierEpoch)
    rig.answer(renewal)
    rig.answer(first)
    e.store("a")
    rig.answer_all()
    assert {record[1] for record in rig.shelves[0]} == set(rig.notes[0].values())
    assert rig.notes[0][e.namespace] & 0xFFFFFFFF == renewal.fresh & 0xFFFFFFFF


# ---------------------------------------------------------------- the order


def test_the_higher_epoch_is_noted() -> None:
    assert to_note(asked(known=7 << 32), None, NOW_S) == 7 << 32
    assert to_note(asked(known=7 << 32), 6 << 32, NOW_S) == 7 << 32
    assert to_note(asked(known=7 << 32), 7 << 32 | 1, NOW_S) == 7 << 32 | 1
    assert to_note(asked(), 1, NOW_S) == 1


@pytest.mark.parametrize("noted", [None, 6 << 32, 8 << 32 | 99, int(NOW_S + 9) << 32])
@pytest.mark.parametrize("known", [0, 7 << 32 | 99, int(NOW_S + 8) << 32])
def test_a_fresh_epoch_is_above_all_that_was_seen(noted: int | None, known: int) -> None:
    fresh = to_note(asked(known, renew=True), noted, NOW_S)
    assert fresh >> 32 > max(known, noted or 0) >> 32
    assert fresh >> 32 >= NOW_S
    assert fresh & 0xFFFFFFFF == 5


def test_a_fresh_epoch_is_above_one_whose_note_was_lost(rig: TierRig) -> None:
    """The note is lost, another daemon starts and clears, and the store goes back."""
    e = rig.ready()
    rig.say(e.scheduler, m.Clear(seq=11))
    rig.answer_all()
    e.store("a")
    rig.answer_all()
    snapshot = dict(rig.notes[0])
    rig.notes[0].clear()
    rig.now += 5
    again = another_boot(rig)
    cleared = again.ready()
    again.say(cleared.scheduler, m.Clear(seq=11))
    again.answer_all()
    rig.notes[0].update(snapshot)
    again.wait(LOOK_AGAIN_S)
    again.answer_all()
    assert found_by_another_boot(again) == 0


@pytest.mark.parametrize("clock_s", [0.0, 1e18])
def test_a_wrong_clock_leaves_room_for_clears(clock_s: float) -> None:
    epoch = 0
    for _ in range(3):
        after = to_note(asked(epoch, renew=True), None, clock_s)
        assert epoch < after < 1 << 64
        epoch = after


def test_a_note_whose_counter_cannot_grow_is_damaged() -> None:
    fresh = to_note(asked(), (1 << 64) - 1, NOW_S)
    assert fresh >> 32 == NOW_S


def test_a_cleared_tier_is_not_used_until_it_has_noted_it(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.say(e.scheduler, m.Clear(seq=11))
    rig.begin(e, "a")
    e.store("b")
    assert not rig.open_ops(TierProbe)
    assert not rig.open_ops(TierStore)
    rig.answer_all()
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
    rig.answer_all()
    assert rig.replies(e.workers[0]) == []


def test_a_clear_that_a_tier_does_not_note_is_refused_and_owed(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.down = True
    rig.say(e.scheduler, m.Clear(seq=11))
    rig.answer_all()
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


def test_a_tier_that_cannot_tell_its_epoch_is_not_used(rig: TierRig) -> None:
    rig.down = True
    e = rig.ready()
    e.store("a")
    assert not rig.asked
    assert rig.look_up(e, "a", "b")[0].chunks == 1
    rig.down = False
    rig.wait(1.0)
    rig.look_up(e, "a", "b")
    rig.answer_all()
    rig.forget_l1()
    assert rig.look_up(e, "a", "b")[0].chunks == 1  # what was queued went there after all
