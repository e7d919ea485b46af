"""``kvass bench``: how fast kvass is on this machine, as ratios to what the machine can do.

It starts a daemon of its own. Bytes are compared after every load (exit status 1 if they differ),
hits are counted, and every ratio is the median over rounds in which both sides alternate.

What the names mean:

- ``ready_s``: from the daemon's start to its ready line.
- ``store_vs_memcpy``: reserve, copies, commit of 4,096 tokens of a Llama-8B layout (512 MiB as 16
  rows of 32 layers, K and V, scattered runs of 32 KiB), against memcpy of the same bytes into the
  same kind of memory, row by row, one call each; ``load_vs_memcpy``: lookup, copies, release.
- ``lookup_128k_us``: 512 keys (131,072 tokens in chunks of 256), all hits, chosen at random among
  65,536 rows of 4 KiB: found, pinned, answered. ``release_128k_us``: its release, until the daemon
  has carried it out.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from kvass._version import __version__
from kvass.cli.bench.copies import measure_copies
from kvass.cli.bench.lookups import measure_lookups
from kvass.cli.bench.rig import say, start_daemon, table
from kvass.config import Parser, Size
from kvass.errors import ConfigError

MIN_ROUNDS = 7


def run(argv: Sequence[str]) -> int:
    """Measure and print; the exit status is 1 if loaded bytes differed from stored ones."""
    args = parse(flags("kvass bench"), argv)
    figures = measure(args.l1_size, args.rounds)
    print(json.dumps(figures) if args.json else table(figures))
    return 0 if figures["bytes_equal"] else 1


def flags(prog: str) -> Parser:
    parser = Parser(prog=prog, description="measure this machine, against memcpy")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--l1-size",
        default="3GiB",
        type=_size,
        metavar="SIZE",
        help="L1 of the daemon that it starts (default: 3GiB)",
    )
    parser.add_argument(
        "--rounds",
        default=9,
        type=int,
        metavar="N",
        help=f"rounds per figure, {MIN_ROUNDS} or more (default: 9)",
    )
    return parser


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if args.rounds < MIN_ROUNDS:
        raise ConfigError(f"--rounds {args.rounds}: use {MIN_ROUNDS} or more, or medians are noise")
    return args


def measure(l1_bytes: int, rounds: int) -> dict[str, Any]:
    """All figures, by the names in this module's docstring. Raises ``KvassError``."""
    say("a daemon")
    figures: dict[str, Any] = {"version": __version__, "cores": os.cpu_count(), "rounds": rounds}
    with start_daemon(l1_bytes) as daemon:
        figures["ready_s"] = daemon.ready_s
        say(f"store and load, {rounds} rounds of 512 MiB")
        figures |= measure_copies(daemon.socket, rounds)
        say("lookups among 65,536 rows")
        figures |= measure_lookups(daemon.socket)
    return figures


def _size(text: str) -> int:
    try:
        return Size.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
