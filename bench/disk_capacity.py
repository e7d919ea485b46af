"""The disk tier at its full size: ``python -m bench.disk_capacity`` (``--help``).

A tier with room for ROWS rows of 4 KiB is given three times as many. It reports, as JSON:

- ``bytes_most``: the most that the folder took on disk at any moment, as the file system counts,
  to compare with ``capacity_bytes``;
- ``records``: how many it holds then; ``wrong``: how many of a sample come back wrong; ``missed``:
  how many of the thousand stored last are gone;
- for a new process, with the segments' tables not in the page cache: ``open_s`` until it serves,
  ``bytes_a_row``: memory per row.

The exit status is 1 if a number is worse than ``LIMITS``. A million rows take minutes and 8.5 GiB
on disk, which are freed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.footprint import sync
from kvass.tiers.base import Buffer
from kvass.tiers.buffers import page_buffer
from kvass.tiers.disk import DiskTier
from kvass.tiers.disk.segment import TABLE
from kvass.types import PAGE

ROWS: Final = 1_000_000
LIMITS: Final = {"bytes_over": 0, "wrong": 0, "missed": 0, "open_s": 5.0, "bytes_a_row": 200.0}
_SLOT_BYTES: Final = 2 * PAGE + 100
"""Capacity for a row: header, data, index entry, the file system's metadata."""
_BESIDE: Final = 1 << 20
_BATCH: Final = 1000
_LOOK_EVERY_S: Final = 0.005


class Watch:
    """Watches a folder, and keeps the most that it took on disk."""

    def __init__(self, folder: Path) -> None:
        self.most = 0
        self.looks = 0
        self._folder = folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def look(self) -> None:
        total = self._folder.stat().st_blocks
        for entry in os.scandir(self._folder):
            try:
                total += entry.stat().st_blocks
            except FileNotFoundError:  # a segment that was just removed
                continue
        self.most = max(self.most, 512 * total)
        self.looks += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            self.look()


def measure(folder: Path, rows: int) -> dict[str, Any]:
    """The figures that the top of this file explains."""
    capacity = rows * _SLOT_BYTES + _BESIDE
    watch = Watch(folder)
    began = time.monotonic()
    tier = DiskTier(folder, capacity)
    with watch.watching():
        for first in range(0, 3 * rows, _BATCH):
            numbers = range(first, min(first + _BATCH, 3 * rows))
            tier.store([_key(number) for number in numbers], _data(numbers))
            watch.look()
    fill_s = time.monotonic() - began
    wrong, missed = _check(tier, rows)
    report = tier.report()
    tier.close()
    figures: dict[str, Any] = {
        "rows": rows,
        "stored": 3 * rows,
        "fill_s": round(fill_s, 1),
        "capacity_bytes": capacity,
        "bytes_most": watch.most,
        "bytes_over": max(watch.most - capacity, 0),
        "looks": watch.looks,
        "records": report["records"],
        "wrong": wrong,
        "missed": missed,
    }
    sync(folder, f"*{TABLE}", drop=True)
    return figures | _in_a_new_process(folder, capacity)


def worse(figures: dict[str, Any]) -> list[str]:
    """The figures that are worse than ``LIMITS``, as text."""
    return [
        f"{name}: {figures[name]}, promised {limit}"
        for name, limit in LIMITS.items()
        if figures[name] > limit
    ]


def _key(number: int) -> bytes:
    return b"row %d" % number


def _data(numbers: range) -> list[list[Buffer]]:
    """Rows with their number at both ends, page-aligned as slots of the arena are."""
    memory = page_buffer(PAGE * len(numbers)).view(np.uint64).reshape(len(numbers), -1)
    memory[:, 0] = memory[:, -1] = numbers
    return [[row.view(np.uint8)] for row in memory]


def _check(tier: DiskTier, rows: int) -> tuple[int, int]:
    """How many rows of a sample are wrong, and how many of the last ones are missing."""
    step = max(3 * rows // 10_000, 1)
    wrong = missed = 0
    for some, last in ((range(0, 3 * rows, step), False), (range(3 * rows)[-_BATCH:], True)):
        into = _data(range(3 * rows, 3 * rows + len(some)))  # other numbers than any row's
        for number, shards, held in zip(
            some, into, tier.load([_key(number) for number in some], into), strict=True
        ):
            words = shards[0].view(np.uint64)
            right = words[0] == number == words[-1] and not words[1:-1].any()
            wrong += held and not right
            missed += last and not held
    return wrong, missed


def _in_a_new_process(folder: Path, capacity: int) -> dict[str, Any]:
    command = [sys.executable, "-m", __spec__.name, "--open", str(folder), str(capacity)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=3600)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _open(folder: str, capacity: int) -> dict[str, Any]:
    """The program of the new process."""
    before = _resident()
    began = time.monotonic()
    tier = DiskTier(folder, capacity)
    opened = time.monotonic()
    records = tier.report()["records"]
    grown = _resident() - before
    tier.close()
    return {
        "open_s": round(opened - began, 3),
        "records_found": records,
        "bytes_a_row": round(grown / max(records, 1), 1),
    }


def _resident() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.disk_capacity", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", type=int, default=ROWS, help="that it can hold (%(default)s)")
    parser.add_argument("--in", dest="parent", help="where to make a folder for it")
    parser.add_argument("--open", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open:
        json.dump(_open(arguments.open[0], int(arguments.open[1])), sys.stdout)
        return 0
    with tempfile.TemporaryDirectory(prefix="kvass-cap-", dir=arguments.parent) as made:
        figures = measure(Path(made), arguments.rows)
    json.dump(figures, sys.stdout, indent=2)
    sys.stdout.write("\n")
    for line in worse(figures):
        sys.stderr.write(line + "\n")
    return 1 if worse(figures) else 0


if __name__ == "__main__":
    sys.exit(main())
