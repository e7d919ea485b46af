"""Clearing namespaces, emptying a tier, and quotas."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.effects import (
    Send,
)
from kvass.core.handlers import clearing
from kvass.types import PAGE, Quota
from tests.core.rig import Rig
from tests.core.tier_rig import TierRig


@pytest.fixture
def few() -> Rig:
    """Ends two leases or reservations at a time."""
    return Rig(pages=64, extent=4, instance_write_share=1.0, core={"slice_ends": 2})


def test_clear_forgets_what_is_ready(rig: Rig) -> None:
    e, twin, other = rig.engine(), rig.engine("e2"), rig.engine("o", identity={"model": "o"})
    e.store("a", "b")
    other.store("a")
    assert e.clear() == 2
    assert [x.holds("a") for x in (e, twin, other)] == [0, 0, 1]
    assert e.clear() == 0


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
    assert few.finish() >= 2
    assert few.gauge("rows") == (0,)


def test_one_tier_is_emptied_and_l1_and_the_others_stay() -> None:
    rig = TierRig(tiers=2)
    e = rig.ready()
    e.store("a")
    rig.answer_all()
    looker = rig.open()
    for _ in range(2):
        rig.say(looker, m.EmptyTier(seq=5, tier="tier1"))
    assert [one.code for one in rig.replies(looker) if isinstance(one, m.Error)] == ["limit"]
    rig.answer_all()
    assert rig.replies(looker) == [m.Cleared(seq=5)]
    assert [len(shelf) for shelf in rig.shelves] == [1, 0]
    assert e.holds("a") == 1
    assert rig.code(looker, m.EmptyTier(seq=6, tier="tier9")) == "bad_value"
    assert rig.code(e.scheduler, m.EmptyTier(seq=6, tier="tier1")) == "forbidden"
    rig.down = True
    rig.say(looker, m.EmptyTier(seq=7, tier="tier0"))
    rig.answer_all()
    (refused,) = rig.replies(looker)[-1:]
    assert (refused.code, refused.text) == ("tier_down", "tier0 could not be emptied: say it again")
    assert len(rig.shelves[0]) == 1


def test_only_the_daemons_user_changes_quotas() -> None:
    rig = Rig()
    e = rig.engine(own=True)
    ask = m.SetQuota(seq=3, quota=Quota("a", PAGE, 0))
    assert rig.code(e.scheduler, ask) == "forbidden"
    assert rig.code(rig.open(own=False), ask) == "forbidden"
