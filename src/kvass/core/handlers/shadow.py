"""The report of an engine in shadow mode. Such an engine looks up, loads and compares, but computes
every token itself. Its figures count in its namespace, and stay there when it ends."""

from __future__ import annotations

from typing import Final

from kvass.core.clients.registry import ClientConnection, Instance
from kvass.core.clients.shadow_figures import ShadowFigures
from kvass.core.handlers.checks import check_boot, scheduler_of
from kvass.core.state import State
from kvass.messages import ShadowReport

MOST_GONE: Final = 64
"""Of how many engines that are gone the last report is kept. One that connects again sends figures
since its start, which its namespace has."""


def shadow_report(state: State, connection: ClientConnection, msg: ShadowReport) -> None:
    """Keep the engine's figures, and add what is new in them to those of its namespace."""
    check_boot(state, msg.boot)
    instance = scheduler_of(state, connection)
    before = instance.shadow or state.shadow_gone.pop(instance.id, None)
    ns = None if instance.home is None else state.namespaces.get(instance.home)
    kinds = tuple(c.spec.layout.kind for c in ns.classes) if ns is not None else ()
    instance.shadow = ShadowFigures(kinds, msg)
    state.log.of(instance).shadow = True
    if ns is not None:
        total = ns.traffic.shadow or ShadowFigures()
        ns.traffic.shadow = total.plus(instance.shadow, before)


def engine_gone(state: State, instance: Instance) -> None:
    """An engine is gone: keep its last report."""
    if instance.shadow is not None:
        state.shadow_gone[instance.id] = instance.shadow
        if len(state.shadow_gone) > MOST_GONE:
            del state.shadow_gone[next(iter(state.shadow_gone))]
