"""Bytes in, bytes evicted and whether they were of use, why lookups missed, and for how long.

``invariants`` checks the sums after every event: hits and misses are what was asked for, and what
came in and did not leave is there.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import TierProbe, TierReport
from kvass.core.rows.use_times import STEP_S
from kvass.types import PAGE
from tests.core.rig import LEASE_S, Rig
from tests.core.test_plan import measured
from tests.core.tier_rig import TierRig


def misses(rig: Rig) -> dict[str, int]:
    """Chunks that were missed, by reason; those that are 0 left out."""
    (ns,) = rig.status["namespaces"]
    return {why: n // ns["chunk_tokens"] for why, n in ns["miss_tokens"].items() if n}


def seen(histogram: dict[str, Any]) -> int:
    return int(sum(histogram["counts"]))


def test_what_is_not_granted_has_a_reason() -> None:
    rig = Rig(pages=4, extent=1, instance_write_share=0.5)
    e = rig.engine()
    e.reserve("a", "b", "c")
    assert (rig.count("not_granted_quota"), rig.count("not_granted_no_room")) == (1, 0)
    rig = Rig(pages=4, extent=1, instance_write_share=1.0)
    e = rig.engine()
    e.store("a", "b", "c")
    held = e.lookup("a", "b", "c")
    e.reserve("x", "y")
    assert (rig.count("not_granted_quota"), rig.count("not_granted_no_room")) == (0, 1)
    e.give_back(held.lease)


def test_a_gap_is_the_time_since_a_hit_was_used_last() -> None:
    rig = Rig()
    e = rig.engine()
    e.store("a", "b")
    rig.wait(30.0)
    assert e.holds("a", "b", "c") == 2
    assert e.holds("x") == 0
    gaps = rig.status["histograms"]["reuse_gap_seconds"]
    assert seen(gaps) == 1
    assert 30.0 <= gaps["sum"] <= 30.0 + STEP_S


def test_open_leases_and_reservations_have_an_age() -> None:
    rig = Rig()
    e = rig.engine()
    assert rig.gauge("lease_oldest_s", "reservation_oldest_s") == (0.0, 0.0)
    e.store("a")
    e.lookup("a")
    rig.wait(3.0)
    e.reserve("b")
    rig.wait(2.0)
    assert rig.gauge("lease_oldest_s", "reservation_oldest_s") == (5.0, 2.0)
    rig.wait(LEASE_S)
    assert rig.gauge("lease_oldest_s") == (0.0,)


@pytest.mark.parametrize(
    "why", ["absent", "tier_down", "not_worth_it", "load_failed", "late", "cleared"]
)
def test_why_a_lookup_that_asked_tiers_missed(why: str) -> None:
    rig = TierRig()
    if why == "not_worth_it":
        rig, e = measured(weigh=True)
        before = misses(rig)
        rig.look_up(e, "a", "b", prefill_tokens_s=1_000_000.0)
        assert misses(rig) == {**before, why: 2}
        return
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    if why == "tier_down":
        rig.down = True
        rig.step(TierReport(0, {"up": False}))
    rig.begin(e, *(["x", "y"] if why == "absent" else ["a", "b"]), budget_ms=1000)
    if why == "late":
        rig.answer_all(TierProbe)
        rig.wait(1.5)
    if why == "cleared":
        rig.say(e.scheduler, m.Clear(seq=11))
    if why == "load_failed":
        rig.answer_all(TierProbe)
        rig.shelves[0].clear()
    rig.answer_all()
    assert misses(rig) == {why: 2}
    assert seen(rig.status["histograms"]["lookup_tiers_seconds"]) == 1


def test_a_lookup_that_may_not_wait_and_one_without_room() -> None:
    rig = TierRig(waiting_bytes=0)
    e = rig.ready()
    rig.begin(e, "a")
    assert misses(rig) == {"not_waited": 1}
    rig = TierRig(pages=4, extent=1, instance_write_share=1.0)  # half of them may be loading
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.only_in_tiers(e, "c")
    assert rig.look_up(e, "a", "b", "c")[0].chunks == 2
    assert misses(rig) == {"no_room": 1}


def test_what_tiers_move_is_counted_in_bytes_and_seconds() -> None:
    rig = TierRig()
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a", "b")
    rig.answer_all(TierProbe)
    rig.now += 0.3
    rig.answer_all()
    (tier,) = rig.status["tiers"]
    assert tier["stored_bytes"] == tier["loaded_bytes"] == 2 * PAGE
    assert seen(tier["store_seconds"]) >= 1
    assert tier["load_seconds"]["sum"] == pytest.approx(0.3)
    rig.down = True
    e.store("q")
    rig.answer_all()
    rig.wait(0.5)
    assert rig.status["tiers"][0]["flush_queue_oldest_s"] == 0.5


def test_who_goes_by_itself_is_counted() -> None:
    rig = Rig()
    rig.lose(rig.open())
    assert rig.count("ended_closed") == 1


def test_what_a_tiers_process_reports_changes_none_of_our_own_figures() -> None:
    rig = TierRig()
    rig.ready()
    (ours,) = rig.status["tiers"]
    rig.step(TierReport(0, {**dict.fromkeys(ours, "wrong"), "up": False, "records": 3}))
    assert rig.status["tiers"] == [ours | {"up": False, "records": 3}]


def test_status_tells_the_public_fields(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    e.lookup("a")
    fields = rig.ask(rig.open(), m.Status(seq=3)).fields
    assert (fields["leases"], fields["pins"], fields["rows"]) == (1, 1, 1)
    assert (fields["reservations"], fields["rows_loading"], fields["quarantined_bytes"]) == (
        0,
        0,
        0,
    )
    assert (fields["l1_used_bytes"], fields["l1_capacity_bytes"]) == (PAGE, 64 * PAGE)
    assert fields["namespaces"][0]["groups"][0]["rows"] == 1


def test_status_counts_what_was_said_by_kind(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    e.store("a", "b")
    e.commit(1 << 40)  # counts, although it is refused
    said = rig.status["messages"]
    assert {k: said[k] for k in ("hello", "register", "reserve", "handed_over", "commit")} == {
        "hello": 3,
        "register": 3,
        "reserve": 1,
        "handed_over": 1,
        "commit": 3,
    }


def test_the_fields_of_a_namespace_are_shown_to_who_asks_for_them() -> None:
    rig = Rig()
    one = rig.engine("one", identity={"model": "m", "dtype": "bf16"})
    rig.engine("two", identity={"model": "m", "dtype": "fp8"})
    asker = rig.open()
    shown = rig.ask(asker, m.Status(seq=4)).fields["namespaces"]
    assert not any("terms" in ns for ns in shown)
    digests = (b"of none", one.namespace)
    first, second = rig.ask(asker, m.Status(seq=4, terms_of=digests)).fields["namespaces"]
    assert "terms" not in second
    assert first["terms"] == {
        "model": "m",
        "dtype": "bf16",
        "chunk_tokens": "16",
        "ranks": "1",
        "world_size": "1",
        "layer group 0": "full, blocks of 16 tokens, window of 0, shards of [4096] bytes",
    }
    rig.register(one.scheduler, "one", identity={"model": "m", "dtype": "bf16"}, generation=b"\x07")
    moved = rig.ask(asker, m.Status(seq=4)).fields["engines"][0]["namespace"]
    found = rig.ask(asker, m.Status(seq=4, terms_of=(bytes.fromhex(moved),))).fields["namespaces"]
    assert [ns["terms"]["generation"] for ns in found if "terms" in ns] == ["07"]
