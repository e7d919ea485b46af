"""The allocator of rows: it takes free slots, and evicts rows if there are none.

Law of this file: rows are evicted only here, and only when a new row needs the room (law 6). The
rows of cleared sets are not evicted, but forgotten.

A class without a free slot gets a new extent set from the arena's free space. If there is no free
space, rows are evicted: rows of the class itself, or whole extent sets of other classes, whichever
the policy (``policy.py``) lets go first. So no layout can starve another. With quotas the sets of
tenants that have more than their share go first (``shares.py``).
"""

from __future__ import annotations

import numpy as np

from kvass.core.clients.tenants import Tenant
from kvass.core.rows.causes import Cause
from kvass.core.rows.extents import STAYS
from kvass.core.rows.index import ABSENT
from kvass.core.rows.order import Victims
from kvass.core.rows.row_class import RowClass
from kvass.core.rows.row_states import RowStates
from kvass.core.rows.row_table import FREE, NOBODY, READY, WRITING
from kvass.core.rows.saving import saved_set
from kvass.core.rows.sets import CLEARED
from kvass.core.rows.shares import Sets, Shares
from kvass.core.rows.tables import CoreTables
from kvass.types import I64Array, U64Array


class RowAllocator:
    """The allocator of slots for new rows. ``slice_slots``: how many one ``reclaim`` frees."""

    def __init__(self, rows: RowStates, tables: CoreTables, slice_slots: int) -> None:
        self._rows, self._classes, self._policy = rows, rows.classes, rows.classes.policy
        self._table, self._sets, self._extents = tables.table, tables.sets, tables.extents
        self._shares = Shares(tables)
        self._slice_slots = slice_slots

    def allocate(
        self,
        classes: list[RowClass],
        keys: U64Array,
        wanted: list[I64Array],
        protect: int,
        tenant: Tenant,
        state: int = WRITING,
        session: int = 0,
    ) -> tuple[list[I64Array], int]:
        """Allocate rows in state ``state`` (WRITING or LOADING), which ``tenant`` pays for.

        ``wanted[i]``: the chunks that need a row of ``classes[i]``, as positions in ``keys``. Their
        keys are distinct and not in the index of the class. Rows that were used at or after stamp
        ``protect``, such as the prefix of the same request, are not evicted.

        ``session``: the tag of the client's session that stores or loads them.

        Returns the rows of each class, for as many first chunks of ``wanted`` as there is room for;
        and the first chunk that has no row in some class, or ``len(keys)``.
        """
        rows, end = list[I64Array](), len(keys)
        if tenant.taken_bytes > tenant.cap_bytes:
            self._shrink(tenant, protect)
        for any_tenants, chunks in zip(classes, wanted, strict=True):
            row_class = self._classes.paid_by(any_tenants, tenant)
            self._make_room(row_class, len(chunks), protect)
            taken = row_class.free.take(len(chunks))
            self._classes.forget_empty(row_class)
            self._rows.enter(row_class, taken, keys[chunks[: len(taken)]], state, session)
            rows.append(taken)
            end = min([end, *chunks[len(taken) : len(taken) + 1].tolist()])
        return rows, end

    @property
    def unfinished(self) -> bool:
        """Whether ``reclaim``, or ``warm`` of the classes, has work left."""
        idle = self._sets.cleared and len(self._sets.idle_cleared())
        return bool(self._classes.unfinished or idle)

    def reclaim(self) -> None:
        """Give back cleared extent sets that nobody reads or writes, and memory of removed classes.

        One call gives back ``slice_slots`` slots, or one set, so that it does not take long.
        """
        self._classes.free_memory()
        if self._sets.cleared and len(sets := self._sets.idle_cleared()):
            upto = np.cumsum(self._sets.slots[sets])
            count = int(np.searchsorted(upto, self._slice_slots, side="right"))
            self._evict_sets(sets[: max(1, count)])

    def clear_sets(self, sets: I64Array) -> int:
        """Forget the readable rows of ``sets``, and give back the sets that are empty then. Returns
        how many rows lookups could find before."""
        matched = 0
        for owner in np.unique(self._sets.owner[sets]).tolist():
            rows = self._sets.rows_of(sets[self._sets.owner[sets] == owner])
            rows = rows[self._table.state[rows] >= READY]
            self._rows.forget(rows, "cleared")
            matched += len(rows)
        empty = sets[(self._sets.used[sets] == 0) & (self._sets.held[sets] == 0)]
        if len(empty):
            self._evict_sets(empty)
        return matched

    # ------------------------------------------------------------ room

    def _make_room(self, row_class: RowClass, count: int, protect: int) -> None:
        """Make ``count`` slots of a class free, or as many as the policy finds victims for."""
        self._policy.begin(self._rows.uses.now)
        search = row_class.order.search(protect)
        while (lacking := count - len(row_class.free)) > 0:
            if self._add_set(row_class):
                continue
            for victims in search.victims(lacking):
                if self._evict_some(row_class, lacking, victims, protect):
                    break
            else:
                return

    def _evict_some(
        self, row_class: RowClass, lacking: int, victims: Victims, protect: int
    ) -> bool:
        """Evict ``victims``, or sets that go before them. Returns whether anything was evicted."""
        if self._take_over(row_class, lacking, victims, protect):
            return True
        if len(victims.rows):
            self._evict(row_class, victims.rows, victims.cause, not row_class.within_cap)
        return len(victims.rows) > 0

    def _evict(self, row_class: RowClass, rows: I64Array, cause: Cause, own: bool = False) -> None:
        """Evict ``rows`` of a class; the oldest is first. With a ``full`` row the windows and
        states of its chunk are evicted too, because no hit reaches beyond a missing ``full``
        row. ``own``: as of ``Left``."""
        keys = self._table.keys_of(rows)
        self._rows.free(rows, cause, own)
        if not row_class.spec.layout.rules.whole:
            return
        for other in self._classes.of_namespace[row_class.namespace]:
            if not other.spec.layout.rules.whole:
                found = other.index.find(keys)
                found = found[found != ABSENT]
                orphans = found[self._table.evictable(found)]
                self._rows.free(orphans, cause, own, orphaned=True)

    def _add_set(self, row_class: RowClass) -> bool:
        """Add an extent set to a class, from free space. Returns whether there was room."""
        most = min(row_class.slots_per_set, row_class.within_cap)
        made = self._extents.add(row_class.spec.shard_bytes, most) if most else None
        if made is None:
            return False
        rows = slice(made.first_row, made.end_row)
        entered = self._table.grow(made.end_row) and self._table.enter_set(made.id, rows)
        if not (entered and self._classes.saving.put(saved_set(made, row_class.id))):
            self._table.set_of[rows] = NOBODY
            self._extents.remove(np.array([made.id]))
            return False
        self._sets.add(made, row_class.id, row_class.tenant.id)
        row_class.tenant.taken_bytes += sum(made.extent_bytes)
        row_class.free.give_new(np.arange(made.first_row, made.end_row))
        row_class.slots += made.slots
        return True

    def _take_over(self, asker: RowClass, lacking: int, victims: Victims, protect: int) -> bool:
        """Give back sets that go before ``victims``, until extent sets of ``lacking`` slots fit, or
        as many as possible. Returns whether any set was given back."""
        taken = self._extents.size - self._extents.free_bytes
        if victims.rank is None or asker.slots * asker.spec.row_bytes == taken:
            return False  # or all sets are its own
        ranks, rank = self._policy.ranks(victims.last), victims.rank
        if not asker.within_cap:
            own = self._shares.own(asker, ranks, rank)
            return self._give_up(own, lacking * asker.spec.row_bytes, ranks)
        every = self._shares.may_go(asker, ranks, rank, protect, not len(victims.rows))
        return any(self._give_way(asker, lacking, may_go, ranks) for may_go in every)

    def _give_way(self, asker: RowClass, lacking: int, may_go: Sets, ranks: I64Array) -> bool:
        """Give back sets of ``may_go``, those of the lowest rank first, until extent sets of
        ``lacking`` slots fit, or as many as possible. Returns whether any was given back."""
        if not may_go.any():
            return False
        value = np.where(may_go, ranks, STAYS)
        shard_bytes, slots = asker.spec.shard_bytes, asker.slots_per_set
        chosen = self._extents.cheapest(shard_bytes, slots, -(-lacking // slots), value)
        if not len(chosen):
            chosen = self._extents.cheapest(shard_bytes, 1, lacking, value)
        if len(chosen):
            self._evict_sets(chosen)
        return bool(len(chosen))

    def _give_up(self, may_go: Sets, size: int, ranks: I64Array) -> bool:
        """Give back sets of ``may_go``, those of the lowest rank first, of ``size`` bytes in all.
        Returns whether any was given back."""
        sets = np.flatnonzero(may_go)
        sets = sets[np.argsort(ranks[sets], kind="stable")]
        before = np.cumsum(self._sets.bytes[sets]) - self._sets.bytes[sets]
        chosen = sets[before < size]
        if len(chosen):
            self._evict_sets(chosen, own=True)
        return bool(len(chosen))

    def _shrink(self, tenant: Tenant, protect: int) -> None:
        """Give back one set of a tenant that has more than its cap, because the cap was lowered."""
        ranks = self._policy.ranks(last=True)
        may_go = (self._sets.owner >= 0) & (self._sets.tenant == tenant.id) & (ranks < protect)
        self._give_up(may_go, 1, ranks)

    def _evict_sets(self, sets: I64Array, own: bool = False) -> None:
        """Evict the rows of ``sets``, which nobody reads or writes, and give the sets back.
        ``own``: as for ``_evict``."""
        rows, owners = self._sets.rows_of(sets), self._sets.owner[sets]
        for owner in sorted(set(owners.tolist())):
            of_owner = self._sets.rows_of(sets[owners == owner])
            held = of_owner[self._table.state[of_owner] >= READY]
            if owner == CLEARED:
                self._rows.free(held)
            else:
                self._evict(self._classes.by_id[owner], held, "handed_over", own)
        assert (self._table.state[rows] == FREE).all(), "an extent set in use was given away"
        gone = np.zeros(len(self._table), np.bool_)
        gone[rows] = True
        for owner in sorted({*owners.tolist()} - {CLEARED}):
            row_class = self._classes.by_id[owner]
            row_class.slots -= int(self._sets.slots[sets[owners == owner]].sum())
            row_class.tenant.taken_bytes -= int(self._sets.bytes[sets[owners == owner]].sum())
            row_class.free.drop(gone)
            self._classes.forget_empty(row_class)
        self._sets.cleared -= int((owners == CLEARED).sum())
        self._table.set_of[rows] = NOBODY
        self._sets.owner[sets] = NOBODY
        self._classes.saving.remove("set", sets.tolist())
        self._extents.remove(sets)
