"""A vectorised hash table from keys to rows, which looks up many keys in one call.

A key's home bucket and fingerprint follow from all its bytes by multiplication (Knuth, TAOCP vol.
3, 6.4) with odd numbers that are drawn from a secret seed. So no client can make keys collide. A
bucket is a cache line of ``SLOTS`` entries. An entry has a row (low half) and the fingerprint of
its key. ``find`` compares whole keys, which are in the row table. A full bucket *spills* into the
next bucket and counts the spilled entries. So removal needs no tombstones: a search continues to
the next bucket while the count is above 0.

A lookup takes half the time that ``dict[bytes, int]`` takes, and a row less than half the memory.
"""

from __future__ import annotations

import hashlib
import mmap
from contextlib import suppress
from copy import copy
from typing import Final, Protocol

import numpy as np
import numpy.ma  # np.unique would import it when first called, which takes 20 ms
import numpy.typing as npt

from kvass.core.rows.row_table import CACHE_LINE, cache_lines
from kvass.types import KEY_WORDS, I64Array, U32Array, U64Array

SLOTS: Final = 8  # a cache line; _in_bucket shifts by 3
ABSENT: Final = -1
"""What ``find`` returns for a key that has no row."""

WARMED: Final = (512 << 10) // CACHE_LINE
"""How many buckets one ``warm`` touches: 128 pages. A smaller index needs no ``warm``."""
MOVED: Final = 64
"""How many buckets each ``add`` moves while the index grows, besides half a bucket per added row.
Growing doubles the room, so all buckets have moved before the index is full again."""
PART: Final = 1 << 15
"""How many rows ``fill`` looks at in one call of numpy: with more, its arrays leave the caches."""
_PAGE_BUCKETS: Final = 4096 // CACHE_LINE

_EMPTY: Final = 0
_HALF: Final = np.uint64(32)
_LOW: Final = np.uint64(0xFFFF_FFFF)
_ONE: Final = np.uint64(1)
_SMALLEST: Final = 64
FILL: Final = 0.4
_NOTHING: Final[U32Array] = np.zeros((0, SLOTS), np.uint32)
"""The buckets of an index that was never used. They take no memory."""


class Keyed(Protocol):
    def keys_of(self, rows: I64Array) -> U64Array: ...


class KeyIndex:
    """An index over rows of ``table``. Arrays of keys are uint64, shape ``(n, words)``.

    ``odd``: as many ``odd_numbers`` of the seed as a key has words. ``rows``: how many rows there
    is room for at the first use. When the index is full it allocates more buckets, and each ``add``
    moves some rows into them, because moving a million rows takes 0.8 s. The first touch of memory
    takes long too, so ``warm`` does it in parts. ``fill``: the largest part of the entries that may
    be used. With a smaller ``fill`` fewer buckets spill; a larger one takes less memory.
    """

    def __init__(self, table: Keyed, odd: U64Array, rows: int = 0, fill: float = FILL) -> None:
        self._table, self._odd, self._fill = table, odd, fill
        self._least = max(_SMALLEST, self._buckets(rows))
        self._count = 0
        self._old: KeyIndex | None = None
        """While the index grows: the old buckets, with the rows that were not moved yet."""
        self._moved = 0
        """How many old buckets were moved."""
        self._mask, self._mark, self._row = 0, _NOTHING, _NOTHING
        self._cold = 0 if self._least > WARMED else self._least
        """The first bucket that ``warm`` has not touched."""

    def __len__(self) -> int:
        return self._count + (0 if self._old is None else len(self._old))

    @property
    def room(self) -> int:
        """How many rows there is room for at the first use."""
        return int(self._least * SLOTS * self._fill)

    def rows(self) -> I64Array:
        """All indexed rows."""
        rows: I64Array = self._row[self._mark != _EMPTY].astype(np.int64)
        return rows if self._old is None else np.concatenate([rows, self._old.rows()])

    @property
    def cold(self) -> bool:
        """Whether ``warm`` has buckets left to touch."""
        return self._cold < max(self._least, len(self._mark))

    def warm(self) -> None:
        """Touch the next ``WARMED`` buckets, so that no step has page faults for all buckets."""
        if not len(self._mark):
            self._make(self._least)
        begin, self._cold = self._cold, self._cold + WARMED
        self._entry[begin : self._cold : _PAGE_BUCKETS, 0] |= np.uint64(0)
        if not self.cold:
            advise(self._memory, mmap.MADV_HUGEPAGE)

    def find(self, keys: U64Array) -> I64Array:
        rows = self._find(keys)
        if self._old is not None:
            absent = rows == ABSENT
            rows[absent] = self._old.find(keys[absent])
        return rows

    def _find(self, keys: U64Array) -> I64Array:
        if not self._count or not len(keys):
            return _absent(len(keys))
        bucket, mark = self._place(keys)
        rows = self._in_bucket(bucket, mark)
        known = (rows != ABSENT).nonzero()[0]
        if len(known) == len(rows) and (self._table.keys_of(rows) == keys).all():
            return rows  # the usual hit, every key in its home bucket
        elsewhere = (rows == ABSENT) & (self._spilled[bucket] > 0)
        if len(known):
            twins = known[(self._table.keys_of(rows[known]) != keys[known]).any(axis=1)]
            rows[twins], elsewhere[twins] = ABSENT, True
        for i in elsewhere.nonzero()[0].tolist():
            rows[i] = self._search(keys[i], int(bucket[i]), int(mark[i]))
        return rows

    def fill(self, rows: I64Array) -> None:
        """As ``add``, of very many rows. An index without rows takes a third of the time, because
        its buckets are written in order and nobody looks for free entries."""
        self._expect(len(rows))
        parts = [rows[at : at + PART] for at in range(0, len(rows), PART)]
        if len(self):
            for part in parts:
                self.add(part)
            return
        places = [self._place(self._table.keys_of(part)) for part in parts]
        buckets = np.concatenate([_absent(0), *(bucket for bucket, _ in places)])
        entries = np.concatenate([np.empty(0, np.uint64), *(mark for _, mark in places)])
        entries <<= _HALF
        entries |= rows.view(np.uint64)
        order = buckets.argsort()
        buckets, entries = buckets[order], entries[order]
        spilled, begin = [order[:0]], 0
        while begin < len(rows):
            last = buckets[min(begin + PART, len(rows)) - 1]
            some = slice(begin, int(buckets.searchsorted(last, "right")))  # whole buckets
            spilled.append(order[some][self._fill_empty(buckets[some], entries[some])])
            begin = some.stop
        self._insert(rows[np.concatenate(spilled)])

    def _fill_empty(self, bucket: I64Array, entry: U64Array) -> npt.NDArray[np.bool_]:
        """Write entries into empty buckets; ``bucket`` is ascending. Returns which did not fit."""
        nth = np.arange(len(bucket)) - bucket.searchsorted(bucket)
        fits = nth < SLOTS
        self._entry[bucket[fits], nth[fits]] = entry[fits]
        self._count += int(fits.sum())
        return ~fits

    def _expect(self, more: int) -> None:
        """Make room for ``more`` rows at once."""
        if len(self) + more > self._fill * self._mark.size:
            self._grow(more)

    def add(self, rows: I64Array) -> None:
        """Index ``rows`` under their keys in the table. The keys are distinct and not in the
        index."""
        self._expect(len(rows))
        self._insert(rows)
        if self._old is not None:
            self._move(MOVED + len(rows) // 2)

    def remove(self, rows: I64Array) -> None:
        keys = self._table.keys_of(rows)
        if self._old is not None:
            there = self._old.find(keys) == rows
            self._old.remove(rows[there])
            rows, keys = rows[~there], keys[~there]
        self._count -= len(rows)
        bucket, mark = self._place(keys)
        while len(rows):
            alike = (self._mark[bucket] == mark[:, None]) & (self._row[bucket] == rows[:, None])
            here, slot = alike.nonzero()
            self._mark[bucket[here], slot] = _EMPTY
            if len(here) == len(rows):
                return
            left = _others(here, len(rows))
            assert (self._spilled[bucket[left]] > 0).all(), "a row is not where its key belongs"
            np.subtract.at(self._spilled, bucket[left], 1)
            rows, bucket, mark = rows[left], (bucket[left] + 1) & self._mask, mark[left]

    # ------------------------------------------------------------ growing

    def _grow(self, more: int) -> None:
        """Make room for ``more`` rows. The rows of the old buckets are moved later, in order, so
        that memory is touched page by page."""
        if self._old is not None:
            self._move(len(self._old._mark))
        buckets = self._buckets(len(self) + more)
        if len(self):
            self._old, self._moved = copy(self), 0
        self._make(buckets)

    def _move(self, buckets: int) -> None:
        """Move the rows of the next ``buckets`` old buckets. Their spill counts stay, so a search
        in the old buckets may look further than it must."""
        old, begin = self._old, self._moved
        assert old is not None, "no rows to move"
        self._moved += buckets
        marks = old._mark[begin : self._moved]
        rows = old._row[begin : self._moved][marks != _EMPTY].astype(np.int64)
        marks[:] = _EMPTY
        old._count -= len(rows)
        self._insert(rows)
        if self._moved >= len(old._mark):
            assert not old._count, "a row was left behind"
            self._old = None

    # ------------------------------------------------------------ buckets

    def _buckets(self, rows: int) -> int:
        """The number of buckets, a power of two, that have room for ``rows`` rows."""
        least = int(rows / (self._fill * SLOTS)) + 1
        return 1 << (least - 1).bit_length()

    def _make(self, buckets: int) -> None:
        size = max(self._least, buckets)
        self._mask = size - 1
        self._cold = 0 if size > WARMED else size
        lines = cache_lines(size) if self._cold else self._pages(size)
        entries = lines.view(np.uint32).reshape(size, SLOTS, 2)
        self._entry: U64Array = entries.view(np.uint64).reshape(size, SLOTS)
        self._mark = entries[:, :, 1]
        self._row = entries[:, :, 0]
        self._spilled: npt.NDArray[np.int32] = np.zeros(size, np.int32)
        self._count = 0

    def _pages(self, buckets: int) -> npt.NDArray[np.uint8]:
        """Zeroed memory of ``buckets`` buckets, in small pages until it is warm.

        With huge pages a lookup needs fewer page walks. But in a virtual machine the first touch of
        a huge page can take 8 ms and more. So ``warm`` asks for them when all pages were touched.
        """
        self._memory = mmap.mmap(-1, buckets * CACHE_LINE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise(self._memory, mmap.MADV_NOHUGEPAGE)
        return np.frombuffer(self._memory, np.uint8).reshape(buckets, CACHE_LINE)

    def _place(self, keys: U64Array) -> tuple[I64Array, U64Array]:
        """The home bucket and the fingerprint of each key. No fingerprint is ``_EMPTY``."""
        mixed = keys.dot(self._odd)
        mixed = (mixed ^ (mixed >> _HALF)) * self._odd[0]
        return (mixed >> _HALF).view(np.int64) & self._mask, (mixed & _LOW) | _ONE

    def _in_bucket(self, bucket: I64Array, mark: U64Array) -> I64Array:
        """For each bucket, the row of its first entry with the fingerprint ``mark``, or
        ``ABSENT``."""
        entries = self._entry.take(bucket, axis=0)
        at: I64Array = ((entries >> _HALF) == mark[:, None]).reshape(-1).nonzero()[0]
        if len(at) == len(bucket) and ((at >> 3) == np.arange(len(at))).all():  # one in each bucket
            return (entries.reshape(-1).take(at) & _LOW).view(np.int64)
        rows = _absent(len(bucket))
        at = at[::-1]  # if a bucket has several, the first is written last
        rows[at >> 3] = entries.reshape(-1).take(at) & _LOW
        return rows

    def _search(self, key: U64Array, at: int, mark: int) -> int:
        """The row of one key, or ``ABSENT``. It looks into every bucket that may have the key."""
        while True:
            for slot in (self._mark[at] == mark).nonzero()[0].tolist():
                row = int(self._row[at, slot])
                if (self._table.keys_of(np.array([row])) == key).all():
                    return row
            if not self._spilled[at]:
                return ABSENT
            at = (at + 1) & self._mask

    def _insert(self, rows: I64Array) -> None:
        """Insert rows. Each round fills the free entries of each bucket, and the rows that are left
        spill into the next bucket."""
        self._count += len(rows)
        bucket, mark = self._place(self._table.keys_of(rows))
        while len(rows):
            order = bucket.argsort(kind="stable")
            rows, bucket, mark = rows[order], bucket[order], mark[order]
            nth = np.arange(len(rows)) - bucket.searchsorted(bucket)
            free = self._mark[bucket] == _EMPTY
            rank = free.cumsum(axis=1)
            fits, slot = (free & (rank == nth[:, None] + 1)).nonzero()
            self._mark[bucket[fits], slot] = mark[fits]
            self._row[bucket[fits], slot] = rows[fits]
            if len(fits) == len(rows):
                return
            left = _others(fits, len(rows))
            np.add.at(self._spilled, bucket[left], 1)
            rows, bucket, mark = rows[left], (bucket[left] + 1) & self._mask, mark[left]


def _absent(count: int) -> I64Array:
    """``count`` times ``ABSENT``. ``np.full`` takes four times as long for few keys."""
    rows = np.empty(count, np.int64)
    rows.fill(ABSENT)
    return rows


def _others(some: I64Array, count: int) -> npt.NDArray[np.bool_]:
    """Which numbers below ``count`` are not in ``some``."""
    others = np.ones(count, np.bool_)
    others[some] = False
    return others


def odd_numbers(seed: bytes) -> U64Array:
    """``KEY_WORDS`` secret odd numbers, with which an index hashes keys."""
    return np.frombuffer(hashlib.sha256(seed).digest(), "<u8")[:KEY_WORDS] | _ONE


def repeated(keys: U64Array) -> I64Array:
    """The positions of keys that repeat an earlier key."""
    raw = np.ascontiguousarray(keys).view(f"V{keys.itemsize * keys.shape[1]}").ravel()
    if len(set(raw.tolist())) == len(keys):
        return np.empty(0, np.int64)  # the usual case, and twice as fast
    once = np.unique(raw, return_index=True)[1]
    again: I64Array = np.delete(np.arange(len(keys)), once)
    return again


def key_array(digests: bytes, width: int) -> U64Array:
    """The keys of concatenated digests of ``width`` <= 32 bytes each, padded with zeros."""
    count = len(digests) // width
    if width == 8 * KEY_WORDS:
        return np.frombuffer(digests, "<u8").reshape(count, KEY_WORDS)
    padded = np.zeros((count, 8 * KEY_WORDS), np.uint8)
    padded[:, :width] = np.frombuffer(digests, np.uint8).reshape(count, width)
    return padded.view("<u8")


def digests_of(keys: U64Array, width: int) -> bytes:
    """The concatenated digests of keys: the inverse of ``key_array``."""
    return np.ascontiguousarray(keys).view(np.uint8).reshape(-1, 8 * KEY_WORDS)[:, :width].tobytes()


def advise(memory: mmap.mmap, advice: int) -> None:
    """Advise the kernel about the pages of ``memory``. Nothing is lost if it does not know the
    advice, as a kernel without huge pages."""
    with suppress(OSError):
        memory.madvise(advice)
