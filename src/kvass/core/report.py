"""What can be seen of the state: ``status`` for people, ``validate`` for tests.

Law of this file: it reads everything and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvass.core.rows import FREE, NEVER, READY

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
    _validate_rows(state)
    for instance in state.instances.values():
        assert instance.sessions, "an instance without sessions is still known"
        assert instance.namespace is None or not instance.missing, "a rank is missing"
        for rank, session in instance.sessions.items():
            who = state.sessions[session].registered
            assert who is not None, "an instance counts a session that never registered"
            assert (who.instance, who.rank) == (instance.id, rank), "a session is someone else"


def _validate_extents(state: State) -> None:
    end = used = 0
    for base, n in sorted(
        span
        for one in state.l1.extents.sets.values()
        for span in zip(one.bases, one.extent_bytes, strict=True)
    ):
        assert base >= end, "two extents overlap"
        end = base + n
        used += n
    assert end <= state.config.arena_bytes, "an extent leaves the arena"
    free = state.l1.extents.free_bytes
    assert used + free == state.config.arena_bytes, "arena bytes were lost"


def _validate_rows(state: State) -> None:
    """Slots are free or used, and listed as such once; what is used, its class knows."""
    table, sets, classes = state.l1.table, state.l1.extents.sets, state.l1.classes
    free = table.state == FREE
    assert (table.stamp[free] == NEVER).all(), "a FREE row keeps a stamp"
    assert not table.doomed[free].any(), "a FREE row is doomed"
    assert not table.key[free].any(), "a FREE row keeps a key"
    used, matching = np.flatnonzero(~free), set[int]()
    listed = sum(len(one.free) for one in classes.values())
    assert listed + len(used) == sum(s.slots for s in sets.values()), "a slot was lost"
    for one in classes.values():
        assert len(set(one.free.tolist())) == len(one.free), "a slot is free twice"
        assert free[one.free].all(), "a slot in use is listed as free"
        homes = set(table.set_of[one.free].tolist())
        assert all(sets[s].owner == one.id for s in homes), "a free slot of another class"
        indexed = one.index.rows()
        assert len(indexed) == len(one.index), "the index miscounts"
        found = one.index.find(table.key[indexed])
        assert (found == indexed).all(), "the index and the row disagree on the key"
        homes = set(table.set_of[indexed].tolist())
        assert all(sets[s].owner == one.id for s in homes), "the index names another class's row"
        matching.update(indexed.tolist())
    columns = zip(
        used.tolist(),
        *(c[used].tolist() for c in (table.state, table.pins, table.doomed, table.stamp)),
        table.set_of[used].tolist(),
        strict=True,
    )
    for row, now, pins, doomed, stamp, home in columns:
        assert sets[home].first_row <= row < sets[home].end_row, "a row left its set"
        matches = row in matching
        assert not (matches and doomed), "a doomed row still matches"
        if now == READY:
            assert doomed or matches, "a READY row is lost"
            assert not doomed or pins > 0, "a doomed row that nobody reads"
            assert stamp != NEVER, "a READY row that eviction cannot see"
