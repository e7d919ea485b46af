"""What a warm start brings and costs: ``python -m bench.warm_start disk:FOLDER``.

16 prompts of 32 MiB in rows of 2 MiB are stored on a disk, the last one last. Then daemons of 2 GiB
start on it, ``--rounds`` times without and with ``--warm-start 0.5``, in turns. Of each figure it
prints the median and the range: without a warm start (``cold``), and with it (``warm``).

- ``first_ms``: a lookup of the prompt that was stored last, from the disk or after the warm start.
- ``warm_s``: the time of the warm start, from the engine's registration on.
- ``beside_ms``: lookups of the first 4 prompts, from the disk, one after another: the second daemon
  of a round, whose warm start runs meanwhile (``beside_a_warm_start``: in how many rounds it still
  ran after them).
- ``hit_us``: 200 lookups of a prompt that L1 has, after these.

The exit status is 1 if a lookup found less than its prompt, or a byte was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from statistics import median
from typing import Any, Final

from bench.rows import Rows
from kvass.cli.bench.disk import spelled
from kvass.cli.bench.rig import WIDTH, start_daemon, wait_for
from kvass.tiers.url import parse_tier_url

_ROW: Final = 2 << 20
_CHUNKS: Final = 16
_PROMPTS: Final = 16
_L1: Final = 2 << 30
_HITS: Final = 200


class Round:
    """One life of a daemon on the tier. ``share``: of ``--warm-start``."""

    def __init__(self, url: str, share: float, ending: ExitStack) -> None:
        flags = ("--tier", url, "--warm-start", str(share), "--skip-slow-loads", "no")
        self.socket = ending.enter_context(start_daemon(_L1, *flags)).socket
        self.rows = Rows(self.socket, "bench", _ROW, ending)
        self.rows.find([os.urandom(WIDTH)])  # the tier has told its epoch then
        self.right = True

    def look_up(self, prompt: list[bytes]) -> float:
        """The seconds of a lookup, until its answer."""
        began_s = time.perf_counter()
        found = self.rows.find(prompt)
        took_s = time.perf_counter() - began_s
        self.right &= found.chunks == len(prompt) and self.rows.holds(found, prompt)
        self.rows.release(found)
        return took_s

    def is_warm(self) -> bool:
        status = self.rows.scheduler.status()
        loaded = status["counters"]["warm_start_rows"]
        return bool(loaded and not status["warm_start_planned_bytes"])


def measure(url: str, prompts: list[list[bytes]], share: float) -> dict[str, Any]:
    """The figures of a round."""
    figures: dict[str, Any] = {}
    with ExitStack() as ending:
        each = Round(url, share, ending)
        began_s = time.perf_counter()
        if share:
            wait_for(each.is_warm, "the warm start")
            figures["warm_s"] = time.perf_counter() - began_s
        figures["first_ms"] = 1e3 * each.look_up(prompts[-1])
        right = each.right
    with ExitStack() as ending:
        each = Round(url, share, ending)
        figures["beside_ms"] = [1e3 * each.look_up(prompt) for prompt in prompts[:4]]
        figures["beside_ms"] = median(figures["beside_ms"])
        figures["beside_a_warm_start"] = bool(share) and not each.is_warm()
        figures["hit_us"] = median(1e6 * each.look_up(prompts[0]) for _ in range(_HITS))
    return {**figures, "right": right and each.right}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure the median, the least and the most."""
    shown: dict[str, Any] = {}
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        few = [round(float(f(values)), 2) for f in (median, min, max)]
        shown[name] = sum(values) if isinstance(values[0], bool) else few
    return shown


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.warm_start", description=__doc__)
    parser.add_argument("url", type=parse_tier_url, metavar="disk:FOLDER")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    prompts = [[os.urandom(WIDTH) for _ in range(_CHUNKS)] for _ in range(_PROMPTS)]
    with tempfile.TemporaryDirectory(prefix="kvass-bench-", dir=options.url.where) as folder:
        url = spelled("disk", folder, {"capacity": "4GiB"})
        with ExitStack() as ending:
            first = Round(url, 0.5, ending)
            for prompt in prompts:
                first.rows.store(prompt)
        cold, warm = list[dict[str, Any]](), list[dict[str, Any]]()
        for number in range(options.rounds):
            turns = [(cold, 0.0), (warm, 0.5)]
            for rounds, share in turns[:: -1 if number % 2 else 1]:
                rounds.append(measure(url, prompts, share))
    print(json.dumps({"cold": summary(cold), "warm": summary(warm)}, indent=1))
    return 0 if all(each["right"] for each in (*cold, *warm)) else 1


if __name__ == "__main__":
    sys.exit(main())
