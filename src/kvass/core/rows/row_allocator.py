"""Room for new rows: it is made here, at allocation time, and nowhere else (law 6).

Where there is no free slot, a new extent set is taken from the arena's free space. If there is
none, rows are evicted: the class's own, or the extent sets of other classes, whichever were used
less recently. So no layout can starve another. With quotas (``tenants``) those go first whose
tenants have more than their share, and no extent set goes to another tenant whose owner has no more
than is reserved for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvass.core.clients.tenants import Tenant
from kvass.core.histogram import Histogram
from kvass.core.rows.extents import STAYS
from kvass.core.rows.index import ABSENT
from kvass.core.rows.row_classes import RowClass
from kvass.core.rows.row_states import RowStates
from kvass.core.rows.row_table import FREE, NOBODY, READY, WRITING
from kvass.core.rows.sets import CLEARED
from kvass.types import I64Array, U64Array


class RowAllocator:
    """Gives slots of the arena to new ``rows``. ``slice_slots``: of one ``reclaim``."""

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
        """WRITING (or LOADING) rows for the first chunks of ``wanted`` in each class, as many as
        room can be made for; and the first chunk that got none in some class, or ``len(keys)``.
        ``tenant`` pays for them.

        Nothing stamped at or after ``protect`` is evicted: the asker's own prefix. The keys that
        are wanted are distinct, and none is in its class's index.
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
        """Whether ``reclaim`` or ``warm`` has something to do now."""
        idle = self._sets.cleared and len(self._sets.idle_cleared())
        return bool(self._classes.unfinished or idle or self._classes.segments.cleared)

    def reclaim(self) -> None:
        """Give back cleared sets in which nobody reads or writes: ``slice_slots`` slots of them, or
        one set, so that it does not take long. And the memory of a few removed classes."""
        self._classes.free_memory()
        self._classes.segments.reclaim()
        if self._sets.cleared and len(sets := self._sets.idle_cleared()):
            upto = np.cumsum(self._sets.slots[sets])
            count = int(np.searchsorted(upto, self._slice_slots, side="right"))
            self._evict_sets(sets[: max(1, count)])

    # ------------------------------------------------------------ room

    def _make_room(self, row_class: RowClass, count: int, protect: int) -> None:
        while (lacking := count - len(row_class.free)) > 0:
            if self._add_set(row_class):
                continue
            victims = row_class.log.oldest(lacking, protect)
            oldest = int(self._table.stamp[victims[0]]) if len(victims) else protect
            if self._take_over(row_class, lacking, oldest, protect):
                continue
            if not len(victims):
                return
            self._evict(row_class, victims, "capacity")

    def _evict(self, row_class: RowClass, rows: I64Array, reason: str) -> None:
        """Free ``rows`` of a class, the oldest first. No hit gets past a missing ``full`` row, so
        its chunk's windows and states go with it."""
        self._count_evicted(row_class, rows, reason)
        keys = self._table.keys_of(rows)
        row_class.tenant.evicted_bytes += len(rows) * row_class.spec.row_bytes
        self._rows.free(rows)
        if row_class.spec.layout.kind != "full":
            return
        for other in self._classes.of_namespace[row_class.namespace]:
            if other.spec.layout.kind != "full":
                found = other.index.find(keys)
                found = found[found != ABSENT]
                orphans = found[self._table.evictable(found)]
                self._count_evicted(other, orphans, "orphaned")
                self._rows.free(orphans)

    def _count_evicted(self, row_class: RowClass, rows: I64Array, reason: str) -> None:
        """They are about as old as the first of them."""
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
        most = min(row_class.slots_per_set, row_class.within_cap)
        made = self._extents.add(row_class.spec.shard_bytes, most) if most else None
        if made is None:
            return False
        self._table.grow(made.end_row)
        self._sets.add(made, row_class.id, row_class.tenant.id)
        row_class.tenant.taken_bytes += sum(made.extent_bytes)
        self._table.set_of[made.first_row : made.end_row] = made.id
        self._table.slot[made.first_row : made.end_row] = np.arange(made.slots)
        row_class.free.give_new(np.arange(made.first_row, made.end_row))
        row_class.slots += made.slots
        return True

    def _take_over(self, asker: RowClass, lacking: int, oldest: int, protect: int) -> bool:
        """Give back cleared sets, and other classes' that were last used before stamp ``oldest``,
        so that sets of ``lacking`` slots fit, or as many as can be.

        ``oldest``: of the asker's own rows that may go, or ``protect`` if none may.
        """
        sets = self._sets
        if asker.slots * asker.spec.row_bytes == self._extents.size - self._extents.free_bytes:
            return False  # all sets are its own
        idle = sets.held == 0
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
        """Those of ``sets`` without which their tenants still have what is reserved for them."""
        for tenant in self._tenants.all.values():
            if tenant.reserved_bytes:
                theirs = np.flatnonzero(sets & (self._sets.tenant == tenant.id))
                theirs = theirs[np.argsort(self._sets.newest[theirs], kind="stable")]
                spare = tenant.taken_bytes - tenant.reserved_bytes
                sets[theirs[np.cumsum(self._sets.bytes[theirs]) > spare]] = False
        return sets

    def _give_way(self, asker: RowClass, lacking: int, may_go: npt.NDArray[np.bool_]) -> bool:
        """Give back sets that may go, those used longest ago, so that sets of ``lacking`` slots
        fit, or as many as can be."""
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
        """Give back sets that may go, those used longest ago, of ``size`` bytes in all."""
        sets = np.flatnonzero(may_go)
        sets = sets[np.argsort(self._sets.newest[sets], kind="stable")]
        before = np.cumsum(self._sets.bytes[sets]) - self._sets.bytes[sets]
        chosen = sets[before < size]
        if len(chosen):
            self._evict_sets(chosen)
        return bool(len(chosen))

    def _shrink(self, tenant: Tenant, protect: int) -> None:
        """A tenant with more than its cap, which was lowered, gives back one set."""
        may_go = (self._sets.owner >= 0) & (self._sets.held == 0) & (self._sets.newest < protect)
        self._give_up(may_go & (self._sets.tenant == tenant.id), 1)

    def _evict_sets(self, sets: I64Array) -> None:
        """Free the rows of ``sets``, which nobody reads or writes, and give the sets back."""
        rows, owners = self._sets.rows_of(sets), self._sets.owner[sets]
        for owner in sorted(set(owners.tolist())):
            of_owner = self._sets.rows_of(sets[owners == owner])
            held = of_owner[self._table.state[of_owner] >= READY]
            if owner == CLEARED:
                self._rows.free(held)
            else:
                self._evict(self._classes.by_id[owner], held, "handed_over")
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
        self._extents.remove(sets)
