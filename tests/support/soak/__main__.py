"""Plays a trace through a real daemon while its processes are killed, suspended and restarted.

``make soak MINUTES=10``. What is done when follows from ``--seed``, which is printed. Every page
that is loaded is checked. The run ends at the first wrong byte, or when a process ends that nobody
killed. ``--out`` gets ``samples.jsonl``, ``events.txt`` and ``soak.html``; the exit status is 0 if
all of the verdict holds (``record.verdict``).
"""

from __future__ import annotations

import heapq
import json
import os
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from msgspec.structs import replace

from kvass.errors import KvassError
from kvass.simulate.synth import KINDS, write
from tests.support.soak.engine import Setup
from tests.support.soak.nodes import MISCHIEF as NODES
from tests.support.soak.nodes import NodesWorld
from tests.support.soak.record import HELD, Check, page, process_figures, sample, verdict
from tests.support.soak.record import stores as judged
from tests.support.soak.stores import MISCHIEF as STORES
from tests.support.soak.stores import StoresWorld
from tests.support.soak.world import EARLY, MISCHIEF, PROGRAM, SELDOM, Mischief, SoakError, World

GAP_S: Final = 4.0
"""Between the beginnings of two, on average, unless it is asked for otherwise."""
LASTS_S: Final = 0.5
"""On average, or half the gap if that is longer."""
LONGEST_S: Final = 8.0
"""Something is suspended or away; longer than leases, reservations and a tier's heartbeats."""
AGAIN_S: Final = 0.1
"""What cannot begin now is tried again so much later."""
REQUESTS: Final = 300
REQUESTS_S: Final = 8
"""Of a made-up trace, which is played again and again: so many, and no more for each second."""
STEADY: Final = 10
"""So many looks in turn."""
QUIET_S: Final = 90.0
"""A tier that failed often is tried again after a minute."""
SOAK: Final = "tests.support.soak"
REAL: Final = ("vllm", "gemma3", "nodes", "sglang", "transformers")
QUOTAS: Final = {"sglang": "4MiB:2MiB", "transformers": "1MiB:1MiB"}
"""The tenants of real engines: less than what they store."""
_EVENTS: Final = 40


class Planned(NamedTuple):
    """``number`` says which engine."""

    at_s: float
    what: str
    lasts_s: float
    number: int


def plan(
    seed: int, seconds: float, mischief: Collection[str], gap_s: float = GAP_S
) -> Iterator[Planned]:
    """All kinds in turn, in a new order each time; ``EARLY`` ones in the first quarter only."""
    random, at_s = Random(seed), 0.0
    gap_s = min(gap_s, 0.7 * seconds / len(mischief))
    mean_s = max(LASTS_S, gap_s / 2)
    while at_s < seconds:
        late = at_s > seconds / 4
        left_out = (EARLY if late else ()) + (SELDOM if at_s and random.random() < 2 / 3 else ())
        kinds = [what for what in mischief if what not in left_out]
        first = () if at_s else (*EARLY, *SELDOM)  # so they are over soon in a short run, too
        for what in sorted(kinds, key=lambda what: (what not in first, random.random())):
            lasts_s = min(random.expovariate(1 / mean_s), LONGEST_S)
            yield Planned(at_s, what, lasts_s, random.randrange(1 << 16))
            pause_s = random.expovariate(1 / gap_s)
            at_s += pause_s if late else min(gap_s, pause_s)


class Soak:
    """One run. ``mischief``: as ``MISCHIEF``."""

    def __init__(
        self, world: World, out: Path, mischief: Mapping[str, tuple[str, Mischief]]
    ) -> None:
        self.world, self.out, self.mischief = world, out, mischief
        self.samples: list[dict[str, object]] = []
        self.tally = Counter(dict.fromkeys(mischief, 0))
        self.events: list[str] = []
        self._busy = set[str]()
        self._ends: list[tuple[float, int, str, Iterator[None]]] = []
        self._began_s = time.monotonic()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    def note(self, text: str) -> None:
        self.events.append(f"{self.now_s:8.2f} {text}")

    @contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        """A daemon takes its time to end and to start; meanwhile nothing else is done."""
        began_s = time.monotonic()
        yield
        self._began_s += time.monotonic() - began_s

    def run(self, planned: Iterator[Planned], seconds: float) -> list[Check]:
        """Returns the verdict. Raises ``SoakError``."""
        due = list(planned)
        while not all(engine.serves for engine in self.world.engines):
            self._listen()
            time.sleep(0.02)
        self._began_s = time.monotonic()
        every_s, sample_s = min(1.0, seconds / 40), 0.0
        while self.now_s < seconds or (not all(self.tally.values()) and self.now_s < 4 * seconds):
            while due and due[0].at_s <= self.now_s:
                one = heapq.heappop(due)
                if not self._begin(one):
                    heapq.heappush(due, one._replace(at_s=self.now_s + AGAIN_S))
            self._end(self.now_s)
            self._listen()
            if self.now_s >= sample_s:
                doing = {"doing": [what for *_, what, _ in self._ends]}
                self.samples.append(sample(self.world, self.now_s) | doing)
                sample_s = self.now_s + every_s
            time.sleep(0.02)
        self._end(float("inf"))
        checks = verdict(self.samples, self.tally, self.world.daemon.log())
        return [*checks, *self._quiet()]

    def _listen(self) -> None:
        for engine in self.world.engines:
            for line in engine.hear():
                self.note(f"{engine.name}: request {line.n}: {line.hit} of {line.asked} chunks")
        self.world.check_alive()

    def _begin(self, one: Planned) -> bool:
        needs, mischief = self.mischief[one.what]
        if self._busy & set(needs.split()):
            return False
        done = mischief(self.world, one.number)
        with self._clock_stopped():
            if next(done, self) is self:
                return False
        self.note(f"{one.what} for {one.lasts_s:.2f} s")
        self.tally[one.what] += 1
        self._busy |= set(needs.split())
        number = sum(self.tally.values())
        heapq.heappush(self._ends, (self.now_s + one.lasts_s, number, one.what, done))
        return True

    def _end(self, by_s: float) -> None:
        while self._ends and self._ends[0][0] <= by_s:
            _, _, what, done = heapq.heappop(self._ends)
            with self._clock_stopped():
                next(done, None)
            self.note(f"no longer: {what}")
            self._busy -= set(self.mischief[what][0].split())

    def _quiet(self) -> list[Check]:
        """The engines end: nothing may be held, and the daemon is as a new one."""
        self.world.end_engines()
        held, used = self._at_rest()
        self.world.stop_daemon()
        self.world.start_daemon()
        _, new = self._at_rest()
        text = f"the daemon's descriptors and threads: {used}, of a new one: {new}"
        return [
            Check(not held, f"held after the engines ended: {held or 'nothing'}"),
            Check(used == new, text),
        ]

    def _at_rest(self) -> tuple[dict[str, object], tuple[int, int]]:
        """What the daemon still holds when it should hold nothing, and what it has open."""
        deadline_s = time.monotonic() + QUIET_S
        while True:
            status = self.world.client.status(QUIET_S)
            held = {name: status[name] for name in HELD if status[name]}
            held |= self.world.held_elsewhere(HELD)
            if status["sessions"] > 1:  # ours
                held["sessions"] = status["sessions"]
            if status["l1_populated_bytes"] < status["l1_capacity_bytes"]:
                held["populated"] = status["l1_populated_bytes"]
            for tier in status["tiers"]:
                left = tier["flush_queue_rows"] + tier["storing_bytes"]
                if left or not tier.get("up"):
                    held[tier["tier"]] = f"{left} to store, {tier.get('trouble') or 'up'}"
            if not held or time.monotonic() > deadline_s:
                return held, self._open()
            time.sleep(0.05)

    def _open(self) -> tuple[int, int]:
        """The daemon's descriptors and threads, once they have been the same for a while: the
        thread that has populated L1 ends a little later."""
        seen: list[tuple[int, int]] = []
        for _ in range(20 * STEADY):
            figures = process_figures(self.world.daemon.pid, self.world.folder)
            seen.append((figures["descriptors"], figures["threads"]))
            if len(seen) >= STEADY and len(set(seen[-STEADY:])) == 1:
                break
            time.sleep(0.05)
        return seen[-1]


def soak(
    seed: int,
    seconds: float,
    out: Path,
    *,
    trace: Path | None = None,
    engines: int = 4,
    real: Mapping[str, int] | None = None,
    rate: float = 5.0,
    gap: float = GAP_S,
    mischief: Mapping[str, tuple[str, Mischief]] = MISCHIEF,
    stores: bool = False,
    compress: str = "",
    program: Sequence[str] = PROGRAM,
) -> list[Check]:
    """The verdict of one run. ``real``: how many real engines of each kind. ``rate``: requests a
    second of each engine. ``gap``: ``GAP_S``. ``stores``: stores lie, and nothing else is done.
    ``compress``: of all tiers. ``program``: as for ``Daemon``."""
    out.mkdir(parents=True, exist_ok=True)
    if trace is None:
        trace = out / "trace.jsonl"
        trace.unlink(missing_ok=True)
        write(trace, KINDS[seed % len(KINDS)], min(REQUESTS, int(REQUESTS_S * seconds)), seed)
    with tempfile.TemporaryDirectory(prefix="kvass-soak-") as folder:
        setups = setups_of(Path(folder), trace, seed, engines, real or {}, rate)
        daemon = options_of(seed, {setup.kind for setup in setups}, stores)
        kind, mischief = world_of(real or {}, stores, mischief)
        with closing(kind(Path(folder), setups, daemon, program, compress)) as world:
            run = Soak(world, out, mischief)
            try:
                checks = run.run(plan(seed, seconds, mischief, gap), seconds)
                checks += judged(run.samples) if stores else []
            except (SoakError, KvassError, RuntimeError) as error:
                checks = [Check(False, str(error))]
            pages = sum(e.total["pages"] for e in world.engines)
            checks.append(Check(pages > 0, f"{pages:,} loaded pages were right"))
            longest = max(e.longest_s for e in world.engines)
            requests = sum(e.total["requests"] for e in world.engines)
            text = f"seed {seed}, {seconds:.0f} s, {daemon}\n"
            text += f"{requests:,} requests, the longest {longest:.1f} s\n"
            text += "\n".join(f"{n:6} {what}" for what, n in run.tally.items())
            if not all(check.ok for check in checks):
                text += "\n".join(["\n\nthe last events:", *run.events[-_EVENTS:]])
            (out / "events.txt").write_text("\n".join(run.events) + "\n")
            (out / "daemon.log").write_text(world.daemon.log())
    with (out / "samples.jsonl").open("w") as file:
        file.writelines(json.dumps(one) + "\n" for one in run.samples)
    (out / "soak.html").write_text(page(f"kvass soak, seed {seed}", checks, run.samples, text))
    print(text)
    return checks


def world_of(
    real: Mapping[str, int], stores: bool, mischief: Mapping[str, tuple[str, Mischief]]
) -> tuple[type[World], Mapping[str, tuple[str, Mischief]]]:
    """The kind of the world, and what is done to it."""
    if stores:
        return StoresWorld, STORES
    return (NodesWorld, {**mischief, **NODES}) if real.get("nodes") else (World, mischief)


def setups_of(
    folder: Path, trace: Path, seed: int, engines: int, real: Mapping[str, int], rate: float
) -> list[Setup]:
    """Of all engines. The answers of real ones are asked of an engine without kvass."""
    kinds = [""] * engines + [kind for kind, count in real.items() for _ in range(count)]
    base = Setup(str(folder / "kvass.sock"), 0, len(kinds), str(trace), seed, rate=rate)
    answers = {"": ""}
    for kind in sorted({*kinds} - {""}):
        answers[kind] = import_module(f"{SOAK}.{kind}_engine").write_answers(trace, folder)
    return [
        replace(base, number=n, kind=kind, answers=answers[kind]) for n, kind in enumerate(kinds)
    ]


def options_of(
    seed: int, kinds: Collection[str], stores: bool = False
) -> dict[str, str | list[str]]:
    """The daemon's. With ``stores`` most hits are in tiers."""
    random = Random(seed)
    quotas = [f"{kind}={quota}" for kind, quota in QUOTAS.items() if kind in kinds]
    return {
        "l1_size": _l1_size(kinds, stores),
        "flush": random.choice(["write_through", "on_evict"]),
        "keep_loaded": random.choice(["yes", "no"]),
        **({"quota": quotas} if quotas else {}),
    }


def _l1_size(kinds: Collection[str], stores: bool) -> str:
    if QUOTAS.keys() & kinds:
        return "64MiB"
    return "32MiB" if {"vllm", "gemma3", "nodes"} & {*kinds} else "4MiB" if stores else "16MiB"


def main() -> int:
    parser = ArgumentParser(prog="python -m tests.support.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", type=Path, default=Path(".cache/soak"))
    parser.add_argument("--trace", type=Path, help="as for kvass simulate; default: a made-up one")
    parser.add_argument("--engines", type=int, default=4, help="fake engines, 2 or more")
    for kind in REAL:
        parser.add_argument(f"--{kind}", type=int, default=0, help=f"real {kind} engines, too")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second of each engine")
    parser.add_argument(
        "--gap", type=float, default=GAP_S, help="seconds from mischief to mischief"
    )
    parser.add_argument(
        "--stores", action="store_true", help="also S3; stores lie, and nothing else is done"
    )
    parser.add_argument("--compress", default="", help="of all tiers: lossless, auto, off")
    options = vars(parser.parse_args())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all processes are ended
    minutes = options.pop("minutes")
    options["real"] = {kind: options.pop(kind) for kind in REAL}
    os.environ.setdefault("SGLANG_OVERLAYS", str(Path(sys.prefix) / "overlays"))
    if options["real"]["sglang"] and not import_module(f"{SOAK}.sglang_engine").installed():
        parser.error("--sglang: SGLang is not installed: run make test-sglang once")
    print(f"seed {options['seed']}: {minutes:g} minutes, into {options['out']}", flush=True)
    checks = soak(seconds=minutes * 60, **options)
    for check in checks:
        print("ok " if check.ok else "NOT", check.what)
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
