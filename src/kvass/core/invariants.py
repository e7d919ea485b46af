"""The invariants of the state, checked after every event by tests and the simulator.

Law of this file: a check changes nothing. Its ``AssertionError`` says which invariant is broken.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvass.core.clients.lookup_log import ENGINES, ENTRIES
from kvass.core.clients.tenants import MOST
from kvass.core.pending.promotion import Promotion, Promotions, PromotionState
from kvass.core.pending.settlement import FORMER
from kvass.core.pending.tier_operations import Flushing, Loading, Probing
from kvass.core.rows.index import ABSENT
from kvass.core.rows.row_table import (
    FAILED,
    FREE,
    LOADING,
    NEVER,
    NOBODY,
    NOTED,
    QUARANTINED,
    READY,
    STATE_NAMES,
    WRITING,
    RowTable,
)
from kvass.core.rows.sets import CLEARED
from kvass.core.tiers.ahead import AT_ONCE
from kvass.core.tiers.epochs import pending
from kvass.core.tiers.plan import LOADING_SHARE

if TYPE_CHECKING:
    from kvass.core.pending.settlement import Settlement
    from kvass.core.pending.tier_state import TierState
    from kvass.core.rows.blocks import BlockIndex
    from kvass.core.rows.row_table import ClassRows
    from kvass.core.state import State


def validate(state: State) -> None:
    """Check all invariants (laws 2, 3, 4, 6, 12)."""
    pinned = [part for lease in state.leases.all.values() for part in lease.parts]
    pinned += [part for p in state.promotions.all.values() for part in p.pinned]
    pinned += [op.part for op in state.tiers.ops.values() if isinstance(op, Flushing)]
    _leases(state)
    _reservations(state)
    _pins(state, pinned)
    _loading(state)
    _promotions(state)
    _flushes(state)
    _tiers(state)
    _extents(state)
    _rows(state)
    _ended(state)
    _counts(state, pinned)
    _tenants(state)
    _sums(state)
    _instances(state)
    _segments(state)
    _log(state)


def _log(state: State) -> None:
    """The log of lookups is bounded."""
    assert len(state.log.engines) <= ENGINES, "too many engines are in the log"
    for engine in state.log.engines.values():
        assert len(engine.entries) <= ENTRIES, "an engine has too many entries"


def _behind(part: Settlement | Promotions, now: float) -> bool:
    """Whether one step could not end or continue all entries that are due."""
    return part.next_due is not None and part.next_due <= now


def _leases(state: State) -> None:
    behind = _behind(state.settlement, state.now)
    for lease in state.leases.all.values():
        assert lease.owing, "a lease that nobody owes is still held"
        assert lease.deadline > state.now or behind, "a lease outlived its deadline"


def _reservations(state: State) -> None:
    """A WRITING or QUARANTINED row belongs to one reservation, which is open while it may be
    written."""
    table, now, behind = state.rows.table, state.now, _behind(state.settlement, state.now)
    writers = dict[int, int]()
    owed = Counter[str]()
    for reservation in state.reservations.all.values():
        assert behind or not reservation.settled(now), "a settled reservation is still held"
        late = reservation.deadline <= now and not behind
        assert reservation.discarded or not late, "a reservation outlived its deadline"
        want = QUARANTINED if reservation.discarded else WRITING
        for part in reservation.parts:
            for row in part.rows.tolist():
                assert row not in writers, f"row {row} has two reservations"
                assert table.state[row] == want, f"row {row} is not in its reservation's state"
                assert table.loader[row] == reservation.id, f"row {row} names another writer"
                writers[row] = reservation.id
        owed[reservation.instance] += reservation.size_bytes
    assert owed == state.reservations.bytes_of, "reserved bytes were miscounted"
    assert all(size <= state.quota for name, size in owed.items() if name != FORMER), (
        "an instance has more than its share"
    )
    in_transit = np.flatnonzero((table.state == WRITING) | (table.state == QUARANTINED))
    assert in_transit.tolist() == sorted(writers), "a row in transit belongs to no reservation"


def _pins(state: State, pinned: list[ClassRows]) -> None:
    """All pins are those of ``pinned``: the rows that leases, promotions and flushes hold."""
    pins = state.rows.table.pins
    rows = np.flatnonzero(pins)
    counted = dict(zip(rows.tolist(), pins[rows].tolist(), strict=True))
    held = Counter(row for part in pinned for row in set(part.rows.tolist()))
    assert counted == held, f"rows count the pins {counted}, leases {held}"


def _loading(state: State) -> None:
    """Each LOADING row belongs to one load of a tier, and a load has no other rows."""
    table, tiers = state.rows.table, state.tiers
    loading = {n: op for n, op in tiers.ops.items() if isinstance(op, Loading)}
    rows = {row: n for n, op in loading.items() for row in op.part.rows.tolist()}
    held = np.flatnonzero(table.state == LOADING)
    fillers = dict(zip(held.tolist(), table.loader[held].tolist(), strict=True))
    assert rows == fillers, "a LOADING row is filled by another operation, or none"
    size = sum(op.size_bytes for op in loading.values())
    assert size == state.loading_bytes, "LOADING bytes were miscounted"
    assert size <= state.config.arena_bytes * LOADING_SHARE, "more is LOADING than may be"
    for tier in tiers.all:
        _ahead(tier, {n: op for n, op in loading.items() if op.tier == tier.number})


def _ahead(tier: TierState, loads: dict[int, Loading]) -> None:
    """A load that its tier did not get yet waits for its turn, and some promotion for it."""
    assert not tier.held or tier.urgent or len(tier.ahead) == AT_ONCE, "a load ahead has its turn"
    assert len(tier.ahead) <= AT_ONCE, "too many loads ahead"
    assert tier.urgent.isdisjoint(tier.held), "a lookup waits for the turn of a load"
    assert tier.held.keys() | tier.ahead | tier.urgent <= loads.keys(), "a load ahead has ended"
    assert all(loads[op].waiters for op in tier.held), "nobody waits for a load ahead"
    size = sum(loads[op].size_bytes for op in (*tier.held, *tier.ahead))
    assert size == tier.ahead_bytes, "bytes ahead were miscounted"


def _promotions(state: State) -> None:
    """A promotion is open until its deadline at most, and its state agrees with what it waits
    for."""
    promotions, ops = state.promotions, state.tiers.ops
    waiting = sum(p.size_bytes for p in promotions.all.values())
    assert waiting == sum(promotions.bytes_of.values()), "miscounted bytes"
    assert waiting <= state.config.limits.waiting_bytes, "more waits than may"
    for p in promotions.all.values():
        late = p.deadline <= state.now and not (promotions.going or _behind(promotions, state.now))
        assert not late, "a promotion outlived its deadline"
        used = np.array([row for part in p.pinned for row in part.rows.tolist()], np.int64)
        table = state.rows.table
        awaited = {*table.loader[used[table.state[used] == LOADING]].tolist()}
        assert awaited == p.awaits, "a promotion waits for what it does not use"
        for op in map(ops.__getitem__, awaited):
            assert isinstance(op, Loading), "a promotion waits for something else than a load"
            assert p.id in op.waiters, "nobody would wake a promotion"
        _promotion_state(state, p)
    for reservation in state.reservations.all.values():
        waiters = [promotions.all.get(number) for number in reservation.waiters]
        assert all(p is not None and reservation.id in p.writers for p in waiters), (
            "a writer would wake a promotion that does not wait for it"
        )


def _promotion_state(state: State, p: Promotion) -> None:
    """What a promotion holds and waits for agrees with its state. ``woken``: its wait is over, and
    a later step continues it."""
    woken = p.id in state.promotions.going
    probes = [o for o in state.tiers.ops.values() if isinstance(o, Probing) and o.promotion == p.id]
    pinned = sum(len(part.rows) for part in p.pinned)
    match p.state:
        case PromotionState.AWAITING_WRITERS:
            assert p.writers, "a promotion awaits no writer"
            for writer in map(state.reservations.all.get, () if woken else p.writers):
                assert writer is not None, "a promotion awaits a writer that is done"
                assert p.id in writer.waiters, "nobody would wake a promotion"
        case PromotionState.AWAITING_EPOCH:
            assert woken or pending(p.namespace), "a promotion awaits no tier's epoch"
        case PromotionState.PROBING:
            assert len(probes) == 1, "a promotion does not await one probe"
        case PromotionState.LOADING:
            assert woken or p.awaits, "a promotion awaits no load"
        case _:
            raise AssertionError(f"a promotion is {p.state.name} between two steps")
    assert not p.writers or p.state is PromotionState.AWAITING_WRITERS, "writers are awaited"
    assert not probes or p.state is PromotionState.PROBING, "a probe is awaited"
    assert not pinned or p.state is PromotionState.LOADING, "a promotion pins rows too soon"


def _flushes(state: State) -> None:
    for number, tier in enumerate(state.tiers.all):
        ops = [o for o in state.tiers.ops.values() if isinstance(o, Flushing) and o.tier == number]
        storing = sum(op.size_bytes for op in ops)
        assert tier.storing_bytes == storing, "flushed bytes were miscounted"
        queued = sum(len(queued.rows) for queued in tier.queue)
        assert tier.queued_rows == queued, "a queue miscounts"


def _tiers(state: State) -> None:
    """The places of used tiers are 1, 2 and so on in their order. A removed tier has place 0."""
    tiers = state.tiers
    assert [t.place for t in tiers.used] == [*range(1, len(tiers.used) + 1)], "tiers have places"
    assert sum(t.place > 0 for t in tiers.all) == len(tiers.used), "a removed tier has a place"
    for ns in state.namespaces.values():
        assert len(ns.traffic.from_tiers) == len(tiers.all), "hits of a tier have no column"
        epochs = ns.tier_epochs
        assert len(epochs) == (0 if ns.private else len(tiers.all)), "a tier has no epoch's column"
        known = [t.place for t, epoch in zip(tiers.all, epochs, strict=False) if epoch is not None]
        assert all(known), "a removed tier would be used"


def _extents(state: State) -> None:
    end = used = 0
    for base, size in sorted(
        extent
        for each in state.classes.extents.sets.values()
        for extent in zip(each.bases, each.extent_bytes, strict=True)
    ):
        assert base >= end, "two extents overlap"
        end = base + size
        used += size
    assert end <= state.config.arena_bytes, "an extent leaves the arena"
    free = state.classes.extents.free_bytes
    assert used + free == state.config.arena_bytes, "arena bytes were lost"


def _rows(state: State) -> None:
    """A slot is used, or it is free and listed once. A readable row is in the index."""
    table, classes = state.rows.table, state.classes.by_id.values()
    free, readable, failed = table.state == FREE, table.state >= READY, table.state == FAILED
    assert (table.stamp[free] == NEVER).all(), "a FREE row keeps a stamp"
    assert not table.key[free].any(), "a FREE row keeps a key"
    assert not state.followers.tags.of(np.flatnonzero(free)).any(), "a FREE row keeps a session"
    home = np.full(len(table), NOBODY)
    for extent_set in state.classes.extents.sets.values():
        home[extent_set.first_row : extent_set.end_row] = extent_set.id
    assert (table.set_of == home).all(), "a row left its set"
    owner = np.full(len(table), NOBODY)
    owner[home != NOBODY] = state.classes.sets.owner[home[home != NOBODY]]
    cleared = owner == CLEARED
    listed = np.zeros(len(table), np.int64)
    matches = np.zeros(len(table), np.bool_)
    for row_class in classes:
        np.add.at(listed, row_class.free.listed(), 1)
        assert (owner[row_class.free.listed()] == row_class.id).all(), (
            "a free slot of another class"
        )
        if len(row_class.index):
            rows = row_class.index.rows()
            assert len(rows) == len(row_class.index), "the index miscounts"
            assert (row_class.index.find(table.key[rows]) == rows).all(), (
                "the index and a row disagree"
            )
            own = np.isin(owner[rows], [c.id for c in row_class.of_tenants.values()])
            assert own.all(), "the index names another class's row"
            matches[rows] = True
        if row_class.blocks is not None:
            shared = [each.id for each in row_class.of_tenants.values()]
            _blocks(row_class.blocks, table, np.isin(owner, shared))
    assert (listed == (free & (owner >= 0))).all(), "a slot is free and used, twice free, or lost"
    assert not (matches & (free | failed)).any(), "a FREE or FAILED row still matches"
    assert (matches | cleared)[readable].all(), "a READY row is lost"
    assert matches[(table.state == LOADING) & ~cleared].all(), "a LOADING row is lost"
    assert (table.pins[failed] > 0).all(), "a FAILED row that nobody waits for"
    assert (table.stamp[readable] != NEVER).all(), "a READY row that eviction cannot see"


def _ended(state: State) -> None:
    """The rows of a session that has ended are among those that are evicted first, each once; some
    may join in later steps."""
    listed = np.concatenate(
        [np.empty(0, np.int64), *[c.order.first() for c in state.classes.by_id.values()]]
    )
    assert len(np.unique(listed)) == len(listed), "a row of an ended session is listed twice"
    rows = np.flatnonzero(state.rows.table.state != FREE)
    rows = rows[state.followers.tags.ended(rows)]
    joining = np.isin(state.followers.tags.of(rows), [end.tag for end in state.endings])
    cleared = state.classes.sets.owner[state.rows.table.set_of[rows]] == CLEARED
    lost = rows[~(joining | cleared | np.isin(rows, listed))]
    assert not len(lost), "a row of an ended session is not among those that are evicted first"


def _blocks(blocks: BlockIndex, table: RowTable, own: npt.NDArray[np.bool_]) -> None:
    """The index of blocks has READY rows only. ``own``: the rows of the classes that share it."""
    rows = np.sort(blocks.index.rows())
    assert len(rows) == len(blocks.index), "the index of blocks miscounts"
    listed = np.flatnonzero(own & (table.entry < NOTED))
    assert rows.tolist() == listed.tolist(), "the index of blocks has other rows than it should"
    assert (table.state[rows] == READY).all(), "blocks of a row that is not READY match"
    assert (blocks.index.find(blocks.prints.keys_of(rows)) == rows).all(), "two rows, one block"
    tail = blocks.prints.tail[rows]
    reach = np.where(tail > 0, tail, blocks.prints.width)
    assert (table.entry[rows] < reach).all(), "a row is found by a block that it does not have"


def _counts(state: State, pinned: list[ClassRows]) -> None:
    """The counts of sets and row classes are right. ``pinned``: all pinned rows."""
    classes, table, sets = state.classes, state.rows.table, state.classes.sets
    held, used = np.zeros_like(sets.held), np.zeros_like(sets.used)
    filled = table.set_of[table.state != FREE]
    np.add.at(used, filled, 1)
    in_transit = np.logical_or.reduce([table.state == s for s in (WRITING, LOADING, QUARANTINED)])
    np.add.at(held, table.set_of[in_transit], 1)
    for part in pinned:
        np.add.at(held, table.set_of[part.rows], 1)
    there = sets.owner != NOBODY
    assert sorted(classes.extents.sets) == np.flatnonzero(there).tolist(), "a set is lost"
    assert sets.cleared == (sets.owner == CLEARED).sum(), "cleared sets were miscounted"
    assert (held == sets.held)[there].all(), "what holds a set was miscounted"
    assert (used == sets.used)[there].all(), "the rows of a set were miscounted"
    assert state.rows.pinned == sum(len(part.rows) for part in pinned), "pins were miscounted"
    older = table.stamp[table.state != FREE] <= sets.newest[filled]
    assert (older | (sets.owner[filled] == CLEARED)).all(), "a set seems older than its rows"
    for row_class in classes.by_id.values():
        rows = sets.rows_of(np.flatnonzero(sets.owner == row_class.id))
        assert len(rows) == row_class.slots, "a class miscounts its slots"
        theirs = row_class.of_tenants
        assert theirs[row_class.tenant.id] is row_class, "a tenant has two classes of a group"
        assert row_class.slots or row_class.tenant is classes.tenants.default, (
            "an empty class stays"
        )
        counted = np.bincount(table.state[rows], minlength=len(STATE_NAMES)).tolist()
        assert counted[FREE + 1 :] == row_class.rows[FREE + 1 :], "a class miscounts its rows"


def _tenants(state: State) -> None:
    """The counts of tenants are right, and no more is reserved than the arena has."""
    classes, tenants = state.classes, state.tenants.all.values()
    taken = Counter[str]()
    for number, extent_set in classes.extents.sets.items():
        row_class = classes.by_id.get(int(classes.sets.owner[number]))
        if row_class is not None:
            assert classes.sets.tenant[number] == row_class.tenant.id, "a set changed its tenant"
            taken[row_class.tenant.name] += sum(extent_set.extent_bytes)
    assert taken == Counter({t.name: t.taken_bytes for t in tenants}), "a tenant is miscounted"
    assert len(tenants) <= MOST, "there are more tenants than may be"
    assert len({t.id for t in tenants}) == len(tenants), "two tenants have one id"
    _kept(state)
    reserved = sum(t.reserved_bytes for t in tenants)
    assert reserved <= state.config.arena_bytes, "more is reserved than there is"


def _kept(state: State) -> None:
    """Retained rows of live classes are counted, and no more than their tenants' caps."""
    kept, table, sets = state.followers.kept, state.rows.table, state.classes.sets
    rows = np.flatnonzero(kept.of(np.arange(len(table))))
    assert (table.state[rows] != FREE).all(), "a FREE row is retained"
    rows = rows[sets.owner[table.set_of[rows]] >= 0]
    owners = sets.owner[table.set_of[rows]]
    sizes = {c.id: c.spec.row_bytes for c in state.classes.by_id.values()}
    held = Counter[int]()
    for owner, tenant in zip(
        owners.tolist(), sets.tenant[table.set_of[rows]].tolist(), strict=True
    ):
        held[tenant] += sizes[owner]
    for tenant in state.tenants.all.values():
        assert held[tenant.id] == tenant.kept_bytes, "retained bytes were miscounted"
        assert tenant.kept_bytes <= kept.cap(tenant), "more is retained than may be"
    there = sets.owner != NOBODY
    in_sets = kept.in_sets()
    count = np.zeros_like(in_sets)
    np.add.at(count, table.set_of[rows], 1)
    assert (count == in_sets)[there].all(), "the retained rows of a set were miscounted"


def _sums(state: State) -> None:
    """L1 has the bytes that came in and did not leave. Lookup tokens are hit tokens plus misses."""
    counters = state.counters
    left = sum(n for name, n in counters.items() if name.startswith("bytes_evicted_"))
    held = sum(sum(c.rows[READY:]) * c.spec.row_bytes for c in state.classes.by_id.values())
    assert counters["l1_in_bytes"] - left == held, "bytes in, out and there disagree"
    for ns in state.namespaces.values():
        seen = ns.traffic
        assert seen.lookup_tokens == seen.hit_tokens + sum(seen.miss_tokens.values()), (
            "hits and misses disagree"
        )


def _instances(state: State) -> None:
    for instance in state.instances.values():
        assert instance.connections, "an instance without connections is still known"
        assert instance.namespace is None or not instance.missing, "a rank is missing"
        for rank, connection in instance.connections.items():
            who = state.connections[connection].registered
            assert who is not None, "an instance counts a connection that never registered"
            assert (who.instance, who.rank) == (instance.id, rank), "a connection is someone else"


def _segments(state: State) -> None:
    """An indexed chunk has rows, unless its namespace uses tiers. The counts are right."""
    segments, count = state.followers.segments, Counter[int]()
    for namespace, entries in segments.of.items():
        ns, matcher = state.namespaces[namespace], entries.chunks.matcher
        assert entries.in_tiers == bool(state.tiers.used and ns.tier_epochs), "tiers came or went"
        assert entries.chunks is segments.sizes[ns.chunk_tokens], "chunks of another size"
        keys = matcher.key[matcher.place == entries.number]
        assert (entries.chunks.find(entries.number, keys) != ABSENT).all(), "an entry has no key"
        count[ns.chunk_tokens] += len(keys)
        for c in ns.classes:
            known = entries.in_tiers or (c.index.find(keys) != ABSENT).all()
            assert known, "law 4: a chunk is indexed whose row left"
    for number, chunks, _ in segments.cleared:
        count[chunks.matcher.chunk_tokens] += int((chunks.matcher.place == number).sum())
    for size, chunks in segments.sizes.items():
        matcher = chunks.matcher
        counts = {matcher.count, count[size], int((matcher.place > 0).sum()), len(chunks.by_key)}
        assert len(counts) == 1, "entries were miscounted"
        assert matcher.count <= matcher.capacity, "law 12: too many chunks are indexed"
