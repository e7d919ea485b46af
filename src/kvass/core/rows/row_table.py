"""The row table: one row id per slot of the arena, numpy columns, no object per row.

A row's state changes only through ``move``, along ``TRANSITIONS``. A FREE row has no key, no pin
and no stamp. Ids ``[set.first_row, set.first_row + set.slots)`` are the slots of an extent set.

States, in order (a lookup may have ``READY`` and above now, and ``LOADING`` soon):

- FREE: holds nothing; may be granted.
- WRITING: granted to writers; nobody may read it.
- QUARANTINED: its writers failed or were too late, and may still write: nobody may have it.
- FAILED: its tier could not fill it, and lookups that wait for it have not let it go yet. No lookup
  finds it. It is freed at its last unpin.
- LOADING: being filled from a tier.
- READY: every shard is written; it may be read while it is pinned.
- TRANSIENT: READY, and not to be retained: it was promoted, or it is a tail that another row made
  needless. It is freed at its last unpin.
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
    }
)

NEVER: Final = -1
"""The stamp of a row that holds nothing."""

KEY_WORDS: Final = 4
"""A key is a digest of up to 32 bytes, kept as this many uint64; all zero in a FREE row."""

UNKNOWN: Final = 255
"""``RowTable.entry`` of a row whose blocks are not known, or not in the index (any more)."""
NOTED: Final = 254
"""That of a row whose blocks are known, and which is not READY yet."""

NOBODY: Final = -1
"""The extent set of a row id that no set uses now."""


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
    """Zeroed memory of ``count`` cache lines that begins with one: uint8, shape ``(count, 64)``.

    From 4 MiB on numpy asks for huge pages, which spare a random access its page walk: so what is
    large asks for as much. What is not used of it is never touched.
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
        """The next stamp to be given: everything touched earlier has a smaller one."""

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
        """A tier gave what is in it, or was asked to take it: ``--flush on_evict`` asks once."""
        self.read: npt.NDArray[np.bool_] = self._records["read"]
        """A lookup was given it."""
        self.entry: npt.NDArray[np.uint8] = self._records["entry"]
        """The block under which a row is in the index of blocks; or ``UNKNOWN``, or ``NOTED``."""
        self.loader: I64Array = self._records["loader"]
        """Of a LOADING row: the operation that fills it; of a WRITING one: its reservation."""
        self.set_of[:] = NOBODY
        self.stamp[:] = NEVER
        self.entry[:] = UNKNOWN

    def __len__(self) -> int:
        return len(self.state)

    def grow(self, to: int) -> None:
        """Make room for row ids below ``to`` (amortised: by a quarter at least)."""
        old = self._records
        if to > len(old):
            self._view(max(to, len(old) + len(old) // 4))
            self._records[: len(old)] = old

    def keys_of(self, rows: I64Array) -> U64Array:
        """As ``key[rows]``, three times as fast: whole records are copied."""
        return self._words.take(rows, axis=0)[:, :KEY_WORDS]

    def stamp_rows(self, rows: I64Array) -> I64Array:
        """Stamp ``rows`` as used now, the first one oldest; returns the stamps given."""
        stamps = np.arange(self.clock, self.clock + len(rows), dtype=np.int64)
        self.clock += len(rows)
        self.stamp[rows] = stamps
        return stamps

    def move(self, rows: I64Array, before: int, after: int) -> None:
        """Move ``rows``, all of them in state ``before``, to state ``after``."""
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
        """Which of ``rows`` hold something that may be dropped now: readable and unpinned."""
        may: npt.NDArray[np.bool_] = (self.state[rows] >= READY) & (self.pins[rows] == 0)
        return may
