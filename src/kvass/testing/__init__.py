"""Helpers for tests of third-party tiers and connectors. No other part of kvass imports them.

- ``TierSuite``: the tests that a tier must pass. It needs pytest.
- ``FakeEngine``: an engine without a model, on any parallel strategy, over a real daemon.
- ``running_daemon``: a real daemon process, for a fixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.fake_engine import FakeEngine, spread

if TYPE_CHECKING:
    from kvass.testing.tier_suite import TierSuite

__all__ = ["Daemon", "FakeEngine", "TierSuite", "running_daemon", "spread"]


def __getattr__(name: str) -> object:
    """``TierSuite``, imported at its first use, because only it needs pytest."""
    if name != "TierSuite":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvass.testing.tier_suite import TierSuite

    return TierSuite
