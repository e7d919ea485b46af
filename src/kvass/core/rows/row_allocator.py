"""The allocator of rows: it takes free slots, and evicts rows if there are none.

Law of this file: rows are evicted only here, and only when a new row needs the room (law 6). The
rows of cleared sets are not evicted, but forgotten.

A class without a free slot gets a new extent set from the arena's free space. If there is no free
space, rows are evicted: rows of the class itself, or whole extent sets of other classes, whichever
were used longer ago. So no layout can starve another. Rows of ended sessions go before other rows
of their class, and retained rows after them. With quotas (``tenants``) the sets of tenants that
have more than their share go first. A tenant that has no more than is reserved for it loses no set
to another tenant.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.clients.tenants import Tenant
from kvass.core.histogram import Histogram
from kvass.core.rows.extents import STAYS
from kvass.core.rows.index import ABSENT
from kvass.core.rows.row_classes import RowClass
from kvass.core.rows.row_states import RowStates
from kvass.core.rows.row_table import FREE, NOBODY, READY, WRITING
from kvass.core.rows.saving import saved_set
from kvass.core.rows.sets import CLEARED
from kvass.types import I64Array, U64Array

_MOST_LOOKS: Final = 16
"""How often one call looks for rows that are not retained any more: 5 ms of work."""


class RowAllocator:
    """The allocator of slots for new rows. ``slice_slots``: how many one ``reclaim`` frees."""

    def __init__(
        self,
        rows: RowStates,
        counters: dict[str, int],
        age_at_eviction: Histogram,
        slice_slots: int,
    ) -> None:
        self._rows, self._classes = rows, rows.classes
        self._table, self._sets = rows.table, rows.classes.sets
        self._extents, self._tenants = rows.classes.extents, rows.classes.tenants
        self._counters = counters
        self._age_at_eviction = age_at_eviction
        self._slice_slots = slice_slots

    def allocate(
        self,
        classes: list[RowClass],
        keys: U64Array,
        wanted: list[I64Array],
        protect: int,
        tenant: Tenant,
        state: int = WRITING,
    ) -> tuple[list[I64Array], int]:
        """Allocate rows in state ``state`` (WRITING or LOADING), which ``tenant`` pays for.

        ``wanted[i]``: the chunks that need a row of ``classes[i]``, as positions in ``keys``. Their
        keys are distinct and not in the index of the class. Rows that were used at or after stamp
        ``protect``, such as the prefix of the same request, are not evicted.

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
            self._rows.move(taken, FREE, state)
            self._table.key[taken] = keys[chunks[: len(taken)]]
            row_class.index.add(taken)
            rows.append(taken)
            end = min([end, *chunks[len(taken) : len(taken) + 1].tolist()])
        return rows, end

    @property
    def unfinished(self) -> bool:
        """Whether ``reclaim``, or ``warm`` of the classes, has work left."""
        idle = self._sets.cleared and len(self._sets.idle_cleared())
        return bool(self._classes.unfinished or idle or self._classes.segments.cleared)

    def reclaim(self) -> None:
        """Give back cleared extent sets that nobody reads or writes, and memory of removed classes.

        One call gives back ``slice_slots`` slots, or one set, so that it does not take long.
        """
        self._classes.free_memory()
        self._classes.segments.reclaim()
        if self._sets.cleared and len(sets := self._sets.idle_cleared()):
            upto = np.cumsum(self._sets.slots[sets])
            count = int(np.searchsorted(upto, self._slice_slots, side="right"))
            self._evict_sets(sets[: max(1, count)])

    def clear_sets(self, sets: I64Array) -> int:
        """Forget the readable rows of ``sets``, and give back the sets that are empty then. Returns
        how many rows lookups could find before."""
        matched = 0
        for owner in np.unique(self._sets.owner[sets]).tolist():
            row_class = self._classes.by_id[owner]
            rows = self._sets.rows_of(sets[self._sets.owner[sets] == owner])
            rows = rows[self._table.state[rows] >= READY]
            self._counters["bytes_evicted_cleared"] += len(rows) * row_class.spec.row_bytes
            self._note_left(row_class, self._table.keys_of(rows), "cleared")
            self._rows.forget(rows)
            matched += len(rows)
        empty = sets[(self._sets.used[sets] == 0) & (self._sets.held[sets] == 0)]
        if len(empty):
            self._evict_sets(empty)
        return matched

    # ------------------------------------------------------------ room

    def _make_room(self, row_class: RowClass, count: int, protect: int) -> None:
        """Make ``count`` slots of a class free, or as many as possible. Fewer, too, if among the
        retained rows there are many that may be none any more: the next call goes on."""
        self._classes.kept.sweep(self._rows.uses.now)
        looks = 0
        while (lacking := count - len(row_class.free)) > 0:
            if self._add_set(row_class):
                continue
            if len(ended := row_class.log.ended.oldest(lacking, protect)):
                self._evict(row_class, ended, "ended", not row_class.within_cap)
                continue
            victims = row_class.log.oldest(lacking, protect)
            if not len(victims) and row_class.log.unseen:
                if (looks := looks + 1) > _MOST_LOOKS:
                    return
                continue
            oldest = int(self._table.stamp[victims[0]]) if len(victims) else protect
            if self._take_over(row_class, lacking, oldest, protect):
                continue
            if not len(victims):
                if self._take_kept(row_class, lacking, protect):
                    continue
                return
            self._evict(row_class, victims, "capacity", not row_class.within_cap)

    def _take_kept(self, row_class: RowClass, lacking: int, protect: int) -> bool:
        """Evict retained rows, because nothing else can go. Returns whether any was evicted."""
        kept = row_class.log.passed.oldest(lacking, protect)
        if len(kept):
            self._evict(row_class, kept, "kept", not row_class.within_cap)
            return True
        return self._take_over(row_class, lacking, protect, protect, retained=True)

    def _evict(self, row_class: RowClass, rows: I64Array, reason: str, own: bool = False) -> None:
        """Evict ``rows`` of a class; the oldest is first. With a ``full`` row the windows and
        states of its chunk are evicted too, because no hit reaches beyond a missing ``full``
        row. ``own``: it makes room for rows of the same tenant, which may have no more."""
        self._count_evicted(row_class, rows, reason)
        keys = self._table.keys_of(rows)
        cause = "quota" if own else reason
        self._note_left(row_class, keys, cause)
        row_class.tenant.evicted_bytes += len(rows) * row_class.spec.row_bytes
        self._rows.free(rows)
        if not row_class.spec.layout.rules.whole:
            return
        for other in self._classes.of_namespace[row_class.namespace]:
            if not other.spec.layout.rules.whole:
                found = other.index.find(keys)
                found = found[found != ABSENT]
                orphans = found[self._table.evictable(found)]
                self._count_evicted(other, orphans, "orphaned")
                self._note_left(other, self._table.keys_of(orphans), cause)
                self._rows.free(orphans)

    def _note_left(self, row_class: RowClass, keys: U64Array, cause: str) -> None:
        """Record that rows of a class with these keys leave L1."""
        where = row_class.namespace, row_class.spec.group
        self._classes.left.note(*where, keys, cause, self._rows.uses.now)

    def _note_cleared(self, sets: I64Array) -> None:
        """Record that the rows of the cleared sets ``sets`` leave L1."""
        origins = self._sets.origin[sets]
        for origin in np.unique(origins).tolist():
            rows = self._sets.rows_of(sets[origins == origin])
            keys = self._table.keys_of(rows[self._table.state[rows] >= READY])
            self._classes.left.note_cleared(origin, keys, self._rows.uses.now)

    def _count_evicted(self, row_class: RowClass, rows: I64Array, reason: str) -> None:
        """Count an eviction. All rows count with the age of the first one, because their ages are
        about the same."""
        if not len(rows):
            return
        size = row_class.spec.row_bytes
        self._counters[f"evicted_{reason}"] += len(rows)
        self._counters[f"bytes_evicted_{reason}"] += len(rows) * size
        self._counters["unread_bytes_evicted"] += int((~self._table.read[rows]).sum()) * size
        self._age_at_eviction.observe(
            self._rows.uses.age(int(self._table.stamp[rows[0]])), len(rows)
        )

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

    def _take_over(
        self, asker: RowClass, lacking: int, oldest: int, protect: int, retained: bool = False
    ) -> bool:
        """Give back sets until extent sets of ``lacking`` slots fit, or as many as possible.

        Cleared sets may go, and sets of other classes that were last used before stamp ``oldest``.
        ``oldest``: the stamp of the oldest row that the class ``asker`` could evict itself, or
        ``protect`` if it has none. ``retained``: sets of which half the rows are retained may go,
        too. Returns whether any set was given back.
        """
        sets = self._sets
        if asker.slots * asker.spec.row_bytes == self._extents.size - self._extents.free_bytes:
            return False  # all sets are its own
        idle = sets.held == 0
        if not retained:
            idle &= 2 * sets.kept < np.maximum(sets.slots, 1)
        cleared, others = idle & (sets.owner == CLEARED), idle & (sets.owner >= 0)
        others &= sets.owner != asker.id
        if not self._tenants.divided:
            return self._give_way(asker, lacking, cleared | (others & (sets.newest < oldest)))
        tenant = asker.tenant
        own = others & (sets.tenant == tenant.id) & (sets.newest < oldest)
        if not asker.within_cap:
            return self._give_up(own, lacking * asker.spec.row_bytes)
        foreign = self._may_lose(others & (sets.tenant != tenant.id) & (sets.newest < protect))
        shares, taken = self._tenants.shares(tenant), self._tenants.taken()
        over = foreign & (taken > shares)[sets.tenant]
        wants = tenant.taken_bytes + asker.slots_per_set * asker.spec.row_bytes
        entitled = wants <= shares[tenant.id] or tenant.taken_bytes < tenant.reserved_bytes
        if not entitled:
            over = own | (over & (sets.newest < oldest))
        if self._give_way(asker, lacking, cleared | over):
            return True
        anybodys = own | (foreign & (sets.newest < oldest))
        return (entitled or oldest == protect) and self._give_way(asker, lacking, anybodys)

    def _may_lose(self, sets: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Those of ``sets`` that can go while their tenants keep what is reserved for them."""
        for tenant in self._tenants.all.values():
            if tenant.reserved_bytes:
                theirs = np.flatnonzero(sets & (self._sets.tenant == tenant.id))
                theirs = theirs[np.argsort(self._sets.newest[theirs], kind="stable")]
                spare = tenant.taken_bytes - tenant.reserved_bytes
                sets[theirs[np.cumsum(self._sets.bytes[theirs]) > spare]] = False
        return sets

    def _give_way(self, asker: RowClass, lacking: int, may_go: npt.NDArray[np.bool_]) -> bool:
        """Give back sets of ``may_go``, least recently used first, until extent sets of ``lacking``
        slots fit, or as many as possible. Returns whether any was given back."""
        if not may_go.any():
            return False
        value = np.where(may_go, self._sets.newest, STAYS)
        shard_bytes, slots = asker.spec.shard_bytes, asker.slots_per_set
        chosen = self._extents.cheapest(shard_bytes, slots, -(-lacking // slots), value)
        if not len(chosen):
            chosen = self._extents.cheapest(shard_bytes, 1, lacking, value)
        if len(chosen):
            self._evict_sets(chosen)
        return bool(len(chosen))

    def _give_up(self, may_go: npt.NDArray[np.bool_], size: int) -> bool:
        """Give back sets of ``may_go``, least recently used first, of ``size`` bytes in all.
        Returns whether any was given back."""
        sets = np.flatnonzero(may_go)
        sets = sets[np.argsort(self._sets.newest[sets], kind="stable")]
        before = np.cumsum(self._sets.bytes[sets]) - self._sets.bytes[sets]
        chosen = sets[before < size]
        if len(chosen):
            self._evict_sets(chosen, own=True)
        return bool(len(chosen))

    def _shrink(self, tenant: Tenant, protect: int) -> None:
        """Give back one set of a tenant that has more than its cap, because the cap was lowered."""
        may_go = (self._sets.owner >= 0) & (self._sets.held == 0) & (self._sets.newest < protect)
        self._give_up(may_go & (self._sets.tenant == tenant.id), 1)

    def _evict_sets(self, sets: I64Array, own: bool = False) -> None:
        """Evict the rows of ``sets``, which nobody reads or writes, and give the sets back.
        ``own``: as for ``_evict``."""
        rows, owners = self._sets.rows_of(sets), self._sets.owner[sets]
        for owner in sorted(set(owners.tolist())):
            of_owner = self._sets.rows_of(sets[owners == owner])
            held = of_owner[self._table.state[of_owner] >= READY]
            if owner == CLEARED:
                self._note_cleared(sets[owners == CLEARED])
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
