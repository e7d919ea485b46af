"""Round trips of lookups of long prompts, and of their releases."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Final

from kvass.cli.bench.rig import PATIENCE_S, WIDTH, EngineSessions, percentiles_us, seconds
from kvass.types import GroupLayout

LAYOUT: Final = GroupLayout("full", 16, ("0",), (256,))
"""16 blocks of 256 bytes in a chunk: shards of 4 KiB."""
RESIDENT: Final = 65_536
KEYS: Final = 512
BATCH: Final = 512
ASKS: Final = 2000
WARM_UP: Final = 100


def measure_lookups(
    socket: str, resident: int = RESIDENT, tp: int = 1
) -> dict[str, dict[str, float]]:
    """``lookup_128k_us`` and ``release_128k_us`` (``..._128k_tp8_us`` for 8 ranks). Raises
    ``KvassError``."""
    random, lookups, releases = Random(0), list[float](), list[float]()
    with ExitStack() as ending:
        engine = EngineSessions(socket, LAYOUT, ending, tp=tp)
        ending.callback(engine.scheduler.clear, timeout_s=PATIENCE_S)
        keys = fill(engine, resident)
        for _ in range(WARM_UP + ASKS):
            digests = b"".join(random.sample(keys, KEYS))
            began_s = time.perf_counter()
            matched = engine.look_up(digests)
            lookups.append(time.perf_counter() - began_s)
            releases.append(seconds(partial(engine.release, matched)))
    name = "128k" if tp == 1 else f"128k_tp{tp}"
    return {
        f"lookup_{name}_us": percentiles_us(lookups[WARM_UP:]),
        f"release_{name}_us": percentiles_us(releases[WARM_UP:]),
    }


def fill(engine: EngineSessions, rows: int) -> list[bytes]:
    """Store ``rows`` rows, with whatever lies in their slots; their keys."""
    keys = [os.urandom(WIDTH) for _ in range(rows)]
    for at in range(0, rows, BATCH):
        engine.commit(engine.reserve(b"".join(keys[at : at + BATCH])))
    return keys
