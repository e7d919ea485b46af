"""The fields of ``kvass status``. ``metrics`` declares and explains each number."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import TYPE_CHECKING, Any, Final

from kvass.blend.match import entry_bytes
from kvass.core.clients.registry import model_of
from kvass.core.pending.tier_operations import Loading
from kvass.core.pending.tier_state import TierState
from kvass.core.rows.row_table import FREE, LOADING, QUARANTINED, READY, TRANSIENT, WRITING
from kvass.types import NO_CAP, SCHEDULER

if TYPE_CHECKING:
    from kvass.core.clients.registry import Instance, Refusal
    from kvass.core.clients.tenants import Tenant
    from kvass.core.clients.traffic import Traffic
    from kvass.core.pending.ledger import Entry
    from kvass.core.rows.row_class import RowClass
    from kvass.core.rows.row_classes import Namespace
    from kvass.core.state import State


_TENANTS_TRAFFIC: Final = (
    *("lookups", "lookup_tokens", "hit_tokens", "minute_lookup_tokens", "minute_hit_tokens"),
)


def status(state: State, terms_of: Collection[bytes] = ()) -> dict[str, Any]:
    """The status of the daemon's core: a JSON-able dictionary. ``terms_of``: the digests of
    namespaces that are shown with all their fields (``terms``)."""
    namespaces = [
        _namespace(ns, state.now) | ({"terms": _terms(ns)} if ns.digest in terms_of else {})
        for ns in state.namespaces.values()
    ]
    groups = [g for ns in namespaces for g in ns["groups"]]
    reservations, cleared_bytes = state.reservations.all.values(), state.classes.sets.cleared_bytes
    loads, timing = state.tiers.ops.values(), state.config.timing
    matchers = [chunks.matcher for chunks in state.followers.segments.sizes.values()]
    return {
        "boot": state.config.boot.hex(),
        "version": state.config.version,
        "pid": state.config.pid,
        "host": state.config.host,
        "up_s": round(state.now - state.config.started_s, 3),
        "sessions": len(state.connections),
        "instances": len(state.instances),
        "leases": len(state.leases.all),
        "reservations": len(state.reservations.all),
        "pins": state.rows.pinned,
        "rows": sum(g["rows"] for g in groups),
        "rows_loading": sum(len(op.part.rows) for op in loads if isinstance(op, Loading)),
        "quarantined_bytes": sum(r.size_bytes for r in reservations if r.discarded),
        "l1_resting_bytes": state.settlement.resting_bytes,
        "l1_used_bytes": sum(g["used_bytes"] for g in groups) + cleared_bytes,
        "l1_cleared_bytes": cleared_bytes,
        "l1_kept_bytes": sum(t.kept_bytes for t in state.tenants.all.values()),
        "l1_capacity_bytes": state.config.arena_bytes,
        "l1_populated_bytes": state.populated_bytes,
        "engine_cache_bytes": state.engine_cache_bytes,
        "indexed_chunks": sum(m.count for m in matchers),
        "indexed_bytes": sum(m.count * entry_bytes(m.chunk_tokens) for m in matchers),
        "promotions": len(state.promotions.all),
        "lease_oldest_s": _age(state, state.leases.oldest, timing.lease_s),
        "reservation_oldest_s": _age(state, state.reservations.oldest, timing.reserve_s),
        "engines": [_engine(state, instance) for instance in state.instances.values()],
        "namespaces": namespaces,
        "refusals": [_refusal(name, each, state.now) for name, each in state.refusals.items()],
        "tenants": [_tenant(t, state.now) for t in state.tenants.all.values()],
        "forgotten": [
            {"model": model, **_traffic(traffic, state.now), "shadow": _shadow(traffic)}
            for model, traffic in state.namespaces.forgotten.items()
        ],
        "tiers": [_tier(tier, state.now) for tier in state.tiers.all],
        "histograms": {name: h.fields() for name, h in state.histograms.items()},
        "messages": {str(kind.__struct_config__.tag): n for kind, n in state.messages.items()},
        "counters": dict(state.counters),
    }


def _namespace(ns: Namespace, now: float) -> dict[str, Any]:
    return {
        "namespace": ns.digest.hex(),
        "model": ns.model,
        "like": ns.like.hex(),
        "differs_in": list(ns.differs_in),
        "epoch": ns.epoch,
        "private": ns.private,
        "chunk_tokens": ns.chunk_tokens,
        **_traffic(ns.traffic, now),
        "shadow": _shadow(ns.traffic),
        "groups": [_group(c) for c in ns.classes],
    }


def _refusal(instance: str, refusal: Refusal, now: float) -> dict[str, Any]:
    return {
        "instance": instance[:80],
        "text": refusal.text[:300],
        "age_s": round(now - refusal.when, 1),
    }


def _traffic(traffic: Traffic, now: float) -> dict[str, Any]:
    minute_lookup, minute_hit, minute_loads, minute_failed = traffic.last_minute(now)
    return {
        "lookups": traffic.lookups,
        "lookup_tokens": traffic.lookup_tokens,
        "hit_tokens": traffic.hit_tokens,
        "hit_tokens_tiers": list(traffic.from_tiers),
        "miss_tokens": dict(traffic.miss_tokens),
        "stored_tokens": traffic.stored_tokens,
        "loads": traffic.loads,
        "failed_loads": traffic.failed_loads,
        "answer_tokens": traffic.answer_tokens,
        "repeated_tokens": traffic.repeated_tokens,
        "saved_prefill_s": traffic.saved.known_s,
        "minute_lookup_tokens": minute_lookup,
        "minute_hit_tokens": minute_hit,
        "minute_loads": minute_loads,
        "minute_failed_loads": minute_failed,
    }


def _terms(ns: Namespace) -> dict[str, str]:
    """All that a namespace's digest covers, but for which rank has which layers."""
    terms = ns.terms
    own = {"chunk_tokens": terms.chunk_tokens, "ranks": terms.ranks, "world_size": terms.world_size}
    shown = {**terms.identity, **{name: str(number) for name, number in own.items()}}
    if terms.generation:
        shown["generation"] = terms.generation.hex()
    for row_class in ns.classes:
        spec = row_class.spec
        shown[f"layer group {spec.group}"] = (
            f"{spec.layout.kind}, blocks of {spec.layout.block_tokens} tokens, "
            f"window of {spec.layout.window_tokens}, shards of {list(spec.shard_bytes)} bytes"
        )
    return shown


def _shadow(traffic: Traffic) -> dict[str, Any] | None:
    return None if traffic.shadow is None else traffic.shadow.fields()


def _tenant(tenant: Tenant, now: float) -> dict[str, Any]:
    traffic = _traffic(tenant.traffic, now)
    return {
        "tenant": tenant.name,
        "quota": tenant.listed,
        **{name: traffic[name] for name in _TENANTS_TRAFFIC},
        "miss_tokens": traffic["miss_tokens"],
        "evicted_bytes": tenant.evicted_bytes,
        "l1_bytes": tenant.taken_bytes,
        "kept_bytes": tenant.kept_bytes,
        "cap_bytes": None if tenant.cap_bytes == NO_CAP else tenant.cap_bytes,
        "reserved_bytes": tenant.reserved_bytes,
    }


def _engine(state: State, instance: Instance) -> dict[str, Any]:
    ns = state.namespace_of(instance)
    connections = [state.connections[connection] for connection in instance.connections.values()]
    return {
        "instance": instance.id,
        "model": model_of(instance.terms),
        "namespace": "" if ns is None else ns.digest.hex(),
        "uids": sorted({connection.uid for connection in connections}),
        "pids": sorted({connection.pid for connection in connections}),
        "lookup_tokens": instance.lookup_tokens,
        "hit_tokens": instance.hit_tokens,
        "failed_loads": instance.failed_loads,
        "saved_prefill_s": instance.saved.known_s,
        "connected_s": round(state.now - instance.since_s, 1),
        "shadow": None if instance.shadow is None else instance.shadow.fields(),
        "seen_s": round(state.now - instance.seen_s, 1),
        "cache_bytes": instance.cache_bytes,
        "uncached": next(
            (why for s in connections if s.registered and (why := s.registered.uncached)), ""
        )[:300],
        "ranks": instance.terms.ranks,
        "missing_ranks": list(instance.missing),
        "scheduler": SCHEDULER in instance.connections,
    }


def _age(state: State, entry: Entry | None, lasts_s: float) -> float:
    """The age of a lease or reservation that lasts ``lasts_s``; 0 for ``None``."""
    return 0.0 if entry is None else round(state.now - entry.deadline + lasts_s, 3)


def _tier(tier: TierState, now: float) -> dict[str, Any]:
    """A row of the table of tiers. The core's own fields replace fields of the same name that the
    tier's process reports."""
    return {
        **tier.report,
        "tier": tier.name,
        "place": tier.place,
        "flush_queue_rows": tier.queued_rows,
        "flush_queue_oldest_s": round(now - tier.queue[0].since, 3) if tier.queue else 0.0,
        "storing_bytes": tier.storing_bytes,
        "failing_rows": tier.failing_rows,
        "last_failure_s": round(now - tier.failed_s, 1) if tier.failed_s > -inf else 0.0,
        "loading_bytes": tier.speed.loading_bytes + tier.ahead_bytes,
        "load_bytes_s": int(tier.speed.bytes_s),
        **tier.counters,
        **{name: histogram.fields() for name, histogram in tier.histograms.items()},
    }


def _group(row_class: RowClass) -> dict[str, Any]:
    rows, size = row_class.rows, row_class.spec.row_bytes
    if not row_class.undivided:
        rows = [*map(sum, zip(*(c.rows for c in row_class.of_tenants.values()), strict=True))]
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
