"""Tiers that come, go, change their order or their store while the core serves."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.effects import TierEpoch, TierLoad, TierProbe, TiersAre, TierStore
from tests.core.test_generations import move
from tests.core.tier_rig import TierRig


def use(rig: TierRig, *numbers: int, renewed: tuple[int, ...] = ()) -> None:
    """The tiers of these numbers from now on."""
    while len(rig.shelves) <= max(numbers, default=0):
        rig.shelves.append(set())
        rig.notes.append({})
    rig.step(TiersAre(numbers, tuple(f"tier{n}" for n in numbers), renewed))


def places(rig: TierRig) -> list[int]:
    return [tier["place"] for tier in rig.status["tiers"]]


def test_a_tier_that_is_added_takes_part() -> None:
    rig = TierRig(tiers=0)
    e = rig.ready()
    e.store("before")
    use(rig, 0)
    (asked,) = rig.open_ops(TierEpoch)
    rig.answer(asked)
    e.store("after")
    rig.answer_all()
    assert [name[3].rstrip(b"\0") for name in rig.shelves[0]] == [b"after"]
    rig.forget_l1()
    assert rig.look_up(e, "after")[0].chunks == 1
    assert rig.status["namespaces"][0]["hit_tokens_tiers"] == [16]


def test_tiers_are_asked_in_their_new_order() -> None:
    rig = TierRig(tiers=2)
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    use(rig, 2, 1, 0)
    rig.answer_all(TierEpoch)
    assert places(rig) == [3, 2, 1]
    rig.begin(e, "a")
    for tier in (2, 1):
        (probe,) = rig.open_ops(TierProbe)
        assert probe.tier == tier
        rig.answer(probe)
    (load,) = rig.open_ops(TierLoad)
    assert load.tier == 1
    rig.answer_all()
    assert len(rig.shelves[2]) == 1, "what tier 1 brought goes to the one before it"
    assert len(rig.shelves[0]) == 1


def test_what_is_queued_for_a_removed_tier_is_lost_and_counted() -> None:
    rig = TierRig()
    e = rig.ready()
    e.store(*range(12))
    (store,) = rig.open_ops(TierStore)
    assert rig.status["tiers"][0]["flush_queue_rows"] == 4
    use(rig)
    rig.wait(0)
    assert rig.status["tiers"][0]["flush_queue_rows"] == 0
    assert rig.count("flushes_lost") == 4
    assert rig.gauge("pins") == (8,), "its process may still read them"
    rig.down = True
    rig.answer(store)
    assert rig.gauge("pins") == (0,)
    assert rig.count("flushes_lost") == 12
    e.store("more")
    rig.wait(100)
    assert not rig.asked
    assert rig.machine.next_deadline() is None
    assert rig.machine.unflushed() == []


@pytest.mark.parametrize("when", [TierProbe, TierLoad])
def test_who_waits_for_a_removed_tier_is_answered(when: type[TierProbe | TierLoad]) -> None:
    """As soon as its process has ended; what it loads until then is a hit."""
    rig = TierRig()
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.begin(e, "a")
    if when is TierLoad:
        rig.answer_all(TierProbe)
    use(rig)
    assert all(isinstance(op, when) for op in rig.asked)
    assert rig.asked
    assert not rig.replies(e.scheduler)
    rig.down = True
    rig.answer_all()
    (reply,) = rig.replies(e.scheduler)
    assert reply.chunks == 0
    rig.down = False
    (reply,) = rig.look_up(e, "a")
    assert (reply.chunks, rig.asked) == (0, [])


def test_nothing_is_loaded_from_a_tier_that_went_while_another_was_asked() -> None:
    """It comes back at once, and has told no epoch yet."""
    rig = TierRig(tiers=2)
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.shelves[0] = {one for one in rig.shelves[0] if one[3].startswith(b"a")}
    rig.begin(e, "a", "b")
    rig.answer(rig.open_ops(TierProbe)[0])
    (second,) = rig.open_ops(TierProbe)
    use(rig, 1)
    use(rig, 0, 1)
    rig.answer(second)
    assert not [load for load in rig.open_ops(TierLoad) if load.tier == 0]
    rig.answer_all()
    assert rig.replies(e.scheduler)[0].chunks == 0
    assert rig.look_up(e, "a", "b")[0].chunks == 2


def test_a_tier_that_was_away_learns_of_a_clear_when_it_comes_back() -> None:
    rig = TierRig()
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    use(rig)
    assert isinstance(rig.ask(e.scheduler, m.Clear(seq=11)), m.Cleared)
    use(rig, 0)
    (asked,) = rig.open_ops(TierEpoch)
    assert asked.renew
    assert rig.look_up(e, "a")[0].chunks == 0
    e.store("a")
    rig.answer_all()
    assert len({epoch for _, epoch, _, _ in rig.shelves[0]}) == 2


def test_a_clear_that_a_tier_did_not_note_before_it_went_is_said_to_have_failed() -> None:
    rig = TierRig()
    e = rig.ready()
    rig.say(e.scheduler, m.Clear(seq=11))
    use(rig)
    rig.down = True
    rig.answer_all()
    (reply,) = rig.replies(e.scheduler)
    assert isinstance(reply, m.Error)
    assert reply.code == "tier_down"


def test_a_tier_whose_store_may_be_another_tells_its_epochs_anew() -> None:
    rig = TierRig()
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.shelves[0], rig.notes[0] = set(), {}
    use(rig, 0, renewed=(0,))
    e.store("b")
    assert not rig.open_ops(TierStore), "its epoch there is not known"
    rig.answer_all()
    assert {epoch for _, epoch, _, _ in rig.shelves[0]} == set(rig.notes[0].values())


def test_an_engine_of_its_own_generation_still_uses_no_tier() -> None:
    rig = TierRig(tiers=0)
    e = rig.ready()
    move(e)
    use(rig, 0)
    rig.answer_all()
    e.store("a")
    rig.wait(40)
    rig.answer_all()
    assert not rig.shelves[0]
