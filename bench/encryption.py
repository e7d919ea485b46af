"""What encryption costs a tier: ``python -m bench.encryption disk:FOLDER redis:HOST s3:...``.

For each URL, records of 8 MiB and of 1 MiB are stored and loaded by two tiers in turns: one with a
``key_file`` and one without. It prints the time with encryption as a ratio to the time without, of
the fastest rounds. Every byte loaded is compared. A disk is measured in a new folder in FOLDER, a
server under a prefix of its own, and neither is left behind. The exit status is 1 if a byte was
wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from bench.tiers import own_prefix
from kvass.cli.bench.disk import spelled
from kvass.cli.bench.rig import WIDTH, best_ratio, seconds, shared_memory
from kvass.tiers.base import Tier
from kvass.tiers.url import TierUrl, open_tier, parse_tier_url
from kvass.types import Size

_SIZES: Final = ((8 << 20, 8), (1 << 20, 64))
"""Bytes of a record, and how many of them."""


@contextmanager
def _own(url: TierUrl) -> Iterator[TierUrl]:
    """The same store, with nothing in it; gone afterwards."""
    if url.scheme != "disk":
        with own_prefix(url) as own:
            yield own
        return
    with tempfile.TemporaryDirectory(prefix="kvass-bench-", dir=url.where) as folder:
        yield msgspec.structs.replace(url, where=folder, options={"capacity": "512MiB"})


def measure(url: TierUrl, size: int, count: int, rounds: int) -> tuple[float, float]:
    """The time with encryption as a ratio to that without: of a store, and of a load."""
    with ExitStack() as ending:
        key_file = Path(ending.enter_context(tempfile.TemporaryDirectory())) / "keys"
        key_file.touch(0o600)
        key_file.write_text(os.urandom(32).hex())
        memory = shared_memory(2 * size * count)
        ending.callback(memory.close)
        source, target = memory.buffer.reshape(2, count, size)
        source[:] = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
        tiers: list[Tier] = []
        for options in ({"compress": "off"}, {"compress": "off", "key_file": str(key_file)}):
            own = ending.enter_context(_own(url))
            tiers.append(open_tier(spelled(own.scheme, own.where, own.options | options)))
            ending.callback(tiers[-1].close)
        stores: tuple[list[float], list[float]] = [], []
        loads: tuple[list[float], list[float]] = [], []
        for number in range(rounds + 2):
            keys = [os.urandom(WIDTH) for _ in range(count)]
            for which in (0, 1)[:: -1 if number % 2 else 1]:
                tier = tiers[which]
                stored_s = seconds(partial(tier.store, keys, [[one] for one in source]))
                target[:] = 0
                loaded_s = seconds(partial(tier.load, keys, [[one] for one in target]))
                if not np.array_equal(source, target):
                    raise SystemExit(f"{url.scheme}: a record came back wrong, or not at all")
                tier.delete(keys)
                if number >= 2:  # the first ones make files
                    stores[which].append(stored_s)
                    loads[which].append(loaded_s)
        return best_ratio(*stores), best_ratio(*loads)


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.encryption", description=__doc__)
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print("| tier | record | store | load |\n|---|---|---|---|")
    for text in args.urls:
        url = parse_tier_url(text)
        for size, count in _SIZES:
            store, load = measure(url, size, count, args.rounds)
            print(f"| {url.scheme} | {Size(size)} | {store:.2f} | {load:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
