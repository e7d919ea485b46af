"""``python -m bench.restart``: the time until a restarted daemon answers a lookup with a hit.

A daemon with ``--arena`` is given ``--rows`` rows of 4 KiB and killed. Then another one is started
on the same folder, ``--rounds`` times, and killed again after the first hit, whose bytes are
compared. Figures are medians of seconds, from the start of the process.

- ``python_s``: ``python -c pass``.
- ``empty_answer_s``: a daemon of the same size without ``--arena``, until its first answer, a miss.
- ``hit_s``: the daemon with all rows, until the hit. ``adopt_s``: the part that it logs.
- ``work_s``, ``empty_work_s``: the processor time of the process until then, the threads that
  populate L1 included.

Rounds with and without rows take turns. The exit status is 1 if a byte differs, a row is missing,
or the first hit takes longer than a second.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket as sockets
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.footprint import cpu_ns
from bench.rows import Rows
from kvass.cli.bench.rig import PATIENCE_S, WIDTH, wait_for
from kvass.client.client import Client
from kvass.types import PAGE, Size

ROWS: Final = 1 << 20
MOST_S: Final = 1.0
_TRIES_S: Final = 0.002
_PROMPT: Final = 512
"""Rows of a prompt: so many are granted at once."""
_SOME: Final = 64
"""Rows of the prompt that is looked up."""


class Started:
    """A daemon process, from its start on. ``log``: its standard error."""

    def __init__(self, folder: Path, size: int, *flags: str) -> None:
        self.socket, self._log = str(folder / "kvass.sock"), folder / "log"
        serve = ["serve", "--socket", self.socket, "--l1-size", str(size), *flags]
        with self._log.open("w") as log:
            self.began_s = time.monotonic()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvass", *serve],
                stdout=subprocess.PIPE,
                stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("KVASS_")},
            )

    def ready_s(self) -> float:
        """Wait for the ready line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(b"ready "), self._log.read_text()
        return self.since_s()

    def since_s(self) -> float:
        return time.monotonic() - self.began_s

    def adopt_s(self) -> float:
        found = re.search(r"adopted \d+ rows, .* in ([\d.]+) s", self._log.read_text())
        return float(found[1]) if found else 0.0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.restart", description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--in", dest="folder", default="/dev/shm", help="a folder of a tmpfs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvass-bench-", dir=args.folder) as folder:
        figures = measure(Path(folder), args.rows, args.rounds)
    print(json.dumps(figures, indent=2))
    return 0 if figures["hit_s"] <= MOST_S else 1


def measure(folder: Path, rows: int, rounds: int) -> dict[str, Any]:
    """The figures that the top of this file explains."""
    keys = [os.urandom(WIDTH) for _ in range(rows)]
    size = rows * PAGE * 5 // 4
    arena = ("--arena", str(folder / "arena"))
    fill(folder, size, arena, keys)
    runs: dict[str, list[float]] = {}

    def note(**seconds: float) -> None:
        for name, value in seconds.items():
            runs.setdefault(name, []).append(value)

    for turn in range(rounds):
        note(python_s=_python_s())
        some = keys[(turn * _PROMPT) % rows :][:_SOME]
        for kind, flags in (("empty_", ()), ("", arena)):
            daemon = Started(folder, size, *flags)
            try:
                found = first_answer(daemon.socket, some)
                answer_s, work_s = daemon.since_s(), cpu_ns(daemon.process.pid) / 1e9
                daemon.ready_s()
                assert found == (0 if kind else len(some)), f"{found} of {len(some)} rows"
                if kind:
                    note(empty_answer_s=answer_s, empty_work_s=work_s)
                else:
                    note(hit_s=answer_s, work_s=work_s, adopt_s=daemon.adopt_s())
            finally:
                daemon.kill()
    medians = {name: round(median(values), 3) for name, values in sorted(runs.items())}
    return {"rows": rows, "l1": Size(size).rounded(), **medians, "worst_hit_s": max(runs["hit_s"])}


def fill(folder: Path, size: int, arena: tuple[str, ...], keys: list[bytes]) -> None:
    """Have a daemon store rows of ``keys`` in its arena, and kill it."""
    daemon = Started(folder, size, *arena)
    try:
        daemon.ready_s()
        with ExitStack() as ending:
            rows = Rows(daemon.socket, "mine", PAGE, ending)
            for first in range(0, len(keys), _PROMPT):
                rows.store(keys[first : first + _PROMPT])
        with Client(daemon.socket) as client:
            wait_for(lambda: client.status(PATIENCE_S)["instances"] == 0, "the engine's end")
    finally:
        daemon.kill()


def first_answer(socket: str, keys: list[bytes]) -> int:
    """Connect as an engine as soon as that goes, and look up ``keys``. Returns how many are found,
    each as ``Rows`` has stored it; -1: one is another."""
    while not _listens(socket):
        time.sleep(_TRIES_S)
    with ExitStack() as ending:
        rows = Rows(socket, "mine", PAGE, ending, populate=False)
        matched = rows.find(keys)
        right = not matched.chunks or rows.holds(matched, keys[: matched.chunks])
        return matched.chunks if right else -1


def _listens(path: str) -> bool:
    with sockets.socket(sockets.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def _python_s() -> float:
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.monotonic() - began_s


if __name__ == "__main__":
    sys.exit(main())
