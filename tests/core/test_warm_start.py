"""The warm start: what was used last comes back first, evicts nothing and waits for lookups."""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import (
    Stopping,
    TierEpoch,
    TierLoad,
    TierProbe,
    TierRecall,
    TierRemember,
    TierReport,
)
from kvass.core.tiers import warm_start
from kvass.types import DEFAULT_TENANT, Quota
from tests.core.rig import Engine, key
from tests.core.tier_rig import TierRig


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load has one row."""
    monkeypatch.setattr(warm_start, "LOAD_BYTES", 1)


def life(before: TierRig | None = None, share: float = 1.0, **options: Any) -> TierRig:
    """A life of the daemon; its tiers are those of the life ``before``."""
    core = {"warm_share": share, **options.pop("core", {})}
    rig = TierRig(core=core, **options)
    if before is not None:
        rig.shelves, rig.notes, rig.lists = before.shelves, before.notes, before.lists
    return rig


def stop(rig: TierRig) -> None:
    rig.step(Stopping())
    rig.answer_all()
    assert not rig.machine.busy


def left(*names: object, share: float = 1.0, **options: Any) -> TierRig:
    """The next life after one in which ``names`` were stored in this order."""
    rig = life()
    rig.ready().store(*names)
    rig.answer_all()
    stop(rig)
    return life(rig, share, **options)


def planned(rig: TierRig) -> tuple[Engine, list[TierLoad]]:
    """An engine registers, and the tier tells the list: the loads that are open."""
    engine = rig.engine("e")
    rig.answer_all(TierEpoch)
    rig.answer_all(TierRecall)
    return engine, rig.open_ops(TierLoad)


def loads_in_order(rig: TierRig) -> list[bytes]:
    """Carry out the warm start; what was loaded, in order."""
    loaded = []
    while loads := rig.open_ops(TierLoad):
        (one,) = loads  # one at a time
        loaded += [key.tobytes().rstrip(b"\0") for key in one.records.keys]
        rig.answer(one)
    return loaded


def named(*names: object) -> list[bytes]:
    return [key(name).rstrip(b"\0") for name in names]


def test_the_rows_of_the_last_life_come_back_the_last_used_first() -> None:
    rig = life()
    e = rig.ready()
    for name in "abc":
        e.store(name)
    e.give_back(e.lookup("a").lease)
    rig.answer_all()
    stop(rig)
    rig = life(rig)
    e, _ = planned(rig)
    assert rig.status["warm_start_planned_bytes"] == rig.status["warm_start_left_bytes"] == 3 * 4096
    assert loads_in_order(rig) == named("a", "c", "b")
    assert rig.gauge("rows", "warm_start_planned_bytes", "warm_start_left_bytes") == (3, 0, 0)
    assert (rig.count("warm_start_rows"), rig.count("warm_start_bytes")) == (3, 3 * 4096)
    found = e.lookup("a")
    assert found.chunks == 1  # at once: no tier is asked
    assert not rig.open_ops(TierProbe)


def test_without_the_option_no_tier_is_asked_for_anything() -> None:
    rig = life(share=0.0)
    rig.ready().store("a")
    stop(rig)
    assert not rig.lists[0]
    _, loads = planned(left("a", share=0.0))
    assert not loads


def test_no_more_than_the_share_is_loaded() -> None:
    rig = left(*range(16), share=8 / 64)
    planned(rig)
    assert loads_in_order(rig) == named(*range(8))  # the beginning of the prompt is the newest


def test_nothing_is_evicted_and_it_ends_when_l1_is_full() -> None:
    rig = left(*range(20), pages=16, instance_write_share=1.0)
    e = rig.engine("e")
    e.store(*(f"new {i}" for i in range(12)))
    rig.answer_all(TierEpoch)
    rig.answer_all(TierRecall)
    assert loads_in_order(rig) == named(*range(4))
    assert sum(n for name, n in rig.status["counters"].items() if name.startswith("evicted")) == 0
    assert e.holds(*(f"new {i}" for i in range(12))) == 12
    assert rig.gauge("warm_start_planned_bytes") == (0,)


def test_its_rows_are_evicted_before_all_that_engines_used_since() -> None:
    rig = left(*range(8), pages=16, instance_write_share=1.0)
    e = rig.engine("e")
    e.store("first")  # before the warm start's rows come
    rig.answer_all(TierEpoch)
    rig.answer_all(TierRecall)
    loads_in_order(rig)
    e.store(*(f"new {i}" for i in range(11)))
    assert e.holds("first") == 1
    assert e.holds(*(f"new {i}" for i in range(11))) == 11
    assert e.holds(*range(4)) == 4  # the deepest chunks went first
    assert rig.status["rows"] == 16


def test_no_load_begins_while_a_lookup_waits() -> None:
    rig = left("a", "b", "c")
    e, loads = planned(rig)
    rig.begin(e, "else")
    rig.answer(loads[0])
    assert not rig.open_ops(TierLoad)
    rig.answer_all(TierProbe)
    assert len(rig.open_ops(TierLoad)) == 1


def test_a_lookup_shares_its_load() -> None:
    rig = left("a", "b")
    e, loads = planned(rig)
    rig.begin(e, "a")
    assert rig.open_ops(TierLoad) == loads
    rig.answer(loads[0])
    (reply,) = rig.replies(e.scheduler)
    assert reply.chunks == 1


@pytest.mark.parametrize("what", ["clear", "clear_tenant", "down", "stop"])
def test_it_is_given_up(what: str) -> None:
    rig = left("a", "b", "c")
    e, loads = planned(rig)
    if what == "clear":
        rig.say(e.scheduler, m.Clear(seq=11))
    elif what == "clear_tenant":
        rig.say(rig.open(), m.ClearTenant(tenant=DEFAULT_TENANT, seq=11))
    elif what == "down":
        rig.step(TierReport(0, {"up": False}))
    else:
        rig.step(Stopping())
    rig.answer(loads[0])
    assert not rig.open_ops(TierLoad)
    assert rig.gauge("warm_start_planned_bytes", "warm_start_left_bytes") == (0, 0)


def test_what_was_cleared_is_on_no_list() -> None:
    rig = life()
    e = rig.ready()
    e.store("a")
    rig.answer_all()
    rig.step(Stopping())
    rig.answer_all()
    rig.say(e.scheduler, m.Clear(seq=11))
    rig.answer_all()
    _, loads = planned(life(rig))
    assert not loads


def test_lists_are_given_from_time_to_time_if_they_changed() -> None:
    rig = life()
    e = rig.ready()
    e.store("a")
    rig.answer_all()
    rig.wait(warm_start.REMEMBER_S)
    assert len(rig.open_ops(TierRemember)) == 1
    rig.answer_all()
    rig.wait(warm_start.REMEMBER_S)
    assert not rig.open_ops(TierRemember)
    e.give_back(e.lookup("a").lease)
    rig.wait(warm_start.REMEMBER_S)
    assert len(rig.open_ops(TierRemember)) == 1


def test_a_warm_start_that_has_not_ended_keeps_the_list() -> None:
    rig = left("a", "b", "c")
    planned(rig)
    rig.wait(warm_start.REMEMBER_S)
    assert not rig.open_ops(TierRemember)


def test_a_namespace_begins_once() -> None:
    rig = left("a")
    e, _ = planned(rig)
    loads_in_order(rig)
    e.quit()
    rig.engine("again")
    rig.answer_all(TierEpoch)
    assert not rig.open_ops(TierRecall)


def test_its_loads_do_not_count_for_the_speed_of_the_tier() -> None:
    rig = left("a", "b")
    e, _ = planned(rig)
    while loads := rig.open_ops(TierLoad):
        rig.now += 1
        rig.answer(loads[0])
    assert rig.status["tiers"][0]["load_bytes_s"] == 0
    rig.forget_l1()
    rig.begin(e, "a")
    rig.answer_all(TierProbe)
    rig.now += 0.01
    rig.answer_all(TierLoad)
    assert rig.status["tiers"][0]["load_bytes_s"] > 0


def test_the_default_tenant_pays_within_its_cap() -> None:
    quotas = (Quota(DEFAULT_TENANT, 16 * 4096), Quota("t", 64 * 4096))
    rig = left(*range(20), core={"quotas": quotas})
    planned(rig)
    assert loads_in_order(rig) == named(*range(16))


def test_what_a_tenant_with_a_quota_pays_for_is_on_no_list() -> None:
    quotas = (Quota("t", 64 * 4096),)
    rig = life(core={"quotas": quotas})
    e = rig.ready()
    e.store("mine", tenant="t")
    e.store("all")
    rig.answer_all()
    stop(rig)
    rig = life(rig, core={"quotas": quotas})
    planned(rig)
    assert loads_in_order(rig) == named("all")
