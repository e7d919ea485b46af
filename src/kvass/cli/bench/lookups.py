"""Round trips of lookups of long prompts, and of their releases.

Rows are one page per shard, and each page holds a number of its own, to see that what a lookup
finds is where its ranks wrote it.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any, Final

import numpy as np

from kvass.cli.bench.figures import percentiles_us
from kvass.cli.bench.machine import PATIENCE_S, seconds
from kvass.cli.bench.sessions import WIDTH, EngineSessions
from kvass.client.parallel import ParallelStrategy
from kvass.types import PAGE, GroupLayout, I64Array, Slots, U64Array

LAYOUT: Final = GroupLayout("full", 16, ("0",), (256,))
"""16 blocks of 256 bytes in a chunk: shards of 4 KiB."""
RESIDENT: Final = 65_536
KEYS: Final = 512
BATCH: Final = 1024
ASKS: Final = 2000
WARM_UP: Final = 100
LOOK_EVERY: Final = 16
"""Reading what was found brings it into the CPU's caches; so not after every lookup."""


def measure_lookups(socket: str, resident: int = RESIDENT, tp: int = 1) -> dict[str, Any]:
    """``lookup_128k_us`` and ``release_128k_us`` (``..._128k_tp8_us`` for 8 ranks), and whether
    everything found held what was stored: ``bytes_equal``. Raises ``KvassError``."""
    with ExitStack() as ending:
        engine = SmallRows(socket, ending, tp)
        ending.callback(engine.scheduler.clear, timeout_s=PATIENCE_S)
        keys = engine.fill(resident)
        lookups, releases, same = engine.ask(keys)
    name = "128k" if tp == 1 else f"128k_tp{tp}"
    return {
        "bytes_equal": same,
        f"lookup_{name}_us": percentiles_us(lookups),
        f"release_{name}_us": percentiles_us(releases),
    }


class SmallRows(EngineSessions):
    """An engine of ``tp`` ranks with rows of a page per rank."""

    def __init__(self, socket: str, ending: ExitStack, tp: int = 1) -> None:
        super().__init__(socket, LAYOUT, ending, strategy=ParallelStrategy(tp=tp))
        self.words: U64Array = self.arena.view(np.uint64)
        ending.callback(delattr, self, "words")

    def fill(self, rows: int) -> list[bytes]:
        """Store ``rows`` rows; their keys, whose first words are the bytes."""
        keys = [os.urandom(WIDTH) for _ in range(rows)]
        for at in range(0, rows, BATCH):
            digests = b"".join(keys[at : at + BATCH])
            granted = self.reserve(digests)
            for rank, where in enumerate(self.pages(granted.grants[0].slots[0])):
                self.words[where] = _numbers(digests) + np.uint64(rank)
            self.commit(granted)
        return keys

    def ask(self, keys: list[bytes]) -> tuple[list[float], list[float], bool]:
        """Seconds of each lookup, and of the releases of all ranks with a ping behind each; and
        whether every shard looked at held what its rank wrote."""
        random, lookups, releases, same = Random(0), [], [], True
        for number in range(WARM_UP + ASKS):
            digests = b"".join(random.sample(keys, KEYS))
            began_s = time.perf_counter()
            matched = self.look_up(digests)
            lookups.append(time.perf_counter() - began_s)
            if number % LOOK_EVERY == 0:
                same = same and self.holds(matched.slots[0], digests)
            releases.append(seconds(partial(self.release, matched)))
        return lookups[WARM_UP:], releases[WARM_UP:], same

    def holds(self, slots: Slots, digests: bytes) -> bool:
        """Whether every shard of these rows holds what its rank wrote for ``digests``."""
        return all(
            np.array_equal(self.words[where], _numbers(digests) + np.uint64(rank))
            for rank, where in enumerate(self.pages(slots))
        )

    def pages(self, slots: Slots) -> list[I64Array]:
        """Per shard, which word of the arena begins each row's page."""
        return [slots.offsets(shard, PAGE) // 8 for shard in range(self.strategy.world_size)]


def _numbers(digests: bytes) -> U64Array:
    """The first word of each digest."""
    return np.frombuffer(digests, "<u8").reshape(-1, WIDTH // 8)[:, 0]
