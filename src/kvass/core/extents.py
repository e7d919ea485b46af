"""Where extent sets lie in the arena, and which of them would have to go to make room.

Law of this file: extents never overlap, and lie in ``[0, size)``. It knows bytes and row ids, not
keys: whether a set may go, and what it is worth, it is told.

An extent set holds ``slots`` slots of one (namespace, group): one extent per distinct shard, each
``slots * shard_bytes[shard]`` long. Different layouts want extents of different lengths, so room
is a matter of contiguous windows: a set is handed over with its neighbours if need be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import count

import msgspec


class Spans:
    """Free space of a line of ``size`` units: first fit, neighbours coalesce."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)] if size else []

    def copy(self) -> Spans:
        other = Spans(0)
        other._free = list(self._free)
        return other

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(start, length) of every free span, in order."""
        return iter(self._free)

    @property
    def total(self) -> int:
        """Free units in all."""
        return sum(n for _, n in self._free)

    def take(self, n: int) -> int | None:
        """The start of ``n`` contiguous units, now taken; ``None`` if no span is long enough."""
        for i, (start, length) in enumerate(self._free):
            if length >= n:
                if length == n:
                    del self._free[i]
                else:
                    self._free[i] = (start + n, length - n)
                return start
        return None

    def give(self, start: int, n: int) -> None:
        """Return ``[start, start + n)``; it must be taken now."""
        i = bisect_left(self._free, (start, 0))
        assert i == len(self._free) or start + n <= self._free[i][0], "given back twice"
        assert i == 0 or sum(self._free[i - 1]) <= start, "given back twice"
        if i < len(self._free) and start + n == self._free[i][0]:
            n += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == start:
            i -= 1
            start, m = self._free.pop(i)
            n += m
        self._free.insert(i, (start, n))


class ExtentSet(msgspec.Struct, frozen=True):
    """``bases[r]``: where shard ``r``'s extent begins in the arena, in bytes."""

    id: int
    owner: int
    """The row class it belongs to."""
    slots: int
    first_row: int
    bases: tuple[int, ...]
    extent_bytes: tuple[int, ...]

    @property
    def end_row(self) -> int:
        return self.first_row + self.slots


class ExtentMap:
    """All extent sets of an arena of ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sets: dict[int, ExtentSet] = {}
        self._bytes = Spans(size)
        self._row_ids = Spans(1 << 48)

    @property
    def free_bytes(self) -> int:
        return self._bytes.total

    def add(self, owner: int, shard_bytes: tuple[int, ...], slots: int) -> ExtentSet | None:
        """A new set of ``slots`` slots, or of as many as fit (at least one), or ``None``."""
        slots = min(slots, self._bytes.total // sum(shard_bytes))
        while slots:
            needs = [slots * n for n in shard_bytes]
            trial = self._bytes.copy()
            bases = [trial.take(n) for n in needs]
            if None not in bases:
                return self._place(owner, slots, trial, bases, needs)
            slots //= 2
        return None

    def _place(
        self, owner: int, slots: int, taken: Spans, bases: list[int | None], needs: list[int]
    ) -> ExtentSet:
        self._bytes = taken
        first_row = self._row_ids.take(slots)
        assert first_row is not None, "row ids ran out"
        made = ExtentSet(
            id=next(i for i in count() if i not in self.sets),  # dense: they index arrays
            owner=owner,
            slots=slots,
            first_row=first_row,
            bases=tuple(b for b in bases if b is not None),
            extent_bytes=tuple(needs),
        )
        self.sets[made.id] = made
        return made

    def remove(self, gone: ExtentSet) -> None:
        """Give back all extents of a set whose rows are all FREE."""
        del self.sets[gone.id]
        self._row_ids.give(gone.first_row, gone.slots)
        for base, n in zip(gone.bases, gone.extent_bytes, strict=True):
            self._bytes.give(base, n)

    def cheapest(
        self, shard_bytes: tuple[int, ...], slots: int, value: Mapping[int, int]
    ) -> list[ExtentSet]:
        """The sets of least value whose removal lets ``add(shard_bytes, slots)`` succeed in full.

        ``value`` maps the ids of the sets that may go to what they are worth; a choice is as dear
        as its dearest set. Empty if nothing that may go makes enough room.
        """
        trial, chosen = self._bytes.copy(), list[ExtentSet]()
        while lacking := self._lacking(trial, [slots * n for n in shard_bytes]):
            window = self._window(trial, lacking, value, {s.id for s in chosen})
            if not window:
                return []
            for one in window:
                for base, n in zip(one.bases, one.extent_bytes, strict=True):
                    trial.give(base, n)
            chosen += window
        return chosen

    @staticmethod
    def _lacking(spans: Spans, needs: list[int]) -> int:
        """The first of ``needs`` that finds no place in ``spans``; 0 if all do."""
        trial = spans.copy()
        return next((n for n in needs if trial.take(n) is None), 0)

    def _window(
        self, free: Spans, need: int, value: Mapping[int, int], gone: set[int]
    ) -> list[ExtentSet]:
        """The cheapest run of neighbouring extents and holes of at least ``need`` bytes.

        Runs that need no set to go are passed over: the caller has used them up already.
        """
        spans: list[tuple[int, int, ExtentSet | None]] = [(a, n, None) for a, n in free]
        for one in self.sets.values():
            if one.id not in gone:
                spans += [(a, n, one) for a, n in zip(one.bases, one.extent_bytes, strict=True)]
        spans.sort(key=lambda s: s[0])
        best: tuple[int, int, list[ExtentSet]] | None = None
        for i in range(len(spans)):
            length, cost, members = 0, -2, dict[int, ExtentSet]()
            for _, n, owner in spans[i:]:
                if owner is not None:
                    if owner.id not in value:
                        break
                    cost = max(cost, value[owner.id])
                    members[owner.id] = owner
                length += n
                if length >= need:
                    if members and (best is None or (cost, len(members)) < best[:2]):
                        best = (cost, len(members), list(members.values()))
                    break
        return best[2] if best else []
