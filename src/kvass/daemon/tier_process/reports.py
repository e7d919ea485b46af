"""Filter for the report of a tier, whose fields become part of ``kvass status``.

Law of this file: a tier may be third-party code, so its report is not trusted. What passes the
filter can be encoded as JSON, has a bounded size and no secret of the tier's URL, and fields that
readers of a status know have the types that they expect. Other fields are left out. If the daemon
has a field of the same name, that one is used (``core/status.py``).
"""

from __future__ import annotations

import math
from typing import Any, Final

from kvass.tiers.url import without_seen
from kvass.types import MOST_QUOTAS

LINE_CHARS: Final = 200
_MOST_ENTRIES: Final = MOST_QUOTAS + 1
_AMOUNTS: Final = ("bytes", "capacity_bytes", "lacking_bytes", "records")
_OF_A_TENANT: Final = {"bytes", "reserved_bytes"}
"""The fields that each entry of ``tenants`` must have. A tenant with a cap also has
``cap_bytes``."""


def reportable(report: dict[Any, Any]) -> dict[str, Any]:
    """Return the valid ones among the first ``_MOST_ENTRIES`` fields of ``report``."""
    first = list(report.items())[:_MOST_ENTRIES]
    return {
        name: value
        for name, value in first
        if type(name) is str and _plain(name) and _plain(value, depth=2) and _fits(name, value)
    }


def _plain(value: object, depth: int = 0) -> bool:
    """Whether ``value`` is a short text, a bool, an int64, a finite float, or a dict of such values
    that is nested at most ``depth`` deep."""
    if type(value) is str:
        return len(value) <= LINE_CHARS and value.isprintable() and without_seen(value) == value
    if type(value) is dict:
        return (
            depth > 0
            and len(value) <= _MOST_ENTRIES
            and all(_plain(n) and _plain(one, depth - 1) for n, one in value.items())
        )
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return type(value) is bool or (type(value) is float and math.isfinite(value))


def _fits(name: str, value: Any) -> bool:
    """Whether ``value`` has the type that readers expect of the field ``name``."""
    if name in _AMOUNTS:
        return _is_amount(value)
    if name == "tenants":
        return type(value) is dict and all(
            type(of) is str
            and type(has) is dict
            and has.keys() >= _OF_A_TENANT
            and all(_is_amount(one) for one in has.values())
            for of, has in value.items()
        )
    return True


def _is_amount(value: object) -> bool:
    return type(value) in (int, float) and value >= 0  # type: ignore[operator]
