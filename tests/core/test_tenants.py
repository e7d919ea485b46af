"""Tenants in the core: who pays, what is reserved, who makes room (laws 6 and 12)."""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.clients.tenants import MOST, SHOWN
from kvass.core.effects import QuotasAre, Stopping, TierStore
from kvass.errors import Refused
from kvass.types import MOST_QUOTAS, NO_CAP, PAGE, GroupLayout, Quota, RankLayout
from tests.core.rig import Engine, Rig, digests, layout
from tests.core.tier_rig import TierRig


def quota(tenant: str, cap: int | None = None, reserved: int = 0) -> Quota:
    """In pages."""
    return Quota(tenant, NO_CAP if cap is None else cap * PAGE, reserved * PAGE)


def divided(*quotas: Quota, pages: int = 32, extent: int = 2) -> Rig:
    return Rig(pages=pages, extent=extent, core={"quotas": quotas})


def store(engine: Engine, tenant: str, *names: object) -> None:
    for name in names:
        engine.store(name, tenant=tenant)


def names(tenant: str, count: int, first: int = 0) -> list[str]:
    return [f"{tenant}{i}" for i in range(first, first + count)]


def held(engine: Engine, *keys: str) -> int:
    return sum(engine.holds(key) for key in keys)


def figures(rig: Rig, tenant: str) -> dict[str, Any]:
    return next(t for t in rig.status["tenants"] if t["tenant"] == tenant)


def pages_of(rig: Rig, tenant: str) -> int:
    return int(figures(rig, tenant)["l1_bytes"]) // PAGE


def change(rig: Rig, given: Quota, remove: bool = False) -> Any:
    session = rig.open(own=True)
    reply = rig.ask(session, m.SetQuota(seq=3, quota=given, remove=remove))
    rig.lose(session)
    return reply


# ---------------------------------------------------------------- isolation


def test_a_noisy_tenant_takes_nothing_of_what_is_reserved() -> None:
    rig = divided(quota("calm", reserved=8))
    e = rig.engine()
    store(e, "calm", *names("calm", 8))
    store(e, "noisy", *names("noisy", 200))
    assert held(e, *names("calm", 8)) == 8
    assert pages_of(rig, "calm") == 8
    assert rig.gauge("l1_used_bytes") == (32 * PAGE,), "the noisy one has all of the rest"


def test_control_without_a_reservation_the_noisy_one_takes_all() -> None:
    e = divided().engine()
    store(e, "calm", *names("calm", 8))
    store(e, "noisy", *names("noisy", 200))
    assert held(e, *names("calm", 8)) == 0


@pytest.mark.parametrize("flush", ["write_through", "on_evict"])
def test_tiers_are_told_who_pays_for_what_they_store(flush: str) -> None:
    """At the end ``on_evict`` stores the rows of all tenants together."""
    rig = TierRig(tiers=1, core={"quotas": (quota("a"), quota("b")), "flush": flush})
    e = rig.ready()
    for tenant, name in (("a", "1"), ("b", "2"), ("nobody", "3"), ("a", "4")):
        e.store(name, tenant=tenant)
    rig.step(Stopping())
    stored: dict[str, set[bytes]] = {}
    for op in rig.open_ops(TierStore):
        stored.setdefault(op.tenant, set()).update(key.tobytes()[:1] for key in op.records.keys)
    assert stored == {"a": {b"1", b"4"}, "b": {b"2"}, "default": {b"3"}}


def test_a_late_tenant_gets_what_is_reserved_for_it() -> None:
    rig = divided(quota("late", reserved=12))
    e = rig.engine()
    store(e, "", *names("noisy", 64))
    store(e, "late", *names("late", 12))
    store(e, "", *names("more", 64))
    assert held(e, *names("late", 12)) == 12


def test_another_layout_of_a_noisy_tenant_takes_nothing_of_it_either() -> None:
    rig = divided(quota("calm", reserved=8))
    e, other = rig.engine(), rig.engine("o", layout=layout(3))
    store(e, "calm", *names("calm", 8))
    store(other, "noisy", *names("noisy", 60))
    assert held(e, *names("calm", 8)) == 8


def test_who_has_pinned_all_of_its_own_takes_nothing_of_it_either() -> None:
    rig = divided(quota("calm", reserved=8))
    e = rig.engine()
    store(e, "calm", *names("calm", 8))
    store(e, "noisy", *names("noisy", 24))
    assert all(e.lookup(key).chunks for key in names("noisy", 24))
    assert e.reserve("more", tenant="noisy").chunks == ()
    assert held(e, *names("calm", 8)) == 8


def test_who_is_over_its_share_pays_first() -> None:
    rig = divided(quota("a"), quota("b"), pages=48)
    e = rig.engine()
    store(e, "a", *names("a", 48))
    store(e, "b", *names("b", 4))
    for key in names("a", 48):
        e.holds(key)  # all that a has was used after what b has
    store(e, "b", *names("b", 12, 4))
    assert held(e, *names("b", 16)) == 16
    assert pages_of(rig, "a") + pages_of(rig, "b") == 48
    store(e, "", *names("d", 16))
    assert held(e, *names("b", 16)) == 16, "b has its third, and a more than its own"
    assert [pages_of(rig, t) for t in ("a", "b", "default")] == [16, 16, 16]


def test_control_without_quotas_the_least_recently_used_pay() -> None:
    e = divided(pages=48).engine()
    store(e, "a", *names("a", 48))
    store(e, "b", *names("b", 4))
    for key in names("a", 48):
        e.holds(key)
    store(e, "b", *names("b", 12, 4))
    assert held(e, *names("b", 4)) == 0


def test_what_is_reserved_is_part_of_a_share() -> None:
    rig = divided(quota("a", reserved=16))
    e = rig.engine()
    store(e, "a", *names("a", 24))
    store(e, "", *names("d", 40))
    assert held(e, *names("a", 24)) == 24, "16 reserved and half of the other 16"
    store(e, "a", *names("more", 8))
    assert pages_of(rig, "a") == 24


def test_a_tenant_at_its_share_replaces_its_own() -> None:
    rig = divided(quota("a"), pages=16)
    e = rig.engine()
    store(e, "", *names("d", 8))
    store(e, "a", *names("a", 40))
    assert held(e, *names("d", 8)) == 8
    assert held(e, *names("a", 8, 32)) == 8


# ---------------------------------------------------------------- caps


def test_a_tenant_never_has_more_than_its_cap() -> None:
    rig = divided(quota("small", cap=5), extent=2)
    e = rig.engine()
    for number in range(20):
        e.store(f"s{number}", tenant="small")
        assert pages_of(rig, "small") <= 5
    assert held(e, *(f"s{i}" for i in range(15, 20))) == 5, "the last five; all of the cap is used"


def test_all_layouts_of_a_tenant_share_its_cap() -> None:
    rig = divided(quota("small", cap=6))
    e, other = rig.engine(), rig.engine("o", layout=layout(2))
    store(e, "small", *names("e", 6))
    store(other, "small", *names("o", 2))
    assert held(other, *names("o", 2)) == 2
    assert pages_of(rig, "small") == 6


def test_a_cap_below_a_row_stores_nothing_and_harms_nobody() -> None:
    rig = divided(quota("tiny", cap=1))
    e = rig.engine(layout=layout(2))
    assert e.reserve("t", tenant="tiny").chunks == ()
    store(e, "", "d")
    assert e.holds("d") == 1


def test_a_cap_that_is_lowered_is_reached_as_the_tenant_stores() -> None:
    rig = divided(quota("a"))
    e = rig.engine()
    store(e, "a", *names("a", 20))
    change(rig, quota("a", cap=4))
    assert pages_of(rig, "a") == 20, "nothing is evicted before somebody needs room"
    store(e, "a", *names("n", 16))
    assert pages_of(rig, "a") <= 4
    assert e.holds("n15") == 1


# ---------------------------------------------------------------- sharing


def test_a_row_is_paid_for_by_who_stored_it_first_and_found_by_all() -> None:
    rig = divided(quota("a", reserved=4), quota("b"))
    e = rig.engine()
    e.store("p", "q", tenant="a")
    found = e.lookup("p", "q", tenant="b")
    assert found.chunks == 2
    e.give_back(found.lease)
    e.store("p", "q", "r", tenant="b")
    assert e.holds("p", "q", "r") == 3
    assert [pages_of(rig, t) for t in "ab"] == [2, 2]
    assert rig.gauge("rows") == (3,)


def test_a_lease_over_rows_of_several_tenants_ends_whole() -> None:
    rig = divided(quota("a"), quota("b"), pages=8)
    e = rig.engine()
    store(e, "a", "p")
    e.store("p", "q", tenant="b")
    lease = e.lookup("p", "q").lease
    e.give_back(lease)
    assert rig.gauge("pins") == (0,)
    assert e.clear() == 2
    assert [pages_of(rig, t) for t in "ab"] == [0, 0]


def test_a_full_row_that_leaves_takes_windows_of_other_tenants_with_it() -> None:
    window = GroupLayout("sliding_window", 16, ("a",), (PAGE,), 20)
    rig = divided(quota("a", cap=2), quota("b"))
    e = rig.engine(layout=RankLayout((layout(1).groups[0], window)))
    e.store("k", groups=1, tenant="a")
    e.store("l", groups=3, tenant="b")
    e.store("k", groups=2, tenant="b")
    assert held(e, "k", "l") == 2
    store(e, "a", "x", "y")
    assert held(e, "k", "l") == 1
    assert rig.count("evicted_orphaned") == 1


def test_what_a_tier_gives_is_paid_for_by_who_asked() -> None:
    rig = TierRig(core={"quotas": (quota("a", cap=3), quota("b"))})
    e = rig.ready()
    store(e, "b", "x", "y", "z", "w")
    rig.answer_all()
    rig.forget_l1()
    assert pages_of(rig, "b") == 0
    (found,) = rig.look_up(e, "x", tenant="a")
    assert found.chunks == 1
    assert (pages_of(rig, "a"), pages_of(rig, "b")) == (3, 0)
    e.give_back(found.lease)
    for key in "yzw":
        (found,) = rig.look_up(e, key, tenant="a")
        e.give_back(found.lease)
    assert (pages_of(rig, "a"), rig.gauge("rows")) == (3, (3,)), "its cap holds for loads too"
    assert figures(rig, "a")["hit_tokens"] == 4 * 16


def test_one_step_makes_room_for_one_tenant() -> None:
    """The others of a message are put off, and are granted when they are asked for again."""
    e = divided(quota("a"), quota("b")).engine()
    items = [
        m.ReserveItem(request=name, digests=digests(name), tenant=tenant)
        for name, tenant in (("x", "a"), ("y", "a"), ("z", "b"), ("w", "a"))
    ]
    assert [(g.chunks, g.later) for g in e.reserve_items(*items)] == [
        *(((0,), -1), ((0,), -1)),
        *(((), 0), ((), 0)),
    ]
    assert [g.chunks for g in e.reserve_items(items[2])] == [(0,)]
    undivided = divided().engine()
    assert [g.later for g in undivided.reserve_items(*items)] == [-1] * 4


# ---------------------------------------------------------------- change


def test_a_quota_is_changed_and_taken_away_while_all_goes_on() -> None:
    rig = divided()
    e = rig.engine()
    store(e, "a", *names("old", 8))
    assert isinstance(change(rig, quota("a", reserved=8)), m.QuotaSet)
    assert pages_of(rig, "a") == 0, "what it stored before is the default tenant's"
    store(e, "a", *names("a", 8))
    store(e, "", *names("noisy", 100))
    assert held(e, *names("a", 8)) == 8
    assert isinstance(change(rig, quota("a"), remove=True), m.QuotaSet)
    store(e, "", *names("noisy", 60, 100))
    assert held(e, *names("a", 8)) == 0
    assert pages_of(rig, "a") == 0


def test_all_quotas_are_replaced_at_once_or_none() -> None:
    rig = divided(quota("a", reserved=20), quota("b", reserved=12))
    rig.step(QuotasAre((quota("b", reserved=20), quota("c", reserved=12))))
    assert rig.machine.quotas == {quota("b", reserved=20), quota("c", reserved=12)}
    rig.step(QuotasAre((quota("a"), quota("c", reserved=33))))
    assert rig.machine.quotas == {quota("b", reserved=20), quota("c", reserved=12)}


def refused(rig: Rig, given: Quota, remove: bool = False) -> str:
    reply = change(rig, given, remove)
    assert isinstance(reply, m.Error), reply
    return f"{reply.code}: {reply.text}"


def test_what_cannot_be_is_refused_with_its_reason() -> None:
    rig = divided(quota("a", cap=16, reserved=16))
    rig.engine()
    before = rig.status["tenants"]
    assert "the cap 8KiB is below what is reserved, 12KiB" in refused(rig, quota("b", 2, 3))
    assert "b: 69632 bytes reserved, 65536 for others" in refused(rig, quota("b", reserved=17))
    assert "not 'other'" in refused(rig, quota("other"))
    assert "letters" in refused(rig, quota("no spaces"))
    assert "positive" in refused(rig, quota("b", cap=0))
    assert "positive" in refused(rig, quota("b", reserved=-1))
    assert "there is none" in refused(rig, quota("b"), remove=True)
    assert rig.status["tenants"] == before


def test_quotas_that_cannot_be_stop_the_start() -> None:
    with pytest.raises(Refused, match="L1 has"):
        divided(quota("a", reserved=20), quota("b", reserved=20))


# ---------------------------------------------------------------- figures


def test_each_tenant_has_figures_of_its_own() -> None:
    rig = divided(quota("a"))
    e = rig.engine()
    store(e, "a", "x")
    e.give_back(e.lookup("x", "y", tenant="a").lease)
    e.lookup("z", tenant="b")
    a, b = figures(rig, "a"), figures(rig, "b")
    assert (a["lookups"], a["lookup_tokens"], a["hit_tokens"]) == (1, 32, 16)
    assert (b["lookups"], b["lookup_tokens"], b["hit_tokens"]) == (1, 16, 0)
    assert (a["quota"], b["quota"]) == (True, False)


def test_invented_tenants_cost_bounded_memory_and_gain_nothing() -> None:
    rig = divided(quota("calm", reserved=8))
    e = rig.engine()
    store(e, "calm", *names("calm", 8))
    for i in range(300):
        e.lookup("no", tenant=f"invented{i}")
        e.store(f"i{i}", tenant=f"invented{i}")
    e.lookup("no", tenant="\n<script>" * 400)
    shown = rig.status["tenants"]
    assert len(shown) == SHOWN + 3
    other = figures(rig, "other")
    assert other["lookups"] == 300 - SHOWN + 1
    assert sum(t["lookups"] for t in shown) == 301
    assert held(e, *names("calm", 8)) == 8
    assert {t["tenant"] for t in shown if t["l1_bytes"]} == {"calm", "default"}


def test_there_are_so_many_quotas_and_no_more() -> None:
    rig = divided()
    rig.engine().lookup("no", tenant="passing")
    for i in range(MOST_QUOTAS):
        assert isinstance(change(rig, quota(f"t{i}")), m.QuotaSet)
    assert "limit" in refused(rig, quota("one-more"))
    assert isinstance(change(rig, quota("t0"), remove=True), m.QuotaSet)
    assert isinstance(change(rig, quota("one-more")), m.QuotaSet)
    for i in range(2 * MOST):
        change(rig, quota(f"new{i}"))
        change(rig, quota(f"new{i}"), remove=True)
    assert len(rig.status["tenants"]) <= MOST
