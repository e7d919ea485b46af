"""Sums of the reports of engines in shadow mode."""

from __future__ import annotations

from msgspec.structs import replace

from kvass.core.clients.shadow_figures import MOST, ShadowFigures
from kvass.messages import ShadowGroup, ShadowReport

GROUP = ShadowGroup(rows=3, differing_rows=2, wrong_rows=1, largest_difference=0.5, at_value=2.0)
ONE = ShadowFigures(("full",), ShadowReport(lookups=2, loads=1, saved_s=1.5, groups=(GROUP,)))


def later(**fields: float) -> ShadowFigures:
    """``ONE`` with other figures of its group."""
    report = replace(ONE.report, groups=(replace(GROUP, **fields),))
    return replace(ONE, report=report)


def test_what_was_counted_before_is_not_counted_again() -> None:
    total = ShadowFigures().plus(ONE)
    assert total.fields() == ONE.fields()
    assert total.plus(ONE, ONE).fields() == ONE.fields()
    more = later(rows=5, wrong_rows=2)
    assert total.plus(more, ONE).fields() == more.fields()
    assert total.plus(ONE).fields()["saved_s"] == 3.0


def test_the_largest_difference_is_kept_with_its_value() -> None:
    total = ShadowFigures().plus(ONE)
    for largest, value, shown in ((0.25, 9.0, (0.5, 2.0)), (0.75, 3.0, (0.75, 3.0))):
        found = later(largest_difference=largest, at_value=value)
        (group,) = total.plus(found).fields()["groups"]
        assert (group["largest_difference"], group["at_value"]) == shown
    (group,) = ShadowFigures().plus(later(), ONE).fields()["groups"]
    assert group["largest_difference"] == 0, "it was found before, in another namespace"


def test_sums_of_other_groups_and_of_large_figures() -> None:
    two = ShadowFigures(("full", "state"), ShadowReport(lookups=MOST, groups=(GROUP, GROUP)))
    total = ONE.plus(two).plus(two)
    assert total.report.lookups == MOST
    assert [(g["kind"], g["rows"]) for g in total.fields()["groups"]] == [("full", 9), ("state", 6)]
    assert [g["kind"] for g in replace(two, kinds=()).fields()["groups"]] == ["", ""]
    assert total.cleared().fields()["wrong_rows"] == 0
