"""The command ``kvass top``: shows the status of a daemon again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from kvass.cli import daemon
from kvass.cli.report import report, size
from kvass.errors import Unavailable

_CLEAR: Final = "\x1b[H\x1b[J"
_ANSWER_S: Final = 2.0


def run(argv: list[str]) -> int:
    """Print the status again and again, with rates per second, until Ctrl-C."""
    parser = daemon.parser_of("top", "Watch a daemon; Ctrl-C ends it.")
    parser.add_argument(
        "--every",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds between two looks (default: 2)",
    )
    parser.add_argument(
        "--times",
        type=int,
        default=0,
        metavar="N",
        help="end after this many looks (default: 0, never)",
    )
    own, named = daemon.parse(parser, argv)
    before: tuple[float, dict[str, Any]] | None = None
    shown = 0
    clear = _CLEAR if sys.stdout.isatty() else ""
    with daemon.client(named) as client:
        while True:
            try:
                now = time.monotonic(), client.status(_ANSWER_S)
                lines = [*report(now[1]), "", *rates(before, now)]
                before = now
            except Unavailable as error:
                lines, before = [str(error)], None
            print(clear + "\n".join(lines), flush=True)
            shown += 1
            if shown == own.times:
                return 0
            time.sleep(max(0.1, own.every))


def rates(
    before: tuple[float, dict[str, Any]] | None, now: tuple[float, dict[str, Any]]
) -> Iterator[str]:
    """The lines with rates per second between two statuses of one boot, each with its time."""
    if before is None or before[1]["boot"] != now[1]["boot"]:
        return
    (began_s, old), (ended_s, new) = before, now
    took_s = max(ended_s - began_s, 1e-9)

    def rate(fields: str, table: str) -> float:
        after, first = (float(sum(one.get(fields, 0) for one in x[table])) for x in (new, old))
        return max(0.0, (after - first) / took_s)

    input_tokens, hit_tokens = (
        rate(name, "namespaces") for name in ("lookup_tokens", "hit_tokens")
    )
    loaded, stored = rate("loaded_bytes", "tiers"), rate("stored_bytes", "tiers")
    written, read = (
        (new["counters"].get(name, 0) - old["counters"].get(name, 0)) / took_s
        for name in ("l1_in_bytes", "l1_lent_bytes")
    )
    yield (
        f"now      {rate('lookups', 'namespaces'):,.1f} lookups/s, {hit_tokens:,.0f} of "
        f"{input_tokens:,.0f} tokens/s hit"
    )
    yield (
        f"         memory {size(written)}/s in, {size(read)}/s out; tiers {size(stored)}/s in, "
        f"{size(loaded)}/s out"
    )
