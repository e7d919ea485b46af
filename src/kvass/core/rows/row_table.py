"""The row table: one row per slot of the arena, in numpy columns, without an object per row.

Law of this file: a row's state changes only through ``RowTable.move``, along ``TRANSITIONS``. Where
the table outlives the daemon, only a READY row has a seal (law 13).

A FREE row has no key, no pin and no stamp. The rows ``[set.first_row, set.first_row + set.slots)``
are the slots of an extent set.

The states are ordered: a lookup can hit rows in ``READY`` or above, and can wait for rows in
``LOADING``.

- FREE: holds nothing. It can be allocated.
- WRITING: ranks are writing it. Nobody may read it.
- QUARANTINED: its reservation was discarded, and ranks may still write to it. Nobody else may.
- FAILED: its tier could not fill it, and lookups that waited for it still pin it; it was cleared
  with its tenant, and is still pinned; or a former life had lent it, and it was not adopted. No
  lookup finds it. It is freed at its last unpin.
- LOADING: a tier is filling it.
- READY: all its shards are written. It may be read while it is pinned.
- TRANSIENT: READY, and freed at its last unpin. It was promoted and is not to stay, or it is
  a tail whose blocks another row has too.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvass.core.saved.index_file import SavedIndex
from kvass.core.saved.seals import seals
from kvass.types import KEY_WORDS, I64Array, U64Array

FREE: Final = 0
WRITING: Final = 1
QUARANTINED: Final = 2
FAILED: Final = 3
LOADING: Final = 4
READY: Final = 5
TRANSIENT: Final = 6

STATE_NAMES: Final = ("free", "writing", "quarantined", "failed", "loading", "ready", "transient")

TRANSITIONS: Final = frozenset(
    {
        (FREE, WRITING),
        (WRITING, READY),
        (WRITING, QUARANTINED),
        (QUARANTINED, FREE),
        (FREE, LOADING),
        (LOADING, READY),
        (LOADING, TRANSIENT),
        (LOADING, FAILED),
        (LOADING, FREE),
        (FAILED, FREE),
        (READY, FREE),
        (READY, TRANSIENT),
        (TRANSIENT, FREE),
        (READY, FAILED),
        (TRANSIENT, FAILED),
    }
)

NEVER: Final = -1
"""The stamp of a row that holds nothing."""

UNKNOWN: Final = 255
"""``RowTable.entry`` of a row whose blocks are not known, or which left the index of blocks."""
NOTED: Final = 254
"""``RowTable.entry`` of a row that enters the index of blocks when it becomes READY."""

NOBODY: Final = -1
"""The extent set of a row that no set uses now."""


CACHE_LINE: Final = 64

_RECORD: Final = np.dtype(
    [
        ("key", np.uint64, KEY_WORDS),
        ("stamp", np.int64),
        ("loader", np.int64),
        ("pins", np.int32),
        ("set_of", np.int32),
        ("slot", "<u4"),
        ("state", np.uint8),
        ("offered", np.bool_),
        ("read", np.bool_),
        ("entry", np.uint8),
    ]
)
assert _RECORD.itemsize == CACHE_LINE
_SET_OF: Final = 13
"""Where ``set_of`` is in a record, in units of 4 bytes."""
assert _RECORD.fields is not None
assert _RECORD.fields["set_of"][1] == 4 * _SET_OF


def cache_lines(count: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory that is aligned to cache lines: uint8, shape ``(count, 64)``.

    From 4 MiB on numpy asks for huge pages, with which random accesses need fewer page walks. So a
    table above 1 MiB allocates at least 4 MiB. The unused part is never touched.
    """
    size = (count + 1) * CACHE_LINE
    raw = np.zeros(max(size, 4 << 20) if size > 1 << 20 else size, np.uint8)
    skip = -raw.ctypes.data % CACHE_LINE
    return raw[skip : skip + count * CACHE_LINE].reshape(count, CACHE_LINE)


class ClassRows(msgspec.Struct, frozen=True):
    """Rows of one row class, in chunk order."""

    row_class: int
    rows: I64Array


class RowTable:
    """Columns over row ids ``0..len(table)``; grows, never shrinks.

    The columns are views of one array of records, a cache line each: a lookup goes to rows at
    random, and its time is the number of lines it fetches.

    ``saved``: the memory in which the records outlive the daemon, or ``None``.
    """

    def __init__(self, saved: SavedIndex | None = None) -> None:
        self._saved = saved
        self._serials: U64Array = np.zeros(0, np.uint64)
        self._view(cache_lines(0))
        self.clock = 0
        """The next stamp. All rows that were used earlier have smaller ones."""

    def _view(self, lines: npt.NDArray[np.uint8]) -> None:
        size = len(lines)
        self._words: U64Array = lines.view(np.uint64)
        self._records = lines.view(_RECORD).reshape(size)
        self.key: U64Array = self._records["key"]
        self.stamp: I64Array = self._records["stamp"]
        self.pins: npt.NDArray[np.int32] = self._records["pins"]
        self.set_of: npt.NDArray[np.int32] = self._records["set_of"]
        self.slot: npt.NDArray[np.uint32] = self._records["slot"]
        self.state: npt.NDArray[np.uint8] = self._records["state"]
        self.offered: npt.NDArray[np.bool_] = self._records["offered"]
        """Whether a tier loaded the row, or it was queued for tiers, or it is a tail, which no tier
        gets. ``--flush on_evict`` queues a row once."""
        self.read: npt.NDArray[np.bool_] = self._records["read"]
        """Whether a lookup hit the row."""
        self.entry: npt.NDArray[np.uint8] = self._records["entry"]
        """The number of the block under which the row is in the index of blocks; or ``UNKNOWN`` or
        ``NOTED``."""
        self.loader: I64Array = self._records["loader"]
        """The operation that fills a LOADING row, or the reservation of a WRITING row. In a table
        that outlives the daemon, the seal of a READY row."""

    def __len__(self) -> int:
        return len(self.state)

    def grow(self, to: int) -> bool:
        """Make room for ``to`` rows. The table grows by a quarter at least, if there is memory.
        False: there is none."""
        old = len(self)
        if to <= old:
            return True
        wanted = max(to, old + old // 4)
        if self._saved is None:
            lines = cache_lines(wanted)
            lines[:old] = self._words.view(np.uint8)
        else:
            wanted = wanted if self._saved.has_rows(wanted) else to
            if not self._saved.has_rows(to):
                return False
            lines = self._saved.records[: wanted * CACHE_LINE].reshape(wanted, CACHE_LINE)
        self._view(lines)
        self.blank(slice(old, None))
        return True

    def adopt(self, rows: int, sets: int) -> None:
        """Begin with the first ``rows`` records, and the serials of the first ``sets`` sets, as a
        former life has left them."""
        assert self._saved is not None, "there is nothing to adopt"
        serials = self._saved.serials(sets)
        there = self._saved.has_rows(rows)
        assert serials is not None, "memory that was there is gone"
        assert there, "memory that was there is gone"
        self._serials = serials
        self._view(self._saved.records[: rows * CACHE_LINE].reshape(rows, CACHE_LINE))

    def enter_set(self, number: int, rows: slice) -> bool:
        """Give ``rows`` to the extent set ``number``, in order. False: there is no memory."""
        if self._saved is not None:
            serials = self._saved.serials(number + 1)
            if serials is None:
                return False
            self._serials = serials
            self._saved.new_serial(np.array([number]))
        self.set_of[rows] = number
        self.slot[rows] = np.arange(rows.stop - rows.start)
        return True

    def void(self, sets: I64Array) -> None:
        """Void the seals of all rows of ``sets``. What becomes READY later is sealed again."""
        if self._saved is not None and len(sets):
            self._saved.new_serial(sets)

    def blank(self, rows: slice | I64Array) -> None:
        """Make ``rows`` FREE rows of no set, whatever their records have."""
        self._words[rows] = 0
        self.set_of[rows], self.stamp[rows], self.entry[rows] = NOBODY, NEVER, UNKNOWN

    def keys_of(self, rows: I64Array) -> U64Array:
        """The keys of ``rows``. It is three times as fast as ``key[rows]``, because it copies whole
        records."""
        return self._words.take(rows, axis=0)[:, :KEY_WORDS]

    def stamp_rows(self, rows: I64Array) -> I64Array:
        """Stamp ``rows`` as used now, in ascending order; returns their stamps."""
        stamps = np.arange(self.clock, self.clock + len(rows), dtype=np.int64)
        self.clock += len(rows)
        self.stamp[rows] = stamps
        return stamps

    def move(
        self,
        rows: I64Array,
        before: int,
        after: int,
        tails: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Change the state of ``rows``, all of which are in state ``before``, to ``after``.

        ``tails``: which of them are tails; ``None``: none is. A tail gets no seal, because how much
        of it is written is not in its record.
        """
        assert (before, after) in TRANSITIONS, (STATE_NAMES[before], STATE_NAMES[after])
        assert (self.state[rows] == before).all(), "a row was not in the state its owner thought"
        if after == FREE:
            assert not self.pins[rows].any(), "a pinned row was freed"
            self.stamp[rows] = NEVER
            self.offered[rows] = False
            self.read[rows] = False
            self.key[rows] = 0
            self.entry[rows] = UNKNOWN
        self.state[rows] = after
        if after == READY and self._saved is not None:
            whole = rows if tails is None else rows[~tails]
            self.loader[whole] = self.seals_of(whole)

    def seals_of(self, rows: I64Array) -> I64Array:
        """The seals that ``rows`` have if they are complete."""
        lines = self._words.take(rows, axis=0)
        sets = lines.view(np.int32)[:, _SET_OF]
        return seals(lines[:, :KEY_WORDS], rows, self._serials[sets])

    def evictable(self, rows: I64Array) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` may be evicted: readable rows without a pin."""
        may: npt.NDArray[np.bool_] = (self.state[rows] >= READY) & (self.pins[rows] == 0)
        return may
