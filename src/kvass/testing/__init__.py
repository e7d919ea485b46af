"""What tests of kvass, and of things built on it, stand on. Nothing shipped imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvass.testing.tier_suite import TierSuite as TierSuite


def __getattr__(name: str) -> object:
    """``kvass.testing.TierSuite``, at first use: it needs pytest, and the rest does not."""
    if name != "TierSuite":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvass.testing.tier_suite import TierSuite

    return TierSuite
