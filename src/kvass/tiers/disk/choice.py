"""The choice between two ways to read from a disk, by what each of them took on this machine.

Law of this file: both ways give the same bytes, so a wrong choice costs time and nothing else.

*Direct*: the disk writes into the shards. *Staged*: it writes into memory of the tier that is in
huge pages, and the processor copies from there. What is faster depends on the disk, on its driver
and on the pages of the shards, and no setting says it all.
"""

from __future__ import annotations

import threading
from statistics import median
from typing import Final

TURN: Final = 8
"""Pieces that are read one way before the other has its turn. The staged way is first, because few
systems allow huge pages of shared memory, and without them it is usually the faster one. Most
pieces of a turn are read while others are read the same way, so what one takes says how fast the
disk is with as many requests as there are."""
MEASURED: Final = 32
"""Pieces of which one way is chosen. Half of them are read each way. It takes more pieces if reads
fail."""
AGAIN: Final = 4096
"""Pieces after which both ways are measured again: other work may have been in the way."""
GAIN: Final = 0.9
"""Staging costs the processor a copy. So it must take less than this part of the time."""


class Choice:
    """Which way the next piece is read. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._staged = self._decided = False
        self._times: dict[bool, list[float]] = {False: [], True: []}

    def staged(self) -> bool:
        """Return which way to read a piece now."""
        with self._lock:
            if self._begun == AGAIN:
                self._begun, self._decided = 0, False
                self._times = {False: [], True: []}
            self._begun += 1
            if self._decided:
                return self._staged
            return (self._begun - 1) // TURN % 2 == 0

    def took(self, staged: bool, seconds: float, size: int) -> None:
        """Say how long a piece of ``size`` bytes took, from its request until its bytes were where
        they belong, and checked."""
        with self._lock:
            times = self._times[staged]
            if len(times) == MEASURED // 2:
                return
            times.append(seconds / size)
            if all(len(each) == MEASURED // 2 for each in self._times.values()):
                direct, through = median(self._times[False]), median(self._times[True])
                self._staged, self._decided = through < GAIN * direct, True
