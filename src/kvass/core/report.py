"""What can be seen of the state: ``status`` for people, ``validate`` for tests.

Law of this file: it reads everything and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvass.core.promote import LOADING_SHARE
from kvass.core.rows import FREE, LOADING, NEVER, NOBODY, READY, STATE_NAMES
from kvass.core.sets import CLEARED
from kvass.core.tiers import Flushing, Loading, Probing

if TYPE_CHECKING:
    from kvass.core.l1 import RowClass
    from kvass.core.leases import Part
    from kvass.core.state import State


def status(state: State) -> dict[str, Any]:
    """JSON-able gauges and counters, names as in DESIGN section 8; sizes in bytes."""
    namespaces = [
        {
            "namespace": ns.digest.hex(),
            "model": ns.model,
            "epoch": ns.epoch,
            "private": ns.private,
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
        "pins": state.l1.pinned,
        "rows": sum(g["rows"] for g in groups),
        "rows_loading": len(state.promotions.loading),
        "quarantined_bytes": sum(
            one.size_bytes for one in ledger.reservations.values() if one.discarded
        ),
        "l1_used_bytes": sum(g["used_bytes"] for g in groups) + state.l1.cleared_bytes,
        "l1_cleared_bytes": state.l1.cleared_bytes,
        "l1_capacity_bytes": state.config.arena_bytes,
        "l1_populated_bytes": state.populated_bytes,
        "promotions": len(state.promotions.all),
        "namespaces": namespaces,
        "tiers": [_tier(state, number) for number in range(len(state.config.tiers))],
        "messages": {str(kind.__struct_config__.tag): n for kind, n in state.messages.items()},
        "counters": {
            **counters,
            **{f"evicted_{k}": n for k, n in state.l1.evicted.items()},
            **{f"discarded_{k}": n for k, n in state.custody.discards.items()},
            "lapsed_leases": state.custody.lapsed_leases,
        },
    }


def _tier(state: State, number: int) -> dict[str, Any]:
    tiers, flushes = state.tiers, state.flushes
    return {
        "tier": state.config.tiers[number],
        "flush_queue_rows": flushes.rows[number],
        "storing_bytes": flushes.bytes_out[number],
        "loading_bytes": tiers.speeds[number].loading_bytes,
        "load_bytes_s": int(tiers.speeds[number].bytes_s),
        **tiers.counters[number],
        **tiers.reports[number],
    }


def _group(state: State, one: RowClass) -> dict[str, Any]:
    census, size = state.l1.census(one), one.spec.row_bytes
    used = sum(n for state, n in census.items() if state != "free")
    return {
        "group": one.spec.group,
        "kind": one.spec.layout.kind,
        "row_bytes": size,
        "rows": census["ready"],
        "rows_writing": census["writing"],
        "rows_loading": census["loading"],
        "quarantined_bytes": census["quarantined"] * size,
        "used_bytes": used * size,
    }


def validate(state: State) -> None:
    """Assert every law that shows in the state (DESIGN section 2: 2, 3, 4, 6, 12)."""
    others = [part for one in state.promotions.all.values() for part in one.pinned]
    others += [op.part for op in state.tiers.ops.values() if isinstance(op, Flushing)]
    state.custody.validate(state.now, others)
    leased = [part for one in state.ledger.leases.values() for part in one.parts]
    _validate_counts(state, [*leased, *others])
    _validate_tiers(state)
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


def _validate_tiers(state: State) -> None:
    """LOADING rows, and nothing else, are a tier's to write; who waits for one, it wakes."""
    table, tiers, promotions = state.l1.table, state.tiers, state.promotions
    loading = {n: op for n, op in tiers.ops.items() if isinstance(op, Loading)}
    rows = {row: n for n, op in loading.items() for row in op.part.rows.tolist()}
    assert rows == promotions.loading, "a LOADING row is filled by another operation, or none"
    failed = [row for one in promotions.waking if one.failed for row in one.failed.rows.tolist()]
    held = np.flatnonzero(table.state == LOADING).tolist()
    assert sorted([*rows, *failed]) == held, "a stray LOADING row"
    size = sum(op.size_bytes for op in loading.values())
    size += sum(one.failed_bytes for one in promotions.waking)
    assert size == state.loading_bytes, "LOADING bytes were miscounted"
    woken = {waiter for one in promotions.waking for waiter in one.waiters}
    assert size <= state.config.arena_bytes * LOADING_SHARE, "more is LOADING than may be"
    waiting = sum(one.size_bytes for one in promotions.all.values())
    assert waiting == promotions.bytes == sum(promotions.bytes_of.values()), "miscounted bytes"
    assert waiting <= state.config.limits.waiting_bytes, "more waits than may"
    for one in promotions.all.values():
        late = one.deadline <= state.now and not promotions.behind(state.now)
        assert not late, "a promotion outlived its deadline"
        awaited = {rows[r] for p in one.pinned for r in p.rows.tolist() if r in rows}
        assert awaited == one.awaits, "a promotion waits for what it does not use"
        for n in awaited:
            assert one.id in loading[n].waiters, "nobody would wake a promotion"
        probing = any(isinstance(o, Probing) and o.promotion == one.id for o in tiers.ops.values())
        going = probing or one.early or one.id in woken
        assert awaited or going, "a promotion waits for nothing"
    for tier, out in enumerate(state.flushes.bytes_out):
        flushing = [o for o in tiers.ops.values() if isinstance(o, Flushing) and o.tier == tier]
        assert out == sum(o.size_bytes for o in flushing), "flushed bytes were miscounted"
        assert (queued := state.flushes.queues[tier]) is not None
        assert state.flushes.rows[tier] == sum(len(q.rows) for q in queued), "a queue miscounts"


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
    """A slot is listed as free once, or used; a READY row matches, or is doomed and being read."""
    table, classes = state.l1.table, state.l1.classes.values()
    free, ready = table.state == FREE, table.state == READY
    assert (table.stamp[free] == NEVER).all(), "a FREE row keeps a stamp"
    assert not table.doomed[free].any(), "a FREE row is doomed"
    assert not table.key[free].any(), "a FREE row keeps a key"
    home = np.full(len(table), NOBODY)
    for one in state.l1.extents.sets.values():
        home[one.first_row : one.end_row] = one.id
    assert (table.set_of == home).all(), "a row left its set"
    owner = np.full(len(table), NOBODY)
    owner[home != NOBODY] = state.l1.sets.owner[home[home != NOBODY]]
    cleared = owner == CLEARED
    listed = np.zeros(len(table), np.int64)
    matches = np.zeros(len(table), np.bool_)
    for kind in classes:
        np.add.at(listed, kind.free.listed(), 1)
        assert (owner[kind.free.listed()] == kind.id).all(), "a free slot of another class"
        if len(kind.index):
            rows = kind.index.rows()
            assert len(rows) == len(kind.index), "the index miscounts"
            assert (kind.index.find(table.key[rows]) == rows).all(), "the index and a row disagree"
            assert (owner[rows] == kind.id).all(), "the index names another class's row"
            matches[rows] = True
    assert (listed == (free & (owner >= 0))).all(), "a slot is free and used, twice free, or lost"
    assert not (matches & (free | table.doomed)).any(), "a FREE or doomed row still matches"
    known = matches | table.doomed | cleared
    assert known[ready].all(), "a READY row is lost"
    failed = np.zeros(len(table), np.bool_)
    for waking in state.promotions.waking:
        if waking.failed is not None:
            failed[waking.failed.rows] = True
    assert matches[(table.state == LOADING) & ~cleared & ~failed].all(), "a LOADING row is lost"
    assert ready[table.passing].all(), "a row passes that is not READY"
    assert (table.pins[ready & table.doomed] > 0).all(), "a doomed row that nobody reads"
    assert (table.stamp[ready] != NEVER).all(), "a READY row that eviction cannot see"


def _validate_counts(state: State, parts: list[Part]) -> None:
    """What is counted per set and class is so. ``parts``: all that is pinned."""
    l1, table, sets = state.l1, state.l1.table, state.l1.sets
    held, used = np.zeros_like(sets.held), np.zeros_like(sets.used)
    filled = table.set_of[table.state != FREE]
    np.add.at(used, filled, 1)
    np.add.at(held, table.set_of[(table.state != FREE) & (table.state != READY)], 1)
    for part in parts:
        np.add.at(held, table.set_of[part.rows], 1)
    there = sets.owner != NOBODY
    assert sorted(l1.extents.sets) == np.flatnonzero(there).tolist(), "a set is lost"
    assert sets.cleared == (sets.owner == CLEARED).sum(), "cleared sets were miscounted"
    assert (held == sets.held)[there].all(), "what holds a set was miscounted"
    assert (used == sets.used)[there].all(), "the rows of a set were miscounted"
    assert l1.pinned == sum(len(part.rows) for part in parts), "pins were miscounted"
    older = table.stamp[table.state != FREE] <= sets.newest[filled]
    assert (older | (sets.owner[filled] == CLEARED)).all(), "a set seems older than its rows"
    for one in l1.classes.values():
        rows = sets.rows_of(np.flatnonzero(sets.owner == one.id))
        assert len(rows) == one.slots, "a class miscounts its slots"
        counted = np.bincount(table.state[rows], minlength=len(STATE_NAMES)).tolist()
        assert counted == [*l1.census(one).values()], "a class miscounts its rows"
        doomed = table.doomed[rows] & (table.state[rows] == READY)
        assert doomed.sum() == one.doomed, "a class miscounts its doomed rows"
