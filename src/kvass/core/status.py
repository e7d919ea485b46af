"""The fields of ``kvass status``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvass.core.metrics import GAUGES, GROUP_GAUGES, TIER_GAUGES

if TYPE_CHECKING:
    from kvass.core.state import State


def status(state: State) -> dict[str, Any]:
    """JSON-able. The numbers are those of ``metrics``; of ``counters``
    those that are 0 are left out."""
    return {
        "boot": state.config.boot.hex(),
        "version": state.config.version,
        **{gauge.name: gauge.read(state) for gauge in GAUGES},
        "namespaces": [
            {
                "namespace": ns.digest.hex(),
                "model": ns.model,
                "epoch": ns.epoch,
                "private": ns.private,
                "chunk_tokens": ns.chunk_tokens,
                "groups": [
                    {
                        "group": c.spec.group,
                        "kind": c.spec.layout.kind,
                        **{gauge.name: gauge.read(c) for gauge in GROUP_GAUGES},
                    }
                    for c in ns.classes
                ],
            }
            for ns in state.namespaces.values()
        ],
        "tiers": [
            {
                "tier": name,
                **{gauge.name: gauge.read(state, number) for gauge in TIER_GAUGES},
                **state.tiers.counters[number],
                **state.tiers.reports[number],
            }
            for number, name in enumerate(state.config.tiers)
        ],
        "messages": {str(kind.__struct_config__.tag): n for kind, n in state.messages.items()},
        "counters": {name: count for name, count in state.counters.items() if count},
    }
