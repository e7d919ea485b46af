"""Engines in shadow mode: their lookups count in nobody's figures, and their reports are shown."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kvass.core.clients.shadow_figures import MOST
from kvass.core.handlers.shadow import MOST_GONE
from kvass.messages import Explain, ShadowGroup, ShadowReport
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


def test_an_explained_lookup_says_that_it_was_of_shadow_mode() -> None:
    rig = Rig()
    for name, shadow in (("real", False), ("trial", True)):
        e = rig.engine(name, counted=not shadow)
        e.lookup("a")
        if shadow:
            rig.say(e.scheduler, REPORT)
        (found,) = rig.ask(rig.open(), Explain(seq=3, engine=name)).lookups
        assert found["shadow"] is shadow


def test_only_the_scheduler_of_an_engine_reports_and_only_to_this_boot() -> None:
    rig = Rig()
    e = rig.engine()
    assert rig.code(e.workers[0], REPORT) == "bad_rank"
    assert rig.code(rig.open(), REPORT) == "not_registered"
    stale = ShadowReport(boot=b"another boot....", lookups=9)
    assert rig.code(e.scheduler, stale) == "wrong_boot"
    assert rig.status["engines"][0]["shadow"] is None


def shadow_of(rig: Rig) -> dict[str, Any]:
    """What the first namespace shows of shadow mode."""
    shown: dict[str, Any] = rig.status["namespaces"][0]["shadow"]
    return shown


def test_what_ended_engines_reported_stays_with_their_namespace() -> None:
    rig = Rig()
    e = rig.engine()
    assert shadow_of(rig) is None
    rig.say(e.scheduler, REPORT)
    rig.say(e.scheduler, REPORT)
    e.quit()
    assert rig.status["engines"] == []
    shown = shadow_of(rig)
    assert (shown["lookups"], shown["hit_tokens"], shown["saved_s"]) == (2, 48, 1.5)
    assert (shown["groups"][0]["kind"], shown["groups"][0]["largest_difference"]) == ("full", 0.5)
    other = rig.engine("other")
    rig.say(other.scheduler, REPORT)
    assert (shadow_of(rig)["lookups"], shadow_of(rig)["differing_rows"]) == (4, 2)


def test_an_engine_that_connects_again_is_counted_once_and_a_new_one_of_its_name_anew() -> None:
    rig = Rig()
    e = rig.engine()
    rig.say(e.scheduler, REPORT)
    e.quit()
    again = rig.engine()
    rig.say(again.scheduler, replace(REPORT, lookups=3))
    assert shadow_of(rig)["lookups"] == 3
    again.quit()
    restarted = rig.engine()
    rig.say(restarted.scheduler, replace(REPORT, lookups=1, loads=0))
    assert (shadow_of(rig)["lookups"], shadow_of(rig)["loads"]) == (4, 1)


def test_a_group_keeps_its_name_when_a_rank_has_ended() -> None:
    rig = Rig()
    e = rig.engine(ranks=3)
    rig.say(e.scheduler, REPORT)
    rig.lose(*e.workers[1:])
    rig.register(rig.open(), ranks=3, world_size=3, rank=1, shard=1)
    assert rig.status["engines"][0]["missing_ranks"] == [2]
    rig.say(e.scheduler, replace(REPORT, lookups=5))
    for shown in (shadow_of(rig), rig.status["engines"][0]["shadow"]):
        assert (shown["lookups"], shown["groups"][0]["kind"]) == (5, "full")


def test_wrong_rows_count_until_their_namespace_is_cleared() -> None:
    rig = Rig()
    e = rig.engine()
    group = replace(REPORT.groups[0], wrong_rows=2)
    rig.say(e.scheduler, replace(REPORT, groups=(group,)))
    assert (shadow_of(rig)["wrong_rows"], shadow_of(rig)["groups"][0]["wrong_rows"]) == (2, 2)
    e.clear()
    assert (shadow_of(rig)["wrong_rows"], shadow_of(rig)["differing_rows"]) == (0, 1)
    rig.say(e.scheduler, replace(REPORT, groups=(replace(group, wrong_rows=3),)))
    assert shadow_of(rig)["wrong_rows"] == 1


def test_a_removed_namespaces_figures_are_added_to_those_of_its_model() -> None:
    rig = Rig()
    for name in ("a", "b"):
        e = rig.engine(name, identity={"model": "m", "tag": name})
        rig.say(e.scheduler, REPORT)
        e.quit()
    rig.engine("c", identity={"model": "m", "tag": "c"})
    (gone,) = rig.status["forgotten"]
    assert gone["shadow"]["lookups"] == 4
    assert gone["shadow"]["groups"][0]["kind"] == "full"


def test_what_is_kept_of_engines_that_are_gone_is_bounded() -> None:
    rig = Rig()
    for number in range(MOST_GONE + 3):
        e = rig.engine(f"e{number}")
        rig.say(e.scheduler, replace(REPORT, lookup_tokens=MOST))
        e.quit()
    assert len(rig.machine.state.shadow_gone) == MOST_GONE
    assert shadow_of(rig)["lookup_tokens"] == MOST
    assert shadow_of(rig)["lookups"] == 2 * (MOST_GONE + 3)
