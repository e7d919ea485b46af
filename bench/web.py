"""The cost of watching: a web process with dashboards, scrapes and ``kvass top`` on a busy daemon.

    python -m bench.web

Prints one JSON object. An engine asks for ``RATE`` lookups a second among 100,000 rows, in rounds
with and without watchers, in turns; each figure is the median of the rounds. Watchers are three
dashboards (a refresh every 2 s, as the page does), a scrape every 5 s, and ``kvass top``.

- ``cost_percent``: of a core: what the web process runs while lookups come, and what the watchers
  cost a daemon that has nothing else to do. (Of ``daemon_percent`` the lookups take most, and on a
  machine that others use it varies by more than watching costs.)
- ``web_pss_mib``: the web process's share of memory, after the round.
- ``alone_us``, ``watched_us``: round trips of the lookups, of 64 chunks, all hits; ``p99_ratio``:
  with watchers against without, of neighbouring rounds.
- ``metrics_ms``: a scrape for which the daemon is asked, while nothing else runs. ``cpu_...``: what
  both processes run for it; the rest of its time they wait for a core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar
from urllib.request import urlopen

import numpy as np

from bench.footprint import cpu_ns, pid_behind
from kvass.cli.bench.lookups import LAYOUT, fill
from kvass.cli.bench.rig import EngineConnections, percentiles_us, say, start_daemon
from kvass.messages import Release
from kvass.web.source import FRESH_S

ROWS: Final = 100_000
L1_BYTES: Final = 512 << 20
RATE: Final = 2000
KEYS: Final = 64
ROUND_S: Final = 10.0
SCRAPES: Final = 10
R = TypeVar("R")


class Daemon:
    """A daemon with ``ROWS`` rows, and an engine that asks for them."""

    def __init__(self, ending: ExitStack) -> None:
        self.socket = ending.enter_context(start_daemon(L1_BYTES)).socket
        self.pid = pid_behind(self.socket)
        self._engine = EngineConnections(self.socket, (LAYOUT,), ending)
        self._keys = fill(self._engine, ROWS)
        self._at = 0

    def ask(self, for_s: float) -> list[float]:
        """The round trips of ``RATE`` lookups a second, in seconds."""
        times, began_s = list[float](), time.perf_counter()
        for number in range(int(for_s * RATE)):
            wait_s = began_s + number / RATE - time.perf_counter()
            if wait_s > 0:
                time.sleep(wait_s)
            self._at = (self._at + KEYS) % (ROWS - KEYS)
            digests = b"".join(self._keys[self._at : self._at + KEYS])
            asked_s = time.perf_counter()
            matched = self._engine.look_up(digests)
            times.append(time.perf_counter() - asked_s)
            self._engine.workers[0].post(Release(boot=matched.boot, lease=matched.lease, rank=0))
        return times


@contextmanager
def web(socket: str) -> Iterator[tuple[int, str]]:
    """A web process of the daemon there: its id and its address."""
    command = [sys.executable, "-m", "kvass", "web", "--socket", socket]
    with _running([*command, "--http", "127.0.0.1:0"]) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1]
        scrape(url)
        yield process.pid, url


@contextmanager
def watchers(daemon: Daemon, url: str) -> Iterator[None]:
    """All that watch, in processes of their own."""
    with (
        _running([sys.executable, "-m", __spec__.name, "--watch", url]),
        _running([sys.executable, "-m", "kvass", "top", "--socket", daemon.socket]),
    ):
        time.sleep(1)
        yield


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    out = subprocess.PIPE if "web" in command else subprocess.DEVNULL
    with subprocess.Popen(command, stdout=out, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def watch(url: str) -> None:
    """Be three dashboards and Prometheus, until ended."""
    for tick in range(1 << 30):
        for _ in range(3):
            for path in ("/api/v1/status", f"/api/v1/history?since={time.time() - 2}"):
                urlopen(url + path, timeout=10).read()
        if tick % 5 in (0, 2):
            scrape(url)
        time.sleep(2)


def scrape(url: str) -> float:
    """How long one takes, in seconds."""
    began_s = time.perf_counter()
    urlopen(url + "/metrics", timeout=10).read()
    return time.perf_counter() - began_s


def pss_bytes(pid: int) -> int:
    """A process's share of memory."""
    return 1024 * int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("Pss:")[1].split()[0])


def measure_round(daemon: Daemon) -> dict[str, Any]:
    """Without watchers, then with them."""
    alone, times = _percents([daemon.pid], partial(daemon.ask, ROUND_S))
    figures: dict[str, Any] = {"alone_us": percentiles_us(times)}
    with web(daemon.socket) as (pid, url), watchers(daemon, url):
        watched, times = _percents([daemon.pid, pid], partial(daemon.ask, ROUND_S))
        idle, _ = _percents([daemon.pid], partial(time.sleep, ROUND_S))
        figures["web_pss_mib"] = pss_bytes(pid) / (1 << 20)
    figures["watched_us"] = percentiles_us(times)
    figures["p99_ratio"] = figures["watched_us"]["p99"] / figures["alone_us"]["p99"]
    figures["daemon_percent"] = {"alone": alone[0], "watched": watched[0], "idle": idle[0]}
    figures["web_percent"] = watched[1]
    figures["cost_percent"] = watched[1] + idle[0]
    return figures


def _percents(pids: Sequence[int], meanwhile: Callable[[], R]) -> tuple[list[float], R]:
    """What each process runs, in percent of a core, and the result of ``meanwhile``."""
    before, began_s = list(map(cpu_ns, pids)), time.monotonic()
    result = meanwhile()
    took_s = time.monotonic() - began_s
    return [(cpu_ns(p) - b) / 1e7 / took_s for p, b in zip(pids, before, strict=True)], result


def measure_scrapes(daemon: Daemon) -> dict[str, float]:
    """Of fresh figures, while nothing else asks for any."""
    with web(daemon.socket) as (pid, url):
        wall, ran = list[float](), list[float]()
        for _ in range(SCRAPES):
            time.sleep(FRESH_S + 0.05)
            before = cpu_ns(pid) + cpu_ns(daemon.pid)
            wall.append(scrape(url) * 1e3)
            ran.append((cpu_ns(pid) + cpu_ns(daemon.pid) - before) / 1e6)
    figures = {"p50": median(wall), "max": max(wall)}
    return figures | {"cpu_p50": median(ran), "cpu_max": max(ran)}


def medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure, in tables too."""
    return {
        name: medians([one[name] for one in rounds])
        if isinstance(value, dict)
        else round(float(np.median([one[name] for one in rounds])), 3)
        for name, value in rounds[0].items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.web", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=5, help="of each kind (%(default)s)")
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watch:
        watch(arguments.watch)
    with ExitStack() as ending:
        say(f"{ROWS:,} rows")
        daemon = Daemon(ending)
        scrapes, rounds = list[dict[str, float]](), list[dict[str, Any]]()
        for number in range(arguments.rounds):
            say(f"round {number + 1}")
            scrapes.append(measure_scrapes(daemon))
            rounds.append(measure_round(daemon))
    figures = {"rows": ROWS, "rounds": arguments.rounds, "metrics_ms": medians(scrapes)}
    print(json.dumps(figures | medians(rounds), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
