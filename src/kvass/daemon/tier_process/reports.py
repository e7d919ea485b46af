"""Filters a tier's own report for ``kvass status``, because a tier may be third-party code.

Law of this file: the result can be encoded as JSON, has a bounded size, and its known fields have
the types that readers expect. All other fields are left out. The daemon's own fields of a tier
replace those of the same name (``core/status.py``).
"""

from __future__ import annotations

import math
from typing import Any, Final

from kvass.types import MOST_QUOTAS

LINE_CHARS: Final = 200
_MOST_ENTRIES: Final = MOST_QUOTAS + 1
_AMOUNTS: Final = ("bytes", "capacity_bytes", "records")
_OF_A_TENANT: Final = {"bytes", "reserved_bytes"}
"""With quotas, ``tenants`` has these amounts by their names, and ``cap_bytes`` where there is a
cap."""


def reportable(told: dict[Any, Any]) -> dict[str, Any]:
    """The fields that can be reported, ``_MOST_ENTRIES`` at most."""
    first = list(told.items())[:_MOST_ENTRIES]
    return {
        name: value
        for name, value in first
        if type(name) is str and _plain(name) and _plain(value, depth=2) and _fits(name, value)
    }


def _plain(value: object, depth: int = 0) -> bool:
    """Whether a value is a short text, a number that fits int64 or a double, or a bounded, nested
    map of such values."""
    if type(value) is str:
        return len(value) <= LINE_CHARS and value.isprintable()
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
    """Whether ``value`` has the type that readers expect of the field ``name``. True for unknown
    fields."""
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
