"""The row table: one row id per slot of the arena, numpy columns, no object per row.

Law of this file: a row's state changes only through ``move``, along ``TRANSITIONS``, and its
columns say the same at all times: a FREE row has no key, no pin, no stamp and no doom.

A row id *is* a slot: ids ``[set.first_row, set.first_row + set.slots)`` are the slots of an extent
set. States:

- FREE: nobody's; may be granted.
- WRITING: granted to writers; readable by nobody.
- LOADING: being filled from a tier.
- READY: every shard is written; readable while pinned.
- QUARANTINED: its writers failed or were too late and may still write: given to nobody.

A READY row that is *doomed* stopped matching (cleared, or reported bad) while somebody reads it; it
is freed at its last unpin.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.types import I64Array, U64Array

FREE: Final = 0
WRITING: Final = 1
LOADING: Final = 2
READY: Final = 3
QUARANTINED: Final = 4

STATE_NAMES: Final = ("free", "writing", "loading", "ready", "quarantined")

TRANSITIONS: Final = frozenset(
    {
        (FREE, WRITING),
        (WRITING, READY),
        (WRITING, QUARANTINED),
        (QUARANTINED, FREE),
        (READY, FREE),
    }
)

NEVER: Final = -1
"""The stamp of a row that holds nothing."""

KEY_WORDS: Final = 4
"""A key is a digest of up to 32 bytes, kept as this many uint64; all zero in a FREE row."""

NOBODY: Final = -1
"""The extent set of a row id that no set uses now."""


class RowTable:
    """Columns over row ids ``0..len(table)``; grows, never shrinks."""

    def __init__(self) -> None:
        self.state: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.pins: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.stamp: I64Array = np.zeros(0, np.int64)
        self.set_of: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.doomed: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.key: U64Array = np.zeros((0, KEY_WORDS), np.uint64)
        self._clock = 0

    def __len__(self) -> int:
        return len(self.state)

    @property
    def clock(self) -> int:
        """The next stamp to be given: everything touched earlier has a smaller one."""
        return self._clock

    def grow(self, to: int) -> None:
        """Make room for row ids below ``to`` (amortised: columns grow by a quarter at least)."""
        old = len(self)
        if to <= old:
            return
        to = max(to, old + old // 4)
        extra = to - old
        self.state = np.concatenate([self.state, np.full(extra, FREE, np.uint8)])
        self.pins = np.concatenate([self.pins, np.zeros(extra, np.int32)])
        self.stamp = np.concatenate([self.stamp, np.full(extra, NEVER, np.int64)])
        self.set_of = np.concatenate([self.set_of, np.full(extra, NOBODY, np.int32)])
        self.doomed = np.concatenate([self.doomed, np.zeros(extra, np.bool_)])
        self.key = np.concatenate([self.key, np.zeros((extra, KEY_WORDS), np.uint64)])

    def stamp_rows(self, rows: I64Array) -> I64Array:
        """Stamp ``rows`` as used now, the first one oldest; returns the stamps given."""
        stamps = np.arange(self._clock, self._clock + len(rows), dtype=np.int64)
        self._clock += len(rows)
        self.stamp[rows] = stamps
        return stamps

    def move(self, rows: I64Array, before: int, after: int) -> None:
        """Move ``rows``, all of them in state ``before``, to state ``after``."""
        assert (before, after) in TRANSITIONS, (STATE_NAMES[before], STATE_NAMES[after])
        assert (self.state[rows] == before).all(), "a row was not in the state its owner thought"
        if after == FREE:
            assert not self.pins[rows].any(), "a pinned row was freed"
            self.stamp[rows] = NEVER
            self.doomed[rows] = False
            self.key[rows] = 0
        self.state[rows] = after

    def evictable(self, rows: I64Array) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` hold something that may be dropped now: READY and unpinned."""
        may: npt.NDArray[np.bool_] = (self.state[rows] == READY) & (self.pins[rows] == 0)
        return may
