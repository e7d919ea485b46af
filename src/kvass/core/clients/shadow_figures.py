"""What engines in shadow mode have reported (``messages.ShadowReport``), one's or many summed up.

Law of this file: no sum exceeds ``MOST``, whatever engines report.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Final

import msgspec

from kvass.messages import ShadowGroup, ShadowReport

MOST: Final = 1 << 53
"""The largest sum. JSON's readers have whole numbers up to it."""
_SUMMED: Final = (
    *("lookups", "lookup_tokens", "hit_tokens", "saved_s", "loads", "load_bytes", "load_s"),
    "not_compared",
)
_SUMMED_OF_GROUP: Final = ("rows", "bytes", "differing_rows", "wrong_rows", "not_compared")
_NOTHING: Final = ShadowReport()
_NO_GROUP: Final = ShadowGroup()


class ShadowFigures(msgspec.Struct, frozen=True):
    """A report, or a sum of reports. ``kinds``: the kind of each layer group."""

    kinds: tuple[str, ...] = ()
    report: ShadowReport = msgspec.field(default_factory=ShadowReport)

    def plus(self, other: ShadowFigures, before: ShadowFigures | None = None) -> ShadowFigures:
        """The sum with ``other``, less what it had ``before``, which is in this sum already. An
        engine that has less than before has started again, and counts anew."""
        new, old = other.report, _NOTHING if before is None else before.report
        if new.lookups < old.lookups or new.loads < old.loads:
            old = _NOTHING
        groups = tuple(
            _group(*each)
            for each in zip_longest(self.report.groups, new.groups, old.groups, fillvalue=_NO_GROUP)
        )
        sums = _sums(_SUMMED, self.report, new, old)
        report = ShadowReport(sampled=new.sampled, groups=groups, **sums)
        return ShadowFigures(max(self.kinds, other.kinds, key=len), report)

    def cleared(self) -> ShadowFigures:
        """The figures after the rows were cleared: no wrong row is left."""
        groups = (msgspec.structs.replace(group, wrong_rows=0) for group in self.report.groups)
        report = msgspec.structs.replace(self.report, groups=tuple(groups))
        return ShadowFigures(self.kinds, report)

    def fields(self) -> dict[str, Any]:
        """The fields of the status (``metrics.SHADOW``)."""
        report = self.report
        unpriced = report.hit_tokens > 0 and not report.saved_s
        groups = [
            {
                "group": number,
                "kind": self.kinds[number] if number < len(self.kinds) else "",
                "rows": group.rows,
                "compared_bytes": group.bytes,
                "differing_rows": group.differing_rows,
                "wrong_rows": group.wrong_rows,
                "largest_difference": group.largest_difference,
                "at_value": group.at_value,
                "not_compared": group.not_compared,
            }
            for number, group in enumerate(report.groups)
        ]
        return {
            "sampled": report.sampled,
            **{name: round(getattr(report, name), 3) for name in _SUMMED},
            "saved_s": None if unpriced else round(report.saved_s, 3),
            "compared_bytes": sum(group.bytes for group in report.groups),
            "differing_rows": sum(group.differing_rows for group in report.groups),
            "wrong_rows": sum(group.wrong_rows for group in report.groups),
            "groups": groups,
        }


def _group(known: ShadowGroup, new: ShadowGroup, old: ShadowGroup) -> ShadowGroup:
    worse = new.largest_difference > max(known.largest_difference, old.largest_difference)
    largest = new if worse else known
    return ShadowGroup(
        **_sums(_SUMMED_OF_GROUP, known, new, old),
        largest_difference=largest.largest_difference,
        at_value=largest.at_value,
    )


def _sums(names: tuple[str, ...], known: Any, new: Any, old: Any) -> dict[str, Any]:
    return {
        name: min(MOST, getattr(known, name) + max(0, getattr(new, name) - getattr(old, name)))
        for name in names
    }
