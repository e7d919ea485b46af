"""The places of extent sets in the arena, and the choice of sets to give back for a new one.

Law of this file: extents never overlap.

An extent set holds ``slots`` slots of one (namespace, group). It has one extent for each distinct
shard, which is ``slots * shard_bytes[shard]`` bytes long. Layouts need extents of different
lengths. So a new set may need the space of several neighbouring sets.

At 1 TiB there are 16,384 sets, so no Python loop runs over them. Extents and free spans are arrays
in the order of the arena.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from copy import copy
from typing import Final

import msgspec
import numpy as np

from kvass.types import I64Array

STAYS: Final = 1 << 62
"""The value of a set that must stay."""
_HOLE: Final = -STAYS
"""The value of free space."""
_NEW: Final = 256
"""How many new extents are collected before they are sorted in. One at a time takes longer."""
_NONE: Final[I64Array] = np.empty(0, np.int64)


class FreeSpace:
    """The free spans of ``size`` units, allocated first fit. Neighbours coalesce."""

    def __init__(self, size: int) -> None:
        self.starts: I64Array = np.array([0] if size else [], np.int64)
        self.lengths: I64Array = np.array([size] if size else [], np.int64)
        self.total = size
        """The number of free units."""

    def take(self, n: int) -> int | None:
        """Allocate ``n`` contiguous units; returns the first, or ``None`` if no span is long
        enough."""
        fits = self.lengths >= n
        i = int(fits.argmax()) if len(fits) else 0
        if not len(fits) or not fits[i]:
            return None
        start = int(self.starts[i])
        self.total -= n
        if self.lengths[i] == n:
            self.starts, self.lengths = np.delete(self.starts, i), np.delete(self.lengths, i)
        else:
            # A copy of this object shares the arrays.
            self.starts, self.lengths = self.starts.copy(), self.lengths.copy()
            self.starts[i] += n
            self.lengths[i] -= n
        return start

    def keep_out(self, starts: I64Array, lengths: I64Array) -> None:
        """Allocate all ``[start, start + length)`` of a space that is free."""
        assert len(self.starts) <= 1, "only a space that is free is divided"
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], (starts + lengths)[order]
        begins = np.concatenate([[0], ends])
        stops = np.concatenate([starts, [self.total]])
        assert (begins <= stops).all(), "two parts overlap"
        left = begins < stops
        self.starts, self.lengths = begins[left], (stops - begins)[left]
        self.total = int(self.lengths.sum())

    def give(self, starts: I64Array, lengths: I64Array) -> None:
        """Free all ``[start, start + length)``, which must be allocated."""
        starts = np.concatenate([self.starts, starts])
        order = np.argsort(starts, kind="stable")
        starts, lengths = starts[order], np.concatenate([self.lengths, lengths])[order]
        ends = starts + lengths
        assert (ends[:-1] <= starts[1:]).all(), "given back twice"
        first = np.flatnonzero(np.append(True, starts[1:] != ends[:-1]))
        last = np.append(first[1:], len(starts)) - 1
        self.starts, self.lengths = starts[first], ends[last] - starts[first]
        self.total = int(self.lengths.sum())


class ExtentSet(msgspec.Struct, frozen=True):
    """An extent set. ``bases[r]``: the first byte of the extent of shard ``r`` in the arena."""

    id: int
    slots: int
    first_row: int
    bases: tuple[int, ...]
    extent_bytes: tuple[int, ...]

    @property
    def end_row(self) -> int:
        return self.first_row + self.slots


class _Line(msgspec.Struct):
    """The whole arena in order: the extents and the free spans between them.

    ``set_of``: the set of an extent, -1 for a free span. ``cost``: the value of the set.
    """

    lengths: I64Array
    cost: I64Array
    set_of: I64Array

    def runs(self, limit: int) -> tuple[I64Array, I64Array, I64Array]:
        """The runs of neighbours whose cost is ``limit`` at most: first, end and bytes of each."""
        edges = np.diff(np.concatenate([[False], self.cost <= limit, [False]]).astype(np.int8))
        first, end = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        upto = np.concatenate([[0], np.cumsum(self.lengths)])
        return first, end, upto[end] - upto[first]


class ExtentMap:
    """All extent sets of an arena of ``size`` bytes. They have at most ``rows`` rows."""

    def __init__(self, size: int, rows: int = 1 << 48) -> None:
        self.size = size
        self.sets: dict[int, ExtentSet] = {}
        self._bytes = FreeSpace(size)
        self._row_ids = FreeSpace(rows)
        self._unused_ids: list[int] = []
        self._base, self._length, self._set = _NONE, _NONE, _NONE
        """The extents in the order of the arena, without those in ``_new``."""
        self._new: list[tuple[int, int, int]] = []

    @property
    def free_bytes(self) -> int:
        return self._bytes.total

    def add(self, shard_bytes: tuple[int, ...], slots: int) -> ExtentSet | None:
        """Add a set of ``slots`` slots, or of fewer if only these fit; ``None`` if not one slot
        fits."""
        slots = min(slots, self._bytes.total // sum(shard_bytes))
        while slots:
            needs = [slots * n for n in shard_bytes]
            trial = copy(self._bytes)
            bases = [base for n in needs if (base := trial.take(n)) is not None]
            if len(bases) == len(needs):
                break
            slots //= 2
        else:
            return None
        first_row = self._row_ids.take(slots)
        if first_row is None:
            return None
        self._bytes = trial
        made = ExtentSet(  # ids are dense: they index arrays
            id=heapq.heappop(self._unused_ids) if self._unused_ids else len(self.sets),
            slots=slots,
            first_row=first_row,
            bases=tuple(bases),
            extent_bytes=tuple(needs),
        )
        self.sets[made.id] = made
        self._new += [(base, n, made.id) for base, n in zip(made.bases, needs, strict=True)]
        if len(self._new) > _NEW:
            self._put_in()
        return made

    def adopt(self, sets: list[ExtentSet]) -> None:
        """Begin with ``sets``, of a former life. They do not overlap."""
        self.sets = {each.id: each for each in sets}
        self._unused_ids = sorted({*range(max(self.sets, default=-1) + 1)} - self.sets.keys())
        rows = np.array([(s.first_row, s.slots) for s in sets], np.int64).reshape(-1, 2)
        self._row_ids.keep_out(rows[:, 0], rows[:, 1])
        self._new = [
            (base, n, s.id) for s in sets for base, n in zip(s.bases, s.extent_bytes, strict=True)
        ]
        extents = np.array(self._new, np.int64).reshape(-1, 3)
        self._bytes.keep_out(extents[:, 0], extents[:, 1])

    def remove(self, gone: I64Array) -> None:
        """Give back sets by their ids. All their rows are FREE."""
        sets = [self.sets.pop(i) for i in gone.tolist()]
        for i in gone.tolist():
            heapq.heappush(self._unused_ids, i)
        rows = np.array([(s.first_row, s.slots) for s in sets], np.int64).reshape(-1, 2)
        self._row_ids.give(rows[:, 0], rows[:, 1])
        self._put_in()
        marked = np.zeros(1 + int(self._set.max()), np.bool_)
        marked[gone] = True
        leaves = marked[self._set]
        self._bytes.give(self._base[leaves], self._length[leaves])
        self._base, self._length = self._base[~leaves], self._length[~leaves]
        self._set = self._set[~leaves]

    def _put_in(self) -> None:
        if self._new:
            new = np.array(self._new, np.int64)
            self._new.clear()
            base = np.concatenate([self._base, new[:, 0]])
            order = np.argsort(base, kind="stable")
            self._base = base[order]
            self._length = np.concatenate([self._length, new[:, 1]])[order]
            self._set = np.concatenate([self._set, new[:, 2]])[order]

    # ------------------------------------------------------------ making room

    def cheapest(
        self, shard_bytes: tuple[int, ...], slots: int, count: int, value: I64Array
    ) -> I64Array:
        """The cheapest sets whose removal makes room for ``count`` sets of ``slots`` slots.

        Returns their ids. If ``count`` sets do not fit, their removal makes room for as many as
        fit. The result is empty if not one fits. ``value[i]``: the value of set ``i``, ``STAYS`` if
        it must stay. A choice costs as much as the most valuable set in it.
        """
        needs = [slots * n for n in shard_bytes]
        line = self._line(value)
        limits = np.sort(line.cost[(line.cost > _HOLE) & (line.cost < STAYS)])
        room = _fill(line.runs(int(limits[-1]))[2], needs, count)[1] if len(limits) else 0
        if not room:
            return self.cheapest(shard_bytes, slots, 1, value) if count > 1 else _NONE
        at = bisect_left(
            limits, room, key=lambda limit: _fill(line.runs(int(limit))[2], needs, room)[1]
        )
        first, end, size = line.runs(int(limits[at]))
        used, _ = _fill(size, needs, room)
        chosen = np.zeros(len(value), np.bool_)
        for i in np.flatnonzero(used).tolist():
            chosen[_leaving(line, int(first[i]), int(end[i]), int(used[i]), needs)] = True
        return np.flatnonzero(chosen)

    def _line(self, value: I64Array) -> _Line:
        self._put_in()
        holes = self._bytes
        base = np.concatenate([self._base, holes.starts])
        order = np.argsort(base, kind="stable")
        nothing = np.full(len(holes.starts), _HOLE, np.int64)
        return _Line(
            lengths=np.concatenate([self._length, holes.lengths])[order],
            cost=np.concatenate([value[self._set], nothing])[order],
            set_of=np.concatenate([self._set, np.full(len(nothing), -1, np.int64)])[order],
        )


def _fill(runs: I64Array, needs: list[int], count: int) -> tuple[I64Array, int]:
    """How many bytes of each run ``count`` new sets would use, and for how many there is room.

    ``needs``: the bytes of each extent of a set. The result is exact for one set, and if all needs
    are equal. Otherwise each need counts as the largest.
    """
    if count == 1:
        return _first_fit(runs, needs)
    each = runs // max(needs)
    room = min(count, int(each.sum()) // len(needs))
    upto = np.minimum(np.cumsum(each), room * len(needs))
    return np.diff(upto, prepend=0) * max(needs), room


def _first_fit(runs: I64Array, needs: list[int]) -> tuple[I64Array, int]:
    left = runs.copy()
    for need in needs:
        fits = left >= need
        if not fits.any():
            return left, 0
        left[fits.argmax()] -= need
    return runs - left, 1


def _leaving(line: _Line, first: int, end: int, used: int, needs: list[int]) -> I64Array:
    """The sets of a run that must go so that ``used`` contiguous bytes become free.

    For one extent it chooses the place with the fewest sets, else the beginning of the run."""
    upto = np.concatenate([[0], np.cumsum(line.lengths[first:end])])
    stop = np.searchsorted(upto, upto + used)
    starts = np.flatnonzero(stop < len(upto)) if used in needs else np.zeros(1, np.int64)
    extents = np.concatenate([[0], np.cumsum(line.set_of[first:end] >= 0)])
    best = int(starts[(extents[stop[starts]] - extents[starts]).argmin()])
    chosen = line.set_of[first + best : first + int(stop[best])]
    going: I64Array = chosen[chosen >= 0]
    return going
