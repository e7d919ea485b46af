"""Which rows left L1 or were not stored, when and for which cause. ``explain.py`` asks for it.

Law of this file: memory is bounded, and finding a key takes constant time.

The table has ``ROOM`` places. A key of a group of a namespace belongs to one place, which follows
from a hash with a secret seed. A new entry replaces the entry in its place. So an entry is lost
when a later one gets its place: half of the entries are lost after 90,000 later ones.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.core.rows.index import odd_numbers
from kvass.types import I64Array, U64Array

ROOM: Final = 1 << 17
"""The number of places: 2.1 MiB, which are allocated when the first row leaves."""
CAUSES: Final[dict[str, str]] = {
    "capacity": "evicted",
    "handed_over": "evicted",
    "quota": "over_quota",
    "not_retained": "evicted",
    "cleared": "cleared",
    "reset": "cleared",
    "forgotten": "cleared",
    "unfinished": "not_stored",
    "refused": "not_stored",
    "load_failed": "load_failed",
    "ended": "evicted",
    "kept": "evicted",
}
"""By cause, the reason of a miss (``metrics.MISSES``).

- capacity: it was evicted to make room for rows of its layer group.
- handed_over: it was evicted to make room for another layer group or tenant.
- quota: it was evicted because its tenant has no more room.
- not_retained: it was loaded from a tier, and the daemon does not keep such rows.
- cleared: a command cleared it. reset: its engine did.
- forgotten: its namespace was removed to make room for another.
- unfinished: an engine reserved it and did not write it in time.
- refused: an engine offered it, and L1 had no room or the engine's share was used up.
- load_failed: a tier had it, and could not load it.
- kept: it was evicted although it was retained, because nothing else could go.
- ended: it was evicted before others, because its client had ended its session.
"""
_NAMES: Final = tuple(CAUSES)
_NUMBERS: Final = {name: number for number, name in enumerate(_NAMES)}
_HALF, _ONE, _PLACE = np.uint64(32), np.uint64(1), np.uint64(64 - (ROOM - 1).bit_length())
_WORD: Final = (1 << 64) - 1


def origin(namespace: int, group: int, cause: str) -> int:
    """One number for the arguments of ``note_cleared``, for a column of the table of sets."""
    return namespace << 16 | group << 8 | _NUMBERS[cause]


class Departure(NamedTuple):
    """What is known of a key that left: the ``cause``, and ``when`` it left. ``which``: the number
    of the key."""

    cause: str
    when: float
    which: int


class LeftRows:
    """The table. ``seed``: as ``RowClasses``."""

    def __init__(self, seed: bytes) -> None:
        self._odd = odd_numbers(seed + b"left")
        self._marks: U64Array = np.empty(0, np.uint64)
        self._times: npt.NDArray[np.float64] = np.empty(0)
        self._causes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def note(self, namespace: int, group: int, keys: U64Array, cause: str, now: float) -> None:
        """Rows with these keys left L1 at ``now``, or were not stored."""
        if not len(keys):
            return
        if not len(self._marks):
            self._marks, self._times = np.zeros(ROOM, np.uint64), np.zeros(ROOM)
            self._causes = np.zeros(ROOM, np.uint8)
        marks, places = self._hashed(namespace, group, keys)
        self._marks[places], self._times[places] = marks, now
        self._causes[places] = _NUMBERS[cause]

    def note_cleared(self, origin: int, keys: U64Array, now: float) -> None:
        """``note`` for rows of a cleared set."""
        self.note(origin >> 16, origin >> 8 & 0xFF, keys, _NAMES[origin & 0xFF], now)

    def find(self, namespace: int, group: int, keys: U64Array) -> Departure | None:
        """The first of ``keys`` that is known to have left. ``None``: none is."""
        if not len(self._marks) or not len(keys):
            return None
        marks, places = self._hashed(namespace, group, keys)
        known = self._marks[places] == marks
        which = int(known.argmax())
        if not known[which]:
            return None
        place = int(places[which])
        return Departure(_NAMES[self._causes[place]], float(self._times[place]), which)

    def _hashed(self, namespace: int, group: int, keys: U64Array) -> tuple[U64Array, I64Array]:
        """The mark of each key, which is never 0, and its place."""
        odd = self._odd
        where = np.uint64((namespace * int(odd[1]) + group * int(odd[2])) & _WORD)
        mixed = keys.dot(odd) + where
        mixed = (mixed ^ (mixed >> _HALF)) * odd[0]
        return mixed | _ONE, (mixed >> _PLACE).astype(np.int64)
