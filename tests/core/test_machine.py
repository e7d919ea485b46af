"""``CacheMachine``: a step at a time, what is left for later ones, and when the next one is due."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvass import messages as m
from kvass.core.effects import TiersAre
from kvass.core.rows import retention, session_end, session_tags
from kvass.types import PAGE, Quota
from tests.core.rig import Rig
from tests.core.tier_rig import TierRig


def test_time_does_not_go_back(rig: Rig) -> None:
    rig.wait(5)
    rig.now -= 1
    with pytest.raises(AssertionError, match="time went back"):
        rig.open()


def test_a_reply_has_the_number_of_its_request_and_a_refusal_is_counted(rig: Rig) -> None:
    session = rig.open()
    assert rig.ask(session, m.Ping(seq=41)).seq == 41
    assert rig.code(session, m.Lookup(seq=42, request="r", digests=b"")) == "not_registered"
    assert rig.count("refused_not_registered") == 1


def test_a_session_has_a_namespace_while_all_ranks_are_there(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    ns = rig.machine.namespace(e.scheduler)
    assert ns is not None
    assert ns.digest == e.namespace
    rig.lose(e.workers[1])
    assert rig.machine.namespace(e.scheduler) is None
    assert rig.machine.namespace(e.workers[1]) is None
    assert rig.machine.namespace(rig.open()) is None


def test_an_added_tier_has_the_number_of_a_removed_one_of_its_name_or_the_next() -> None:
    rig = TierRig(core={"tiers": ("a", "b")})
    assert rig.machine.tier_number("a", {0, 1}) == 2
    assert rig.machine.tier_number("a", {1}) == 2, "the one of that name is used"
    rig.step(TiersAre((1,), ("b",)))
    assert rig.machine.tier_number("a", {1}) == 0
    assert rig.machine.tier_number("c", {1}) == 2
    assert rig.machine.tier_number("a", {0, 1}) == 2


# ---------------------------------------------------------------- work in slices


def slices(*works: str) -> dict[str, int]:
    """After how many slices each of ``works`` was over, when all of them are under way."""
    quotas = (Quota("x", 96 * PAGE),)
    rig = Rig(pages=512, extent=2, instance_write_share=1.0, core={"slice_slots": 1})
    state = rig.machine.state
    state.tenants.replace(quotas)
    e, other = rig.engine(), rig.engine("other", identity={"model": "n"})
    e.store(*[f"x{n}" for n in range(80)], tenant="x")
    e.store(*[f"s{n}" for n in range(24)], session=7)
    e.store(*[f"k{n}" for n in range(24)], keep_s=5.0)
    other.store(*range(16))
    rig.finish()
    rig.now += 6
    command = rig.open()
    begin: dict[str, Callable[[], object]] = {
        "clear of a tenant": lambda: rig.say(command, m.ClearTenant(seq=11, tenant="x")),
        "end of a session": lambda: rig.say(command, m.EndSession(seq=12, session=7)),
        "look for retained rows": lambda: state.followers.kept.sweep(rig.now),
        "memory of a clear": lambda: rig.say(other.scheduler, m.Clear(seq=13)),
    }
    for work in works:
        begin[work]()
    over: dict[str, Callable[[], bool]] = {
        "clear of a tenant": lambda: not state.clears,
        "end of a session": lambda: not state.endings,
        "look for retained rows": lambda: not state.followers.kept.sweeping,
        "memory of a clear": lambda: not state.classes.sets.cleared,
    }
    took = dict[str, int]()
    for slice_ in range(1000):
        took |= {work: slice_ for work in works if over[work]() and work not in took}
        rig.wait(0)
    return took


def test_much_work_of_one_kind_keeps_no_other_kind_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_end, "SLICE", 4)
    monkeypatch.setattr(session_end, "_SAMPLED", 2)
    monkeypatch.setattr(session_tags, "LOOK", 64)
    monkeypatch.setattr(retention, "_LOOK", 24)
    works = "clear of a tenant", "end of a session", "look for retained rows", "memory of a clear"
    alone = {work: slices(work)[work] for work in works}
    assert all(took > 2 for took in alone.values())
    assert alone["clear of a tenant"] > 3 * max(took for took in [*alone.values()][1:])
    together = slices(*works)
    for work, took in alone.items():
        assert together[work] <= len(works) * (took + 1), work
