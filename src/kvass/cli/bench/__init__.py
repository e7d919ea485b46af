"""``kvass bench``: how fast this machine's daemon is, as ratios to what the machine can do.

Law of this file: nothing is assumed. Bytes are compared after every load and every 16th lookup
(exit status 1 if they differ), hits are counted, and every ratio comes from rounds in which both
sides alternate. Without ``--socket`` it measures a daemon of its own; with it, a namespace of its
own in that daemon (which may evict others' rows to make room). ``--tier`` and ``--gpu`` measure
something else: see ``tiers`` and ``gpu``.

What the names mean:

- ``store_vs_memcpy``: reserve, copies, commit of 4,096 tokens of a Llama-8B layout (512 MiB as 16
  rows of 32 layers, K and V, scattered runs of 32 KiB), against memcpy of the same bytes into the
  same kind of memory, row by row, one call each; ``load_vs_memcpy``: lookup, copies, release.
  Both are medians of per-round ratios.
- ``..._one_call``: the same against *one* memcpy of all 512 MiB. Above a size that depends on the
  CPU's caches (12 MiB here, 192 MiB there) libc writes past them, which saves reading what is
  overwritten; where that size is more than a row, no copy of rows can do so.
- ``mla_...``: the same for DeepSeek-V3's layout: 61 layers of one plane, scattered runs of 18 KiB,
  rows of 17 MiB, 274 MiB in all.
- ``lookup_128k_us``: 512 keys (131,072 tokens in chunks of 256), all hits, chosen at random among
  65,536 rows of 4 KiB: found, pinned, answered. ``release_128k_us``: its release and the ping
  behind it, so until the daemon has carried it out. ``..._128k_tp8_us``: the same for eight ranks
  and rows of eight such shards; eight sessions release, and all eight pings must have come back.
- ``coverage_3x512_us``: how far 512 chunks reach in three layer groups at once (full, a window, a
  state), once the rows are found: the arithmetic alone, in the bench's own process.
- ``ping_rps``: empty round trips a second by 1 client, and by 16 that each wait for their own.
- ``longest_step_ms``: of the core with 1 TiB of 1 MiB rows, by what it is asked, in processor time;
  nobody else is answered meanwhile. It takes a minute.
- ``daemon_rss_mib``: VmRSS - RssShmem, so without the arena. ``daemon_idle_cpu_percent`` of a core.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from kvass._version import __version__
from kvass.cli.bench.copies import MLA, measure_copies
from kvass.cli.bench.index import measure_coverage, measure_index, measure_pings
from kvass.cli.bench.longest import measure_longest
from kvass.cli.bench.machine import first_touch_gbps, say, start_daemon
from kvass.config import Parser, Size, load
from kvass.errors import ConfigError

MIN_ROUNDS = 7


def run(argv: Sequence[str]) -> int:
    """Measure and print; the exit status is 1 if loaded bytes differed from stored ones."""
    args = parser().parse_args(argv)
    if args.rounds < MIN_ROUNDS:
        raise ConfigError(f"--rounds {args.rounds}: use {MIN_ROUNDS} or more, or medians are noise")
    if args.gpu:
        return _run_gpu(args)
    if args.tier is not None:
        figures = _measure_tier(args)
    else:
        socket = None
        if args.socket or "KVASS_SOCKET" in os.environ:
            socket = load({"socket": args.socket}, os.environ).socket
        figures = measure(socket, args.l1_size, args.rounds)
    print(json.dumps(figures) if args.json else table(figures))
    return 0 if figures["bytes_equal"] else 1


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    flags = Parser(prog="kvass bench", description="measure this machine, against memcpy")
    flags.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_argument("--socket", metavar="PATH", help="measure this daemon, not one of our own")
    flags.add_argument("--tier", metavar="URL", help="measure this tier, with a daemon of our own")
    flags.add_argument("--gpu", action="store_true", help="measure copies to and from this GPU")
    flags.add_argument(
        "--l1-size", default="3GiB", type=_size, metavar="SIZE", help="of our own daemon (3GiB)"
    )
    flags.add_argument(
        "--rounds", default=9, type=int, metavar="N", help=f"at least {MIN_ROUNDS} (9)"
    )
    return flags


def _run_gpu(args: argparse.Namespace) -> int:
    if args.tier is not None or args.socket:
        raise ConfigError("--gpu measures a GPU alone: leave out --tier and --socket")
    from kvass.cli.bench.gpu import gpu_table, measure_gpu
    from kvass.cli.bench.gpu_torch import open_device

    figures = measure_gpu(open_device(), args.l1_size, args.rounds)
    print(json.dumps(figures) if args.json else gpu_table(figures))
    return 0 if figures["bytes_equal"] else 1


def _measure_tier(args: argparse.Namespace) -> dict[str, Any]:
    if args.socket:
        raise ConfigError("--tier is measured with a daemon of its own: leave out --socket")
    from kvass.cli.bench.tiers import measure_tier

    return measure_tier(args.tier, args.l1_size, args.rounds)


def measure(socket: str | None, l1_bytes: int, rounds: int) -> dict[str, Any]:
    """All figures, by the names in this module's docstring. Raises ``KvassError``."""
    say("first touch of fresh shared memory")
    figures: dict[str, Any] = {"version": __version__, "cores": os.cpu_count(), "rounds": rounds}
    figures["first_touch_gbps"] = first_touch_gbps()
    say("a daemon" if socket is None else f"the daemon at {socket}")
    with start_daemon(socket, l1_bytes) as daemon:
        figures["ready_s"] = daemon.ready_s
        arena_bytes = daemon.wait_populated()
        say(f"store and load, {rounds} rounds of 512 MiB")
        add(figures, measure_copies(daemon.socket, arena_bytes, rounds))
        say(f"store and load under MLA, {rounds} rounds of 274 MiB")
        add(figures, measure_copies(daemon.socket, arena_bytes, rounds, layout=MLA), "mla_")
        for tp in (1, 8):
            say(f"lookups among 65,536 rows, ranks: {tp}")
            add(figures, measure_index(daemon.socket, tp=tp))
        say("pings")
        figures["coverage_3x512_us"] = measure_coverage()
        figures["ping_rps"] = {str(n): measure_pings(daemon.socket, n) for n in (1, 16)}
        say("the longest step at 1 TiB of 1 MiB rows")
        figures |= measure_longest()
        say("an idle daemon")
        figures["daemon_rss_mib"] = daemon.rss_mib()
        figures["daemon_idle_cpu_percent"] = daemon.idle_cpu_percent()
    return figures


def add(figures: dict[str, Any], more: dict[str, Any], prefix: str = "") -> None:
    """Put ``more`` to ``figures``, with one ``bytes_equal`` for all of them."""
    same = more.pop("bytes_equal") and figures.get("bytes_equal", True)
    figures |= {prefix + name: figure for name, figure in more.items()} | {"bytes_equal": same}


def table(figures: dict[str, Any]) -> str:
    """The figures as lines for a person."""
    flat: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            flat |= {f"{name} {part}": one for part, one in value.items()}
        else:
            flat[name] = value
    width = max(map(len, flat))
    return "\n".join(f"{name:<{width}}  {shown(value):>12}" for name, value in flat.items())


def shown(value: bool | str | float | None) -> str:
    """One figure, in as many digits as mean something."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return str(value)


def _size(text: str) -> int:
    try:
        return Size.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
