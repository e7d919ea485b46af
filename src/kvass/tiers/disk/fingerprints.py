"""From a key's fingerprint to where its record lies: the disk tier's index.

Law of this file: what a dict would do, in a third of its memory and without an object per record
(measured with a million records that come and go: 24 to 48 bytes each, a dict and its ints 100 to
140). It is slower, half a microsecond a look; a record takes the disk a hundred times that.

Open addressing with linear probing and deletion by moving back (Knuth, TAOCP vol. 3, 6.4, algorithm
R), in many small tables, so that none takes long to grow. Fingerprints are hashes already; 0 stands
for an empty place.
"""

from __future__ import annotations

from array import array
from typing import Final

_TABLES: Final = 256
_BITS: Final = 8
"""The lowest bits choose a fingerprint's table, those above its place there."""
_SMALLEST: Final = 16


class _Table:
    """A power of two of places, at most two thirds of them taken."""

    __slots__ = ("count", "keys", "mask", "values")

    def __init__(self, size: int = _SMALLEST) -> None:
        self.keys = array("Q", bytes(8 * size))
        self.values = array("Q", bytes(8 * size))
        self.mask = size - 1
        self.count = 0

    def at(self, key: int) -> int:
        """The place that ``key`` has, or would take."""
        keys, mask = self.keys, self.mask
        i = key >> _BITS & mask
        while (there := keys[i]) and there != key:
            i = i + 1 & mask
        return i

    def insert(self, i: int, key: int, value: int) -> None:
        """Take the empty place ``at(key)``."""
        if 3 * (self.count + 1) > 2 * (self.mask + 1):
            self._grow()
            i = self.at(key)
        self.keys[i], self.values[i] = key, value
        self.count += 1

    def remove(self, i: int) -> None:
        """Empty a taken place: what was pushed past it moves back."""
        keys, values, mask = self.keys, self.values, self.mask
        j = i
        while there := keys[j := j + 1 & mask]:
            if (j - (there >> _BITS)) & mask >= (j - i) & mask:  # its home is not between i and j
                keys[i], values[i] = there, values[j]
                i = j
        keys[i] = 0
        self.count -= 1

    def _grow(self) -> None:
        bigger = _Table(2 * (self.mask + 1))
        for key, value in zip(self.keys, self.values, strict=True):
            if key:
                i = bigger.at(key)
                bigger.keys[i], bigger.values[i] = key, value
        self.keys, self.values, self.mask = bigger.keys, bigger.values, bigger.mask


class Fingerprints:
    """Fingerprint (1 .. 2**64 - 1) -> value (0 .. 2**64 - 1)."""

    def __init__(self) -> None:
        self._tables = [_Table() for _ in range(_TABLES)]

    def __len__(self) -> int:
        return sum(table.count for table in self._tables)

    def __contains__(self, key: int) -> bool:
        table = self._tables[key % _TABLES]
        return table.keys[table.at(key)] != 0

    def get(self, key: int) -> int | None:
        table = self._tables[key % _TABLES]
        i = table.at(key)
        return table.values[i] if table.keys[i] else None

    def __setitem__(self, key: int, value: int) -> None:
        table = self._tables[key % _TABLES]
        i = table.at(key)
        if table.keys[i]:
            table.values[i] = value
        else:
            table.insert(i, key, value)

    def setdefault(self, key: int, value: int) -> int:
        """What ``key`` has; ``value`` from here on, if it had nothing."""
        table = self._tables[key % _TABLES]
        i = table.at(key)
        if table.keys[i]:
            return table.values[i]
        table.insert(i, key, value)
        return value

    def __delitem__(self, key: int) -> None:
        """Raises ``KeyError``."""
        table = self._tables[key % _TABLES]
        i = table.at(key)
        if not table.keys[i]:
            raise KeyError(key)
        table.remove(i)
