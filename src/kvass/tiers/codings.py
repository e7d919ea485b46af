"""How the records of each layer group are compressed, by a probe of the first ones.

A tier knows no layer groups and no types of values. But the records of one group have shards of the
same lengths, and a sample of them shows how wide their values are.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

from kvass.tiers.base import Shards
from kvass.tiers.planes import Coding, best_coding

WORTH: Final = 0.92
"""A record is compressed if it takes at most this part of its size."""
PROBES: Final = 4
"""Records of a group of which each is probed for itself. Then the group has one coding."""
AGAIN: Final = 4096
"""Records after which a group is probed again: another model may have taken its place."""
_MOST_GROUPS: Final = 256


class _Group:
    def __init__(self) -> None:
        self.coding: Coding | None = None
        self.left = 0
        """Records that get this coding without a probe."""
        self.found: list[tuple[float, Coding]] = []


class Codings:
    """The codings of all groups. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[tuple[int, ...], _Group] = {}

    def of(self, shards: Shards) -> Coding | None:
        """Return the coding of this record; None if it is not worth it."""
        lengths = tuple(map(len, shards))
        with self._lock:
            if len(self._groups) >= _MOST_GROUPS and lengths not in self._groups:
                self._groups.clear()
            group = self._groups.setdefault(lengths, _Group())
            if group.left:
                group.left -= 1
                return group.coding
        coding, ratio = best_coding(shards)
        with self._lock:
            group.found.append((ratio, coding))
            if len(group.found) >= PROBES:
                ratios, codings = zip(*group.found, strict=True)
                usual = Counter[Coding](codings).most_common(1)[0][0]
                group.coding = usual if sum(ratios) / len(ratios) <= WORTH else None
                group.left, group.found = AGAIN, []
        return coding if ratio <= WORTH else None

    def failed(self, shards: Shards) -> None:
        """A record of this group did not become smaller: the next ones are probed."""
        with self._lock:
            if group := self._groups.get(tuple(map(len, shards))):
                group.left = 0
