"""Retained rows: passed over while anything else can go, within their tenant's cap, for a time."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import QuotasAre
from kvass.core.rows import retention
from kvass.core.rows.retention import LONGEST_S
from kvass.types import PAGE, Quota
from tests.core.rig import BOOT, Engine, Rig
from tests.core.tier_rig import TierRig

PAGES = 16
KEPT = PAGES // 4


@pytest.fixture
def rig() -> Rig:
    return Rig(pages=PAGES)


def found(engine: Engine, *names: object, **fields: Any) -> Any:
    reply = engine.lookup(*names, **fields)
    if reply.lease:
        engine.give_back(reply.lease)
    return reply


def fill(engine: Engine, count: int, first: int = 0, **item: Any) -> None:
    """Store prompts of one chunk."""
    for name in range(first, first + count):
        engine.store(f"f{name}", **item)


def kept_pages(rig: Rig, tenant: str = "default") -> int:
    sizes = {t["tenant"]: t["kept_bytes"] for t in rig.status["tenants"]}
    assert sum(sizes.values()) == rig.status["l1_kept_bytes"]
    return int(sizes[tenant]) // PAGE


def test_a_retained_prompt_survives_ten_times_l1_and_then_goes_when_its_time_is_over(
    rig: Rig,
) -> None:
    e = rig.engine()
    assert e.store("a", "b", "c", keep_s=300).kept == 3
    fill(e, 10 * PAGES)
    assert kept_pages(rig) == 3
    assert found(e, "a", "b", "c").chunks == 3
    for _ in range(2):
        rig.wait(200)
        fill(e, 2 * PAGES)
        assert found(e, "a", "b", "c").chunks == 3, "the last use began the time anew"
    rig.wait(301)
    fill(e, PAGES, first=1000)
    assert found(e, "a", "b", "c").chunks == 0
    assert kept_pages(rig) == 0
    assert rig.count("evicted_kept") == 0


def test_without_the_hint_it_goes(rig: Rig) -> None:
    """The control."""
    e = rig.engine()
    assert e.store("a", "b", "c").kept == 0
    fill(e, PAGES)
    assert found(e, "a", "b", "c").chunks == 0


def test_when_its_time_is_over_it_is_as_old_as_its_last_use(rig: Rig) -> None:
    e = rig.engine()
    e.store("a", keep_s=10)
    fill(e, PAGES)
    e.store("last")
    rig.wait(20)
    fill(e, 1, first=100)
    assert found(e, "a").chunks == 0, "it is the first to go"
    assert found(e, "last").chunks == 1


def test_a_lookup_retains_what_it_hits(rig: Rig) -> None:
    e = rig.engine()
    e.store("a", "b", "c")
    assert found(e, "a", "b", "x", keep_s=300).kept == 2
    fill(e, 2 * PAGES)
    assert found(e, "a", "b", "c").chunks == 2


def test_no_more_is_retained_than_the_cap_and_the_first_chunks_are(rig: Rig) -> None:
    e = rig.engine()
    fill(e, PAGES - 8)
    e.store("a", "b", "c")
    grant = e.store("a", "b", "c", "d", "e", "f", keep_s=300)
    assert grant.kept == KEPT
    assert rig.count("not_kept_chunks") == 2
    assert found(e, "f0", keep_s=300).kept == 0
    fill(e, 2 * PAGES, first=100)
    assert found(e, "a", "b", "c", "d", "e", "f").chunks == KEPT


def test_retained_rows_go_when_nothing_else_can() -> None:
    rig = Rig(pages=8, extent=1, instance_write_share=1.0, core={"keep_share": 1.0})
    e = rig.engine()
    e.store("a", "b", "c", keep_s=300)
    e.store("d", "e", "f", "g", "h")
    lease = e.lookup("d", "e", "f", "g", "h").lease
    assert e.reserve("x", "y").chunks == (0, 1)
    assert rig.count("evicted_kept") == 2
    assert kept_pages(rig) == 1
    e.give_back(lease)
    assert found(e, "a", "b", "c").chunks == 1, "the deepest went first"


def test_a_pinned_retained_row_stays(rig: Rig) -> None:
    e = rig.engine()
    e.store("a", keep_s=5)
    lease = e.lookup("a").lease
    rig.wait(9)
    fill(e, 2 * PAGES)
    e.give_back(lease)
    assert found(e, "a").chunks == 1


def test_only_the_payers_requests_retain_and_each_tenant_has_a_cap_of_its_own() -> None:
    quotas = (Quota("x", 16 * PAGE, 8 * PAGE), Quota("y", 8 * PAGE))
    rig = Rig(pages=32, extent=1, core={"quotas": quotas})
    e = rig.engine()
    e.store("a", "b", "c", tenant="x")
    assert found(e, "a", "b", "c", keep_s=300, tenant="y").kept == 0
    assert found(e, "a", "b", "c", keep_s=300).kept == 0
    assert found(e, "a", "b", "c", keep_s=300, tenant="x").kept == 3
    assert (kept_pages(rig, "x"), kept_pages(rig, "y"), kept_pages(rig)) == (3, 0, 0)
    e.store("p", "q", "r", tenant="y", keep_s=300)
    assert kept_pages(rig, "y") == 2, "a quarter of its 8 pages"


def test_a_smaller_quota_ends_what_exceeds_its_cap() -> None:
    rig = Rig(pages=32, extent=1, core={"quotas": (Quota("x", 16 * PAGE, 8 * PAGE),)})
    e = rig.engine()
    e.store("a", "b", tenant="x", keep_s=300)
    e.store("c", tenant="x", keep_s=900)
    rig.ask(rig.open(own=True), m.SetQuota(seq=3, quota=Quota("x", 4 * PAGE)))
    assert kept_pages(rig, "x") == 1
    rig.step(QuotasAre(()))
    assert "x" not in {t["tenant"] for t in rig.status["tenants"] if t["kept_bytes"]}
    assert found(e, "a", "b").chunks == 2, "nothing was evicted for that"


def test_a_clear_ends_it_and_so_does_a_discarded_store(rig: Rig) -> None:
    e = rig.engine()
    grant = e.begin("w", keep_s=300)
    assert kept_pages(rig) == 1
    e.abort(grant.reservation, 0)
    assert kept_pages(rig) == 0
    e.store("a", "b", keep_s=300)
    lease = e.lookup("a", "b").lease
    e.clear()
    assert kept_pages(rig) == 0, "also of rows that are still read"
    e.give_back(lease)
    e.store("a", keep_s=300)
    rig.ask(rig.open(), m.ClearTenant(seq=4, tenant="default"))
    assert kept_pages(rig) == 0


def test_the_end_of_its_session_ends_it(rig: Rig) -> None:
    e = rig.engine()
    e.store("a", "b", keep_s=300, session=7)
    rig.ask(e.scheduler, m.EndSession(seq=4, session=7))
    assert kept_pages(rig) == 0


@pytest.mark.parametrize("seconds", [1e-300, 1e12])
def test_a_time_is_bounded(rig: Rig, seconds: float) -> None:
    e = rig.engine()
    e.store("a", keep_s=seconds)
    assert kept_pages(rig) == 1
    rig.wait(min(seconds, LONGEST_S) + 2)
    fill(e, PAGES)
    assert kept_pages(rig) == 0


def test_a_step_looks_at_few_rows_for_those_whose_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention, "_SLICE", 8)
    rig = Rig(pages=64, instance_write_share=1.0, core={"keep_share": 1.0})
    e = rig.engine()
    e.store(*range(40), keep_s=5)
    fill(e, 24)
    rig.finish()
    rig.wait(9)
    fill(e, 1, first=100)
    assert 32 <= kept_pages(rig) < 40
    assert rig.machine.next_deadline() == rig.now
    while rig.machine.next_deadline() == rig.now:
        before = kept_pages(rig)
        rig.wait(0)
        assert before - kept_pages(rig) <= 8
    assert kept_pages(rig) == 0
    fill(e, 39, first=200)
    assert found(e, "f0").chunks == 1, "those whose time was over went first"


def test_another_layer_group_that_needs_room_does_not_wait_for_retained_rows() -> None:
    """Of a set with few retained rows all go, so that one row cannot hold a whole extent."""
    rig = Rig(pages=32, extent=8)
    e = rig.engine()
    for name in range(32):
        e.store(f"f{name}", keep_s=300 if name % 8 == 0 else 0)
    other = rig.engine("other", identity={"model": "other"})
    other.store("x")
    assert found(other, "x").chunks == 1


def test_random_hints_keep_the_cap_and_break_no_invariant() -> None:
    """Of several tenants, with clears, other quotas and loads; the rig checks each step."""
    random = Random(8)
    rig = TierRig(pages=24, extent=2, core={"quotas": (Quota("x", 12 * PAGE, 4 * PAGE),)})
    e, evicted = rig.ready(), 0
    for _ in range(500):
        fields: dict[str, Any] = {
            "tenant": random.choice(["", "x", "y"]),
            "session": random.randrange(3),
            "keep_s": random.choice([0, 0, 2, 60]),
        }
        prompt = [random.randrange(2) for _ in range(random.randint(1, 6))]
        names = ["".join(map(str, prompt[: i + 1])) for i in range(len(prompt))]
        kind = random.random()
        if kind < 0.02:
            rig.say(e.scheduler, m.Clear(seq=11))
        elif kind < 0.06:
            cap = random.choice([4, 12, 24]) * PAGE
            rig.ask(rig.open(own=True), m.SetQuota(seq=3, quota=Quota("x", cap)))
        elif kind < 0.1:
            end = m.EndSession(seq=4, session=1 + random.randrange(2), tenant=fields["tenant"])
            rig.ask(e.scheduler, end)
        elif kind < 0.5:
            for reply in rig.look_up(e, *names, **fields):
                if isinstance(reply, m.Matched) and reply.lease:
                    e.give_back(reply.lease)
        else:
            grant = e.begin(*names, **fields)
            if grant.reservation:
                message = m.Commit(boot=BOOT, reservation=grant.reservation, rank=0)
                rig.say(e.workers[0], message)
        rig.answer_all()
        rig.replies(e.scheduler)
        rig.wait(random.random())
        evicted = rig.count("evicted_capacity") + rig.count("evicted_handed_over")
    assert evicted > 20
    assert rig.count("not_kept_chunks") > 5
