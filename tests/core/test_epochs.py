"""Epochs have an order: a store that goes back to a snapshot revives nothing that was cleared."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.effects import Emptied, TierClear, TierEpoch
from kvass.core.tiers.epochs import LOOK_AGAIN_S, to_note
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


# ---------------------------------------------------------------- a store that goes back


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


def test_why_a_tier_was_not_emptied_is_said(rig: TierRig) -> None:
    said, other = list[str](), rig.open()
    rig.replies(other)
    for why in ("may not list", ""):
        rig.say(other, m.EmptyTier(seq=3, tier="tier0"))
        [op] = rig.open_ops(TierClear)
        rig.asked.remove(op)
        rig.step(Emptied(op.op, False, why))
        said += [reply.text for reply in rig.replies(other)]
    assert said == [
        "tier0 (may not list) could not be emptied: say it again",
        "tier0 could not be emptied: say it again",
    ]


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


def test_above_the_highest_counter_there_is_room_for_clears() -> None:
    """One such note, and each clear of it is one that the next daemon believes."""
    noted = (0xFFFFFFFE << 32) | 7
    for clears in range(1, 4):
        after = to_note(asked(noted, renew=True), noted, NOW_S)
        assert after == noted + 1 == (0xFFFFFFFE << 32) + 7 + clears
        assert to_note(asked(), after, NOW_S) == after
        noted = after


def test_a_note_whose_counter_cannot_grow_is_damaged() -> None:
    fresh = to_note(asked(), (1 << 64) - 1, NOW_S)
    assert fresh >> 32 == NOW_S
