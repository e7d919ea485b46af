"""What is sampled while a soak runs, what must be true of it at the end, and a page with plots.

Growth is judged for each process that is there at the end, from the samples of its own life: the
median of the second quarter against that of the last, if it has lived for ``LIFE_S``. The
first quarter is left out because caches and indexes fill then. What may differ:

- In use (``memory``): 1 MiB of malloc's, 2,000 of Python's blocks. When the process of the disk
  tier lost an object for each loaded record, it had 24,000 blocks more after six minutes; as it is,
  30 more after twelve. The daemon's grows ever slower as its books fill: 0.5 MiB in twelve minutes.
  In an hour with the lookups of 32 engines it grew by 3 % between these quarters, so now
  ``checked_daemon`` keeps those of two.
- Private memory: ``HEAP_BYTES``. It also counts what malloc keeps free for the next time that many
  threads need memory at once. The processes of tiers grow by 0.4 MiB, engines by 5 MiB.
- Descriptors and threads: those of one engine, which may be away in one quarter and not in the
  other. Files of the disk tier's segments come and go with what it holds: one descriptor of each
  that exists does not count.
  After the engines have ended the daemon must have exactly as many as a new one.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from kvass.errors import KvassError
from kvass.simulate.report import Line, head, plot
from kvass.tiers.disk.segment import SEGMENT, TABLE
from tests.support.soak.memory import told
from tests.support.soak.world import DISK_BYTES, World

LIFE_S: Final = 120.0
LEAST_HIT_RATE: Final = 0.1
NOTICED_S: Final = 3.0
"""A portal that is there for so long is noticed."""
AWAY_S: Final = 10.0
"""What failed over is used again by then."""
ONE_ENGINE: Final = 6
"""Its scheduler and four ranks, and what is being opened."""
HEAP_BYTES: Final = 8 << 20
MAY_GROW: Final = {
    "private_bytes": HEAP_BYTES,
    "descriptors": ONE_ENGINE,
    "threads": ONE_ENGINE,
    "malloc_bytes": 1 << 20,
    "python_blocks": 2000,
}
"""The figures of a process. Private: without shared memory and libraries, of which each process has
a part that depends on how many others there are."""
HELD: Final = (
    *("leases", "reservations", "pins", "quarantined_bytes", "rows_loading"),
    *("promotions", "instances"),
)
"""Nothing of it may be left after the engines have ended."""
_POINTS: Final = 600
_SEGMENTS: Final = (SEGMENT, TABLE)
"""The names of deleted files end with `` (deleted)``."""

Sample = dict[str, Any]


def process_figures(pid: int, folder: Path) -> Sample:
    """The figures of ``MAY_GROW``, the last two only of those that tell them, and whose they are.
    Raises ``OSError`` if it has ended."""
    proc = Path("/proc") / str(pid)
    lines = [line.split() for line in (proc / "smaps_rollup").read_text().splitlines()[1:]]
    kib = {words[0]: int(words[1]) for words in lines}
    files = [_target(link) for link in (proc / "fd").iterdir()]
    segments = {n for n in files if n.startswith(f"{folder}/disk/") and n.endswith(_SEGMENTS)}
    descriptors = len(files) - len(segments)
    threads = len(list((proc / "task").iterdir()))
    seen = {"private_bytes": kib["Pss_Anon:"] << 10, "descriptors": descriptors}
    return {"pid": pid, **seen, "threads": threads, **told(folder, pid)}


def _target(link: Path) -> str:
    """What a descriptor is of; empty if it was closed meanwhile."""
    with suppress(OSError):
        return str(link.readlink())
    return ""


def sample(world: World, at_s: float) -> Sample:
    """What can be seen now: a daemon that does not answer has no ``HELD``."""
    taken: Sample = {"s": round(at_s, 2), "disk_bytes": world.disk_bytes()}
    total = {"asked": 0, "hit": 0}
    for engine in world.engines:
        total = {name: n + engine.total[name] for name, n in total.items()}
    taken |= total
    pids = {"engine 0": world.engines[0].process.pid, "daemon": world.daemon.pid}
    tiers = {f"{name} tier": world.tier_pid(name) for name in world.tiers}
    for name, pid in {**pids, **tiers}.items():
        with suppress(OSError):
            if pid is not None:
                taken[name] = process_figures(pid, world.folder)
    with suppress(KvassError):
        status = world.client.status(0.3)
        taken |= {name: status[name] for name in HELD}
        schemes = {t["tier"].partition(":")[0]: t for t in status["tiers"]}
        taken["tiers"] = {name: t.get("loaded_rows", 0) for name, t in schemes.items()}
        taken["up"] = {name: t.get("up", False) for name, t in schemes.items()}
        taken["compressed"] = {
            name: t["compressed_records"]
            for name, t in schemes.items()
            if t.get("compress") == "on"
        }
        taken["tenants"] = {
            t["tenant"]: (t["l1_bytes"], t["cap_bytes"])
            for t in status["tenants"]
            if t["cap_bytes"] is not None
        }
    return taken


class Check(NamedTuple):
    """One line of the verdict."""

    ok: bool
    what: str


def _processes(samples: Sequence[Sample]) -> list[str]:
    named = (n for s in samples for n in s if isinstance(s[n], dict) and "pid" in s[n])
    return [*dict.fromkeys(named)]


def growth(samples: Sequence[Sample]) -> list[Check]:
    """Of each figure of each process (see the top of this file)."""
    checks = []
    for name in _processes(samples):
        seen = [(s["s"], s[name]) for s in samples if name in s]
        life = [(at, figures) for at, figures in seen if figures["pid"] == seen[-1][1]["pid"]]
        quarter, lasted_s = len(life) // 4, life[-1][0] - life[0][0]
        if lasted_s < LIFE_S or not quarter:
            continue
        for figure, allowed in MAY_GROW.items():
            values = [figures[figure] for _, figures in life if figure in figures]
            if len(values) < len(life) - quarter // 2:  # it tells nothing
                continue
            before, after = median(values[quarter : 2 * quarter]), median(values[-quarter:])
            text = f"growth of {name} in {lasted_s:.0f} s, {figure}: {before:,.0f}, {after:,.0f}"
            checks.append(Check(after <= before + allowed, text))
    return checks


def verdict(samples: Sequence[Sample], tally: Mapping[str, int], log: str) -> list[Check]:
    """``tally``: how often each kind of mischief happened. ``log``: the daemon's."""
    asked, hit = samples[-1]["asked"], samples[-1]["hit"]
    rate, disk = hit / max(1, asked), max(s["disk_bytes"] for s in samples)
    tiers = dict.fromkeys(name for s in samples for name in s.get("tiers", ()))
    loaded = {n: max(s.get("tiers", {}).get(n, 0) for s in samples) for n in tiers}
    if samples[-1]["s"] < LIFE_S:  # it is too short to warm up
        floor, enough = 0.001, True
    else:
        floor, enough = LEAST_HIT_RATE, bool(loaded) and all(loaded.values())
    traces = log.count("Traceback")
    never = [name for name, times in tally.items() if not times]
    return [
        Check(rate >= floor, f"hit rate {rate:.1%}, at least {floor:.1%}"),
        Check(enough, f"rows loaded by tiers, in one boot: {loaded}"),
        Check(disk <= DISK_BYTES, f"disk: at most {disk:,} of {DISK_BYTES:,} bytes"),
        Check(not never, f"mischief that never happened: {', '.join(never) or 'none'}"),
        Check(not traces, f"tracebacks in the daemon's log: {traces}"),
        *caps(samples),
        *compressed(samples),
        *growth(samples),
    ]


def stores(samples: Sequence[Sample]) -> list[Check]:
    """Of a soak whose stores lie (``stores``): a portal is no store, what failed over is soon used
    again, and rows are loaded from both to the end."""
    last = samples[3 * len(samples) // 4 :]
    spans = [list(g) for yes, g in groupby(samples, _portal) if yes]
    long = [span for span in spans if span[-1]["s"] - span[0]["s"] >= NOTICED_S]
    noticed = sum(any(_down(one, "s3") for one in span) for span in long)
    away = [list(g) for yes, g in groupby(samples, lambda one: _down(one, "redis")) if yes]
    longest_s = max((span[-1]["s"] - span[0]["s"] for span in away), default=0.0)
    loads = [one["tiers"] for one in last if "tiers" in one]
    loaded = {name: loads[-1][name] - loads[0][name] for name in loads[-1]}
    return [
        Check(noticed == len(long), f"S3 was down in {noticed} of {len(long)} times as a portal"),
        Check(longest_s <= AWAY_S, f"Redis was down {len(away)} times, at most {longest_s:.1f} s"),
        Check(all(loaded.values()), f"rows loaded by tiers in the last quarter: {loaded}"),
    ]


def _portal(one: Sample) -> bool:
    return "s3 is a portal" in one["doing"]


def _down(one: Sample, tier: str) -> bool:
    return not one.get("up", {}).get(tier, True)


def caps(samples: Sequence[Sample]) -> list[Check]:
    """No tenant has more of L1 than its cap, and each had some."""
    most: dict[str, tuple[int, int]] = {}
    for one in samples:
        for tenant, now in one.get("tenants", {}).items():
            most[tenant] = max(most.get(tenant, now), now)
    return [
        Check(0 < taken <= cap, f"L1 of {tenant}: at most {taken:,} of {cap:,} bytes")
        for tenant, (taken, cap) in most.items()
    ]


def compressed(samples: Sequence[Sample]) -> list[Check]:
    """Each tier with ``compress=lossless`` has compressed records."""
    most: Counter[str] = Counter()
    for one in samples:
        most |= Counter(one.get("compressed", {}))
    tiers = {name for one in samples for name in one.get("compressed", {})}
    return [
        Check(most[name] > 0, f"records compressed by {name}, in one boot: {most[name]:,}")
        for name in sorted(tiers)
    ]


def page(title: str, verdict_: Sequence[Check], samples: Sequence[Sample], text: str) -> str:
    """``text``: what else there is to read."""
    of = samples[:: max(1, len(samples) // _POINTS)]
    names = _processes(of)
    plots = {
        what: [
            (n, [(s["s"], s[n][figure] / unit) for s in of if figure in s.get(n, ())])
            for n in names
        ]
        for what, figure, unit in (
            ("private memory (MiB)", "private_bytes", 1 << 20),
            ("of it in use by malloc (MiB)", "malloc_bytes", 1 << 20),
            ("Python's blocks", "python_blocks", 1),
            ("descriptors", "descriptors", 1),
            ("threads", "threads", 1),
        )
    }
    plots["bytes (MiB)"] = [
        (n, [(s["s"], s[n] / (1 << 20)) for s in of if n in s])
        for n in ("disk_bytes", "quarantined_bytes")
    ]
    plots["held"] = [(n, [(s["s"], s[n]) for s in of if n in s]) for n in HELD if "bytes" not in n]
    plots["hit rate"] = [("so far", [(s["s"], s["hit"] / max(1, s["asked"])) for s in of])]
    parts = [head(title)]
    parts += [f"<p>{'' if c.ok else '<b>NOT: </b>'}{html.escape(c.what)}</p>" for c in verdict_]
    for what, lines in plots.items():
        drawn: list[Line] = [(name, points) for name, points in lines if points]
        if drawn:
            parts += [f"<h2>{what}</h2>", plot(drawn, "time (s)", what=what)]
    return "\n".join([*parts, f"<pre>{html.escape(text)}</pre></html>\n"])
