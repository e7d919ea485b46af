"""The fields of ``kvass status``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvass.core.rows import FREE, LOADING, QUARANTINED, READY, TRANSIENT, WRITING
from kvass.core.tier_state import Loading, TierState

if TYPE_CHECKING:
    from kvass.core.row_store import RowClass
    from kvass.core.state import State


def status(state: State) -> dict[str, Any]:
    """JSON-able. ``metrics`` says what each number means; counters that are 0 are left out."""
    namespaces = [
        {
            "namespace": ns.digest.hex(),
            "model": ns.model,
            "epoch": ns.epoch,
            "private": ns.private,
            "chunk_tokens": ns.chunk_tokens,
            "groups": [_group(c) for c in ns.classes],
        }
        for ns in state.namespaces.values()
    ]
    groups = [g for ns in namespaces for g in ns["groups"]]  # type: ignore[attr-defined]
    reservations, cleared_bytes = state.reservations.all.values(), state.store.cleared_bytes
    loads = state.tiers.ops.values()
    return {
        "boot": state.config.boot.hex(),
        "version": state.config.version,
        "sessions": len(state.sessions),
        "instances": len(state.instances),
        "leases": len(state.leases.all),
        "reservations": len(state.reservations.all),
        "pins": state.store.pinned,
        "rows": sum(g["rows"] for g in groups),
        "rows_loading": sum(len(op.part.rows) for op in loads if isinstance(op, Loading)),
        "quarantined_bytes": sum(r.size_bytes for r in reservations if r.discarded),
        "l1_used_bytes": sum(g["used_bytes"] for g in groups) + cleared_bytes,
        "l1_cleared_bytes": cleared_bytes,
        "l1_capacity_bytes": state.config.arena_bytes,
        "l1_populated_bytes": state.populated_bytes,
        "promotions": len(state.promotions.all),
        "namespaces": namespaces,
        "tiers": [*map(_tier, state.config.tiers, state.tiers.all)],
        "messages": {str(kind.__struct_config__.tag): n for kind, n in state.messages.items()},
        "counters": {name: count for name, count in state.counters.items() if count},
    }


def _tier(name: str, tier: TierState) -> dict[str, Any]:
    return {
        "tier": name,
        "flush_queue_rows": tier.queued_rows,
        "storing_bytes": tier.storing_bytes,
        "loading_bytes": tier.speed.loading_bytes,
        "load_bytes_s": int(tier.speed.bytes_s),
        **tier.counters,
        **tier.report,
    }


def _group(row_class: RowClass) -> dict[str, Any]:
    rows, size = row_class.rows, row_class.spec.row_bytes
    return {
        "group": row_class.spec.group,
        "kind": row_class.spec.layout.kind,
        "row_bytes": size,
        "rows": rows[READY] + rows[TRANSIENT],
        "rows_writing": rows[WRITING],
        "rows_loading": rows[LOADING],
        "quarantined_bytes": rows[QUARANTINED] * size,
        "used_bytes": sum(rows[FREE + 1 :]) * size,
    }
