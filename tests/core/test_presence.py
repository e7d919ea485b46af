"""Which rows are there, key by key, in L1 and in tiers."""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import TierLoad, TierProbe
from kvass.core.tiers import presence
from tests.core.rig import WIDTH, Engine, digests, layout
from tests.core.tier_rig import TierRig


@pytest.fixture
def rig() -> TierRig:
    return TierRig(tiers=2)


def question(*names: object, tiers: bool = True) -> m.Present:
    return m.Present(seq=7, digests=digests(*names), width=WIDTH, tiers=tiers)


def ask(rig: TierRig, engine: Engine, *names: object, tiers: bool = True) -> list[int]:
    """The answer, after all tiers have answered."""
    rig.replies(engine.scheduler)
    rig.say(engine.scheduler, question(*names, tiers=tiers))
    rig.answer_all()
    (reply,) = rig.replies(engine.scheduler)
    assert reply.seq == 7
    return list(reply.held)


def test_each_key_is_answered_for_itself(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    e.store("x", "b")
    rig.answer_all()
    assert ask(rig, e, "x", "a", "?", "b", tiers=False) == [1, 0, 0, 1]
    assert ask(rig, e, "x", "a", "?", "b", "a") == [1, 1, 0, 1, 1]
    assert ask(rig, e) == []
    assert not rig.open_ops(TierLoad)
    assert rig.quiet()


def test_what_is_being_written_is_not_there(rig: TierRig) -> None:
    e = rig.ready()
    e.begin("a")
    assert ask(rig, e, "a") == [0]


def test_tiers_are_asked_in_order_for_what_those_before_have_not(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.shelves[0] = {one for one in rig.shelves[0] if one[3].startswith(b"a")}
    rig.say(e.scheduler, question("a", "b", "c"))
    assert [each.seq for each in rig.promoting] == [7]
    (probe,) = rig.open_ops(TierProbe)
    assert (probe.tier, len(probe.batches[0].keys)) == (0, 3)
    rig.answer(probe)
    (probe,) = rig.open_ops(TierProbe)
    assert (probe.tier, len(probe.batches[0].keys)) == (1, 2)
    rig.answer(probe)
    assert [list(reply.held) for reply in rig.replies(e.scheduler)] == [[1, 1, 0]]


def test_a_key_is_there_if_every_group_has_it(rig: TierRig) -> None:
    e = rig.ready(layout=layout(1, 2))
    e.store("a", groups=0b01)
    e.store("b", groups=0b11)
    assert ask(rig, e, "a", "b", tiers=False) == [0, 1]
    rig.answer_all()
    rig.forget_l1()
    e.store("c", groups=0b11)
    assert ask(rig, e, "c", "a", "?", "b") == [1, 0, 0, 1]


def test_what_was_cleared_meanwhile_is_not_there(rig: TierRig) -> None:
    e = rig.ready()
    e.store("a")
    rig.answer_all()
    rig.say(e.scheduler, question("a", "b"))
    (probe,) = rig.open_ops(TierProbe)
    rig.say(e.scheduler, m.Clear(seq=8))
    rig.replies(e.scheduler)
    rig.answer(probe)
    (reply,) = rig.replies(e.scheduler)
    assert list(reply.held) == [0, 0]


def test_who_has_left_is_not_answered(rig: TierRig) -> None:
    e = rig.ready()
    rig.say(e.scheduler, question("a"))
    rig.lose(e.scheduler)
    rig.answer_all()
    assert not rig.replies(e.scheduler)


@pytest.mark.parametrize("most", ["MOST_OPEN", "MOST_OF_A_SESSION"])
def test_few_questions_wait_for_tiers(
    rig: TierRig, monkeypatch: pytest.MonkeyPatch, most: str
) -> None:
    monkeypatch.setattr(presence, most, 2)
    e = rig.ready()
    for _ in range(2):
        rig.say(e.scheduler, question("a"))
    assert rig.code(e.scheduler, question("a")) == "limit"
    assert rig.ask(e.scheduler, question("a", tiers=False)).held == b"\0"
    rig.answer_all()
    assert len(rig.replies(e.scheduler)) == 4
    assert rig.say(e.scheduler, question("a")) == []


def test_bad_questions_are_refused(rig: TierRig) -> None:
    e = rig.ready()
    many: Any = m.Present(seq=7, digests=bytes(8 * 8193), width=WIDTH)
    assert rig.code(e.scheduler, many) == "limit"
    assert rig.code(e.scheduler, m.Present(seq=7, digests=b"odd", width=WIDTH)) == "bad_value"
    assert rig.code(e.workers[0], question("a")) == "bad_rank"
