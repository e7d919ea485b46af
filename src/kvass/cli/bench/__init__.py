"""``kvass bench``: how fast kvass is on this machine, as ratios to what the machine can do.

Bytes are compared after every load and every 16th lookup (exit status 1 if they differ), hits are
counted, and every ratio is the median over rounds in which both sides alternate. Without
``--socket`` it measures a daemon of its own; with it, a namespace of its own in that daemon, which
may evict others' rows to make room. ``--tier URL`` measures a tier instead: see ``tiers``.

What the names mean:

- ``ready_s``: from the daemon's start to its ready line.
- ``store_vs_memcpy``: reserve, copies, commit of 4,096 tokens of a Llama-8B layout (512 MiB as 16
  rows of 32 layers, K and V, scattered runs of 32 KiB), against memcpy of the same bytes into the
  same kind of memory, row by row, one call each; ``load_vs_memcpy``: lookup, copies, release.
- ``..._one_call``: the same against *one* memcpy of all 512 MiB. Above a size that depends on the
  CPU's caches (12 MiB to 192 MiB) libc writes past them, which saves reading what is overwritten;
  where that size is more than a row, no copy of rows can do so.
- ``lookup_128k_us``: 512 keys (131,072 tokens in chunks of 256), all hits, chosen at random among
  65,536 rows of 4 KiB: found, pinned, answered. ``release_128k_us``: its release and the ping
  behind it, so until the daemon has carried it out.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from kvass._version import __version__
from kvass.cli.bench.copies import measure_copies
from kvass.cli.bench.figures import add, table
from kvass.cli.bench.lookups import measure_lookups
from kvass.cli.bench.machine import say, start_daemon
from kvass.cli.bench.tiers import measure_tier
from kvass.config import Parser, Size, load
from kvass.errors import ConfigError

MIN_ROUNDS = 7


def run(argv: Sequence[str]) -> int:
    """Measure and print; the exit status is 1 if loaded bytes differed from stored ones."""
    args = flags("kvass bench").parse_args(argv)
    check(args)
    if args.tier is not None:
        figures = measure_tier(args.tier, args.rounds)
    else:
        figures = measure(chosen_socket(args), args.l1_size, args.rounds)
    print(json.dumps(figures) if args.json else table(figures))
    return 0 if figures["bytes_equal"] else 1


def flags(prog: str) -> Parser:
    """The command's flags."""
    parser = Parser(prog=prog, description="measure this machine, against memcpy")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--socket", metavar="PATH", help="measure this daemon, not one of our own")
    parser.add_argument("--tier", metavar="URL", help="measure a tier instead: disk:PATH")
    parser.add_argument(
        "--l1-size", default="3GiB", type=_size, metavar="SIZE", help="of our own daemon (3GiB)"
    )
    parser.add_argument(
        "--rounds", default=9, type=int, metavar="N", help=f"at least {MIN_ROUNDS} (9)"
    )
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises ``ConfigError`` for flags that do not go together."""
    if args.rounds < MIN_ROUNDS:
        raise ConfigError(f"--rounds {args.rounds}: use {MIN_ROUNDS} or more, or medians are noise")
    if args.tier is not None and args.socket:
        raise ConfigError("--tier measures a tier without your daemon: leave out --socket")


def chosen_socket(args: argparse.Namespace) -> str | None:
    """The daemon to measure; None: one of our own."""
    if args.socket or "KVASS_SOCKET" in os.environ:
        return load({"socket": args.socket}, os.environ).socket
    return None


def measure(socket: str | None, l1_bytes: int, rounds: int) -> dict[str, Any]:
    """All figures, by the names in this module's docstring. Raises ``KvassError``."""
    say("a daemon" if socket is None else f"the daemon at {socket}")
    figures: dict[str, Any] = {"version": __version__, "cores": os.cpu_count(), "rounds": rounds}
    with start_daemon(socket, l1_bytes) as daemon:
        figures["ready_s"] = daemon.ready_s
        arena_bytes = daemon.wait_populated()
        say(f"store and load, {rounds} rounds of 512 MiB")
        add(figures, measure_copies(daemon.socket, arena_bytes, rounds))
        say("lookups among 65,536 rows")
        add(figures, measure_lookups(daemon.socket))
    return figures


def _size(text: str) -> int:
    try:
        return Size.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
