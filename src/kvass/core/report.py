"""What can be seen of the state: ``status`` for people, ``validate`` for tests.

Law of this file: it reads everything and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvass.core.rows import FREE, NEVER, NOBODY, READY

if TYPE_CHECKING:
    from kvass.core.l1 import RowClass
    from kvass.core.state import State


def status(state: State) -> dict[str, Any]:
    """JSON-able gauges and counters, names as in DESIGN section 8; sizes in bytes."""
    namespaces = [
        {
            "namespace": ns.digest.hex(),
            "model": ns.model,
            "epoch": ns.epoch,
            "chunk_tokens": ns.chunk_tokens,
            "groups": [_group(state, one) for one in ns.classes],
        }
        for ns in state.namespaces.values()
    ]
    groups = [g for ns in namespaces for g in ns["groups"]]  # type: ignore[attr-defined]
    ledger, counters = state.ledger, state.counters
    return {
        "boot": state.config.boot.hex(),
        "version": state.config.version,
        "sessions": len(state.sessions),
        "instances": len(state.instances),
        "leases": len(ledger.leases),
        "reservations": len(ledger.reservations),
        "pins": int(state.l1.table.pins.sum()),
        "rows": sum(g["rows"] for g in groups),
        "rows_loading": sum(g["rows_loading"] for g in groups),
        "quarantined_bytes": sum(g["quarantined_bytes"] for g in groups),
        "l1_used_bytes": sum(g["used_bytes"] for g in groups),
        "l1_capacity_bytes": state.config.arena_bytes,
        "l1_populated_bytes": state.populated_bytes,
        "namespaces": namespaces,
        "counters": {
            **counters,
            **{f"evicted_{k}": n for k, n in state.l1.evicted.items()},
            **{f"discarded_{k}": n for k, n in state.custody.discards.items()},
            "lapsed_leases": state.custody.lapsed_leases,
        },
    }


def _group(state: State, one: RowClass) -> dict[str, Any]:
    census, size = state.l1.census(one), one.spec.row_bytes
    used = sum(n for state, n in census.items() if state != "free")
    return {
        "group": one.spec.group,
        "kind": one.spec.kind,
        "row_bytes": size,
        "rows": census["ready"],
        "rows_writing": census["writing"],
        "rows_loading": census["loading"],
        "quarantined_bytes": census["quarantined"] * size,
        "used_bytes": used * size,
    }


def validate(state: State) -> None:
    """Assert every law that shows in the state (DESIGN section 2: 2, 3, 4, 6, 12)."""
    state.custody.validate(state.now)
    quota = state.config.arena_bytes * state.config.limits.instance_write_share
    for owed in state.ledger.bytes_of.values():
        assert owed <= quota, "an instance reserved more than its share"
    _validate_extents(state)
    for one in state.l1.classes.values():
        _validate_class(state, one)
    for instance in state.instances.values():
        assert instance.sessions, "an instance without sessions is still known"
        assert instance.namespace is None or not instance.missing, "a rank is missing"
        for rank, session in instance.sessions.items():
            who = state.sessions[session].registered
            assert who is not None, "an instance counts a session that never registered"
            assert (who.instance, who.rank) == (instance.id, rank), "a session is someone else"


def _validate_extents(state: State) -> None:
    end = 0
    spans = sorted(
        span
        for s in state.l1.extents.sets.values()
        for span in zip(s.bases, s.extent_bytes, strict=True)
    )
    for base, n in spans:
        assert base >= end, "two extents overlap"
        end = base + n
    assert end <= state.config.arena_bytes, "an extent leaves the arena"
    used = sum(n for _, n in spans)
    free = state.l1.extents.free_bytes
    assert used + free == state.config.arena_bytes, "arena bytes were lost"


def _validate_class(state: State, one: RowClass) -> None:
    table, index = state.l1.table, one.index
    sets = [s for s in state.l1.extents.sets.values() if s.owner == one.id]
    rows = np.concatenate(
        [np.arange(s.first_row, s.end_row) for s in sets] or [np.empty(0, np.int64)]
    )
    own = set(rows.tolist())
    assert all(table.set_of[s.first_row] == s.id != NOBODY for s in sets), "a set lost its rows"
    assert sorted(one.free) == sorted(rows[table.state[rows] == FREE].tolist()), "free list is off"
    for key, row in index.items():
        assert row in own, "the index names another class's row"
        assert table.key[row] == key, "the index and the row disagree on the key"
        assert table.state[row] != FREE, "the index names a FREE row"
        assert not table.doomed[row], "a doomed row still matches"
    for row in rows.tolist():
        now = int(table.state[row])
        if now == FREE:
            assert table.key[row] is None, "a FREE row keeps a key"
            assert table.stamp[row] == NEVER, "a FREE row keeps a stamp"
            assert not table.doomed[row], "a FREE row is doomed"
        if now == READY:
            doomed = bool(table.doomed[row])
            assert doomed or index.get(table.key[row] or b"") == row, "a READY row is lost"
            assert not doomed or table.pins[row] > 0, "a doomed row that nobody reads"
            assert table.stamp[row] != NEVER, "a READY row that eviction cannot see"
