"""A daemon is stopped and started while an engine reads and stores (``make demo-upgrade``).

The engine is kvass's fake one, with two ranks: no model is computed, but each page that is loaded
is checked. It prints how long the engine got no hit, and the hit rates before and after.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from kvass.client.parallel import ParallelStrategy
from kvass.errors import Unavailable
from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.fake_engine import FakeEngine, spread
from kvass.types import GroupLayout, RankLayout

MODEL = RankLayout((GroupLayout("full", 16, ("a", "b"), (65536, 65536)),))
WORLD = ParallelStrategy(tp=2, pp=1)


class Seen(NamedTuple):
    """What the engine saw. Hit rates: of the lookups in each part."""

    before: float
    after: float
    longest_gap_s: float
    """Between two hits, all the time."""
    pages: int
    """Loaded, each of them right."""


def upgrade(folder: Path, arena: str, seconds: float = 3.0) -> Seen:
    """Serve an engine for ``seconds``, restart, and serve it as long again. ``arena``: the folder
    of L1; empty for none."""
    prompts = [range(n * 1000, n * 1000 + 16 * 8) for n in range(20)]
    rates, gap_s, pages = list[float](), 0.0, 0
    with (
        running_daemon(folder, "256MiB", arena=arena) as daemon,
        FakeEngine(daemon.socket, WORLD, spread(WORLD, MODEL), blocks=1024) as engine,
    ):
        for prompt in prompts:
            engine.store(prompt)
        last_s, rng = time.monotonic(), random.Random(0)
        for part in ("before", "meanwhile", "after"):
            restarting = threading.Thread(target=restart, args=(daemon,))
            if part == "meanwhile":
                restarting.start()
            hits, asked, end_s = 0, 0, time.monotonic() + seconds
            while restarting.is_alive() or (part != "meanwhile" and time.monotonic() < end_s):
                try:
                    hit = engine.load(rng.choice(prompts))
                except Unavailable:  # the connection was lost under it
                    hit = 0
                pages += engine.verify()
                hits, asked = hits + bool(hit), asked + 1
                if hit:
                    gap_s, last_s = max(gap_s, time.monotonic() - last_s), time.monotonic()
            if part == "meanwhile":
                engine.wait_connected()
            else:
                rates.append(hits / asked)
    before, after = rates
    return Seen(before, after, gap_s, pages)


def restart(daemon: Daemon) -> None:
    daemon.stop()
    daemon.start()


def main() -> None:
    arena = Path(tempfile.mkdtemp(dir="/dev/shm"))
    folder = Path(tempfile.mkdtemp())
    try:
        seen = upgrade(folder, str(arena))
    finally:
        shutil.rmtree(arena)
        shutil.rmtree(folder)
    print(f"hit rate before {seen.before:.0%}, after {seen.after:.0%}")
    print(f"longest time without a hit {seen.longest_gap_s:.2f} s")
    print(f"{seen.pages} pages were loaded, each of them right")


if __name__ == "__main__":
    main()
