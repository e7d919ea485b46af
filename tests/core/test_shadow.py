"""Engines in shadow mode: their lookups count in nobody's figures, and their reports are shown."""

from __future__ import annotations

from typing import Any

from kvass.messages import ShadowGroup, ShadowReport
from tests.core.rig import BOOT, Rig
from tests.core.tier_rig import TierRig

REPORT = ShadowReport(
    boot=BOOT,
    sampled=0.5,
    lookups=2,
    lookup_tokens=96,
    hit_tokens=48,
    saved_s=1.5,
    loads=1,
    load_bytes=4096,
    load_s=0.25,
    not_compared=1,
    groups=(ShadowGroup(rows=3, bytes=4096, differing_rows=1, largest_difference=0.5),),
)


def figures(rig: Rig) -> list[tuple[int, int]]:
    """Lookup tokens and hit tokens of all namespaces and tenants."""
    status = rig.status
    rows = [*status["namespaces"], *status["tenants"]]
    return [(row["lookup_tokens"], row["hit_tokens"]) for row in rows]


def test_a_lookup_of_shadow_mode_hits_and_counts_in_no_figures() -> None:
    rig = Rig()
    e = rig.engine(counted=False)
    e.store("a", "b")
    found = e.lookup("a", "b", "c")
    assert found.chunks == 2
    assert found.lease
    assert set(figures(rig)) == {(0, 0)}
    other = rig.engine("other")
    other.lookup("a", "b", "c")
    assert (48, 32) in figures(rig)


def test_a_promoted_lookup_of_shadow_mode_counts_in_no_figures() -> None:
    rig = TierRig()
    e = rig.ready(counted=False)
    rig.only_in_tiers(e, "a", "b")
    (found,) = rig.look_up(e, "a", "b")
    assert found.chunks == 2
    assert set(figures(rig)) == {(0, 0)}
    assert rig.count("promoted_chunks") == 2


def test_the_last_report_is_shown() -> None:
    rig = Rig()
    e = rig.engine()
    assert rig.machine.status()["engines"][0]["shadow"] is None
    assert rig.say(e.scheduler, ShadowReport(boot=BOOT)) == []
    assert rig.say(e.scheduler, REPORT) == []
    shown: dict[str, Any] = rig.status["engines"][0]["shadow"]
    assert (shown["sampled"], shown["lookups"], shown["saved_s"]) == (0.5, 2, 1.5)
    assert (shown["compared_bytes"], shown["differing_rows"]) == (4096, 1)
    (group,) = shown["groups"]
    assert (group["group"], group["kind"], group["largest_difference"]) == (0, "full", 0.5)


def test_only_the_scheduler_of_an_engine_reports_and_only_to_this_boot() -> None:
    rig = Rig()
    e = rig.engine()
    assert rig.code(e.workers[0], REPORT) == "bad_rank"
    assert rig.code(rig.open(), REPORT) == "not_registered"
    stale = ShadowReport(boot=b"another boot....", lookups=9)
    assert rig.code(e.scheduler, stale) == "wrong_boot"
    assert rig.status["engines"][0]["shadow"] is None
