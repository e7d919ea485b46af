"""The row table: one row per slot of the arena, in numpy columns, without an object per row.

Law of this file: a row's state changes only through ``RowTable.move``, along ``TRANSITIONS``.

A FREE row has no key, no pin and no stamp. The rows ``[set.first_row, set.first_row + set.slots)``
are the slots of an extent set.

The states are ordered: a lookup can hit rows in ``READY`` or above, and can wait for rows in
``LOADING``.

- FREE: holds nothing. It can be allocated.
- WRITING: ranks are writing it. Nobody may read it.
- QUARANTINED: its reservation was discarded, and ranks may still write to it. Nobody else may.
- FAILED: its tier could not fill it, and lookups that waited for it still pin it; or it was cleared
  with its tenant, and is still pinned. No lookup finds it. It is freed at its last unpin.
- LOADING: a tier is filling it.
- READY: all its shards are written. It may be read while it is pinned.
- TRANSIENT: READY, and freed at its last unpin. It was promoted and is not to be retained, or it is
  a tail whose blocks another row has too.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvass.types import I64Array, U64Array

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

KEY_WORDS: Final = 4
"""A key is a digest of up to 32 bytes, kept as this many uint64; all zero in a FREE row."""

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
    """

    def __init__(self) -> None:
        self._view(0)
        self.clock = 0
        """The next stamp. All rows that were used earlier have smaller ones."""

    def _view(self, size: int) -> None:
        lines = cache_lines(size)
        self._words: U64Array = lines.view(np.uint64)
        self._records = lines.view(_RECORD).reshape(size)
        self.key: U64Array = self._records["key"]
        self.stamp: I64Array = self._records["stamp"]
        self.pins: npt.NDArray[np.int32] = self._records["pins"]
        self.set_of: npt.NDArray[np.int32] = self._records["set_of"]
        self.slot: npt.NDArray[np.uint32] = self._records["slot"]
        self.state: npt.NDArray[np.uint8] = self._records["state"]
        self.offered: npt.NDArray[np.bool_] = self._records["offered"]
        """Whether a tier loaded the row, or it was queued for tiers. ``--flush on_evict`` queues a
        row once."""
        self.read: npt.NDArray[np.bool_] = self._records["read"]
        """Whether a lookup hit the row."""
        self.entry: npt.NDArray[np.uint8] = self._records["entry"]
        """The number of the block under which the row is in the index of blocks; or ``UNKNOWN`` or
        ``NOTED``."""
        self.loader: I64Array = self._records["loader"]
        """The operation that fills a LOADING row, or the reservation of a WRITING row."""
        self.set_of[:] = NOBODY
        self.stamp[:] = NEVER
        self.entry[:] = UNKNOWN

    def __len__(self) -> int:
        return len(self.state)

    def grow(self, to: int) -> None:
        """Make room for ``to`` rows. The table grows by a quarter at least."""
        old = self._records
        if to > len(old):
            self._view(max(to, len(old) + len(old) // 4))
            self._records[: len(old)] = old

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

    def move(self, rows: I64Array, before: int, after: int) -> None:
        """Change the state of ``rows``, all of which are in state ``before``, to ``after``."""
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

    def evictable(self, rows: I64Array) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` may be evicted: readable rows without a pin."""
        may: npt.NDArray[np.bool_] = (self.state[rows] >= READY) & (self.pins[rows] == 0)
        return may
