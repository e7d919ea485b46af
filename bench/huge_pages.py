"""``python -m bench.huge_pages``: what pages of 2 MiB and 1 GiB are worth.

One run has an arena of each kind of pages in turns, ``--rounds`` times; figures are medians, and
the last ones are ratios to pages of 4 KiB. What is not reserved is left out (docs/operating.md).

- ``touch``: seconds per GiB to populate, as the daemon does. ``map``: for a process that populates
  its mapping of what is there already, as workers and tiers do. ``tables``: page tables of one such
  process, MiB per GiB (VmPTE). ``unmap``: seconds per GiB to close it.
- ``store``, ``load``: GB/s of copies of pages of 64 KiB between private memory, at random places,
  and the arena, in order.
- ``random``: million words per second read from random places of the arena.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from kvass.arena import memory
from kvass.arena.huge import lacking, page_bytes
from kvass.cli.bench.rig import private_memory, seconds
from kvass.config import Size
from kvass.transfer.base import U8Array
from kvass.types import PAGE

RUN: Final = 64 << 10
WORDS: Final = 2_000_000
KINDS: Final = {
    "4KiB": PAGE,
    "transparent": PAGE,
    "2MiB": page_bytes("2MiB"),
    "1GiB": page_bytes("1GiB"),
}
_GIB: Final = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=Size.parse, default=Size(_GIB))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    kinds = {name: page for name, page in KINDS.items() if _there(name, page, args.size)}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    private = private_memory(args.size // 4)
    for _ in range(args.rounds):
        for name, page in kinds.items():
            runs[name].append(measure(name, page, args.size, private))
    figures = {n: {k: median(one[k] for one in runs[n]) for k in runs[n][0]} for n in kinds}
    for name, row in figures.items():
        print(f"{name:<12}" + "".join(f" {key} {value:9.3f} " for key, value in row.items()))
    for name, row in list(figures.items())[1:]:
        print(
            f"{name:<12}" + "".join(f" {k} {v / figures['4KiB'][k]:8.3f}x " for k, v in row.items())
        )


def _there(name: str, page: int, size: int) -> bool:
    why = lacking(page, size) if page > PAGE else ""
    if name == "transparent":
        arena = memory.create(size)
        why = "" if arena.advise_huge() else "shmem_enabled is never"
        arena.close()
    if why:
        print(f"{name}: left out: {why}")
    return not why


def measure(name: str, page: int, size: int, private: U8Array) -> dict[str, float]:
    """The figures of one arena."""
    arena, gibs = memory.create(size, page), size / _GIB
    if name == "transparent":
        arena.advise_huge()
    touch = seconds(lambda: arena.populate(0, size))
    before = _tables()
    second = memory.attach(os.dup(arena.fileno()), size)
    if name == "transparent":
        second.advise_huge()
    mapped = seconds(lambda: second.populate(0, size))
    tables = _tables() - before
    copies = _copies(second.buffer, private)
    unmap = seconds(second.close)
    arena.close()
    gc.collect()
    return {
        "touch": touch / gibs,
        "map": mapped / gibs,
        "tables": tables / 2**20 / gibs,
        "unmap": unmap / gibs,
        **copies,
    }


def _copies(arena: U8Array, private: U8Array) -> dict[str, float]:
    rng = np.random.default_rng(0)
    pages, grid = private.reshape(-1, RUN), arena[: private.nbytes].reshape(-1, RUN)
    words, at = arena.view(np.uint64), rng.integers(0, arena.nbytes // 8, WORDS)
    order = rng.permutation(len(pages))

    def load() -> None:
        pages[order] = grid

    return {
        "store": private.nbytes / seconds(lambda: np.take(pages, order, 0, grid, "clip")) / 1e9,
        "load": private.nbytes / seconds(load) / 1e9,
        "random": WORDS / seconds(lambda: words.take(at)) / 1e6,
    }


def _tables() -> int:
    found = re.search(r"VmPTE:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


if __name__ == "__main__":
    main()
