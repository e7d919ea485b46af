"""Clearing namespaces and tenants, emptying a tier, and quotas."""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import Send, TierLoad, TierProbe
from kvass.core.handlers import clearing
from kvass.types import NO_CAP, PAGE, Quota
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


# ---------------------------------------------------------------- a tenant


def of_tenants(*names: str, **core: Any) -> Rig:
    """L1 is divided among these tenants."""
    quotas = tuple(Quota(name, NO_CAP, 0) for name in names)
    return Rig(pages=64, extent=4, core={"quotas": quotas, **core})


def forget(rig: Rig, tenant: str) -> Any:
    return rig.ask(rig.open(), m.ClearTenant(seq=9, tenant=tenant))


def bytes_of(rig: Rig, tenant: str) -> int:
    return next(int(t["l1_bytes"]) for t in rig.status["tenants"] if t["tenant"] == tenant)


def test_a_tenants_rows_are_forgotten_and_no_others() -> None:
    rig = of_tenants("a", "b")
    e, other = rig.engine(), rig.engine("o", identity={"model": "o"})
    for name in ("a1", "a2", "a3"):
        e.store(name, tenant="a")
    other.store("a1", tenant="a")
    e.store("b1", tenant="b")
    e.store("d1")
    assert forget(rig, "a").rows == 4
    assert [e.holds(name) for name in ("a1", "a2", "a3", "b1", "d1")] == [0, 0, 0, 1, 1]
    assert other.holds("a1") == 0
    assert (bytes_of(rig, "a"), bytes_of(rig, "b")) == (0, 4 * PAGE)
    assert forget(rig, "a").rows == 0
    assert forget(rig, "default").rows == 1
    assert [e.holds(name) for name in ("b1", "d1")] == [1, 0]
    e.store("a1", tenant="a")
    assert e.holds("a1") == 1


def test_a_tenants_row_that_is_read_matches_no_more_and_is_freed_at_its_last_release() -> None:
    rig = of_tenants("a")
    e = rig.engine()
    e.store("x", tenant="a")
    lease = e.lookup("x").lease
    assert forget(rig, "a").rows == 1
    assert e.holds("x") == 0
    assert rig.gauge("rows", "pins") == (0, 1)
    assert bytes_of(rig, "a") == 4 * PAGE, "a rank may still read there"
    e.store("x", tenant="a")
    assert e.holds("x") == 1, "it is stored again beside the one that is read"
    e.give_back(lease)
    assert rig.gauge("rows", "pins") == (1, 0)
    assert e.holds("x") == 1


def test_who_announced_a_forgotten_row_is_told_though_it_is_read() -> None:
    rig = of_tenants("a")
    e = rig.engine()
    since = rig.ask(e.scheduler, m.Removals(seq=5, width=8)).upto
    e.store("x", "y", tenant="a")
    e.lookup("x")
    forget(rig, "a")
    told = rig.ask(e.scheduler, m.Removals(seq=6, width=8, since=since))
    assert (told.lost, sorted(told.removed[0][i : i + 1] for i in (0, 8))) == (False, [b"x", b"y"])


def test_what_a_tenant_is_storing_when_it_is_cleared_is_discarded_at_commit() -> None:
    rig = of_tenants("a", "b")
    e = rig.engine()
    mine, other = e.begin("x", tenant="a"), e.begin("y", tenant="b")
    assert forget(rig, "a").rows == 0
    assert rig.gauge("quarantined_bytes") == (PAGE,), "a rank may still write there"
    for grant in (mine, other):
        e.commit(grant.reservation)
    assert (e.holds("x"), e.holds("y")) == (0, 1)
    assert rig.count("discarded_cleared") == 1
    assert rig.gauge("quarantined_bytes") == (0,)


def test_a_tenant_is_cleared_in_slices_and_the_clear_is_answered_once() -> None:
    """A slice has one extent set here. What is stored meanwhile stays."""
    rig = of_tenants("a", slice_slots=4)
    e = rig.engine()
    for i in range(12):
        e.store(i, tenant="a")
    visitor = rig.open()
    assert rig.say(visitor, m.ClearTenant(seq=9, tenant="a")) == []
    assert rig.gauge("rows") == (8,)
    grant = e.begin("new", tenant="a")
    e.commit(grant.reservation)
    said = []
    while rig.machine.next_deadline() == rig.now:
        rig.wait(0)
        said += [x.message for x in rig.last if isinstance(x, Send) and x.session == visitor]
    assert said == [m.Cleared(seq=9, rows=12)]
    assert e.holds("new") == 1
    assert rig.gauge("rows") == (1,)


def test_a_lookup_that_waits_for_a_tier_gets_nothing_that_was_cleared_meanwhile() -> None:
    rig = TierRig(core={"quotas": (Quota("a", NO_CAP, 0),)})
    e = rig.ready()
    for name in "xy":
        e.store(name, tenant="a")
    rig.answer_all()
    rig.forget_l1()
    e.store("x", tenant="a")
    rig.answer_all()
    for cleared in (True, False):  # the other is the control
        rig.begin(e, "x", "y", tenant="a", budget_ms=1000.0)
        rig.answer_all(TierProbe)
        assert rig.open_ops(TierLoad)
        assert rig.replies(e.scheduler) == []
        if cleared:
            assert forget(rig, "a").rows == 1
        rig.answer_all()
        (found,) = rig.replies(e.scheduler)
        assert found.chunks == (0 if cleared else 2)


@pytest.mark.parametrize(
    ("tenant", "text"),
    [
        ("nobody", "tenant 'nobody': there is no such"),
        ("passing", "tenant: passing has no quota, so its rows count for 'default'"),
    ],
)
def test_a_tenant_without_rows_of_its_own_is_refused(tenant: str, text: str) -> None:
    rig = of_tenants("a")
    e = rig.engine()
    e.store("x", tenant="passing")
    e.lookup("x", tenant="passing")
    reply = forget(rig, tenant)
    assert (reply.code, reply.text) == ("bad_value", text)
    assert rig.code(e.scheduler, m.ClearTenant(seq=3, tenant="a")) == "forbidden"
    assert rig.gauge("rows") == (1,)


def test_clears_of_tenants_are_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "MOST_CLEARS", 1)
    rig = of_tenants("a", slice_slots=4)
    e = rig.engine()
    for i in range(8):
        e.store(i, tenant="a")
    visitor = rig.open()
    rig.say(visitor, m.ClearTenant(seq=9, tenant="a"))
    assert rig.code(visitor, m.ClearTenant(seq=10, tenant="a")) == "limit"
    rig.finish()
    assert rig.gauge("rows") == (0,)


# ---------------------------------------------------------------- tiers, quotas


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
