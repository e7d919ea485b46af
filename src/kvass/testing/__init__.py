"""Helpers for tests of third-party tiers and connectors. No other part of kvass imports them.

- ``TierSuite``: the tests that a tier must pass. It needs pytest.
- ``ConnectorSuite``: the tests that a connector must pass, with an ``EngineUnderTest`` that answers
  with a ``RunResult``. It needs pytest.
- ``FakeEngine``: an engine without a model, on any parallel strategy, over a real daemon.
- ``running_daemon``: a real daemon process, for a fixture.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.fake_engine import FakeEngine, spread

if TYPE_CHECKING:
    from kvass.testing.connector_suite import ConnectorSuite, EngineUnderTest, RunResult
    from kvass.testing.tier_suite import TierSuite

__all__ = [
    "ConnectorSuite",
    "Daemon",
    "EngineUnderTest",
    "FakeEngine",
    "RunResult",
    "TierSuite",
    "running_daemon",
    "spread",
]
_SUITES: Final = {
    "RunResult": "kvass.testing.connector_suite",
    "ConnectorSuite": "kvass.testing.connector_suite",
    "EngineUnderTest": "kvass.testing.connector_suite",
    "TierSuite": "kvass.testing.tier_suite",
}


def __getattr__(name: str) -> object:
    """The suites, each imported at its first use, because only they need pytest."""
    if name not in _SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_SUITES[name]), name)
