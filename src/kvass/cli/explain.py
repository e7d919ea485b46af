"""The command ``kvass explain``: says why the last requests did not hit more."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any, Final

from kvass.cli import daemon
from kvass.cli.report import WIDTH
from kvass.errors import ConfigError
from kvass.messages import MOST_EXPLAINED
from kvass.types import printable

_ENGINE_CHARS: Final = 8
"""How many characters of an engine's id are printed. ``--engine`` finds it by them."""


def run(argv: list[str]) -> int:
    """Print the last lookups. Raises ``ConfigError``, ``Unavailable``, ``Incompatible``."""
    parser = daemon.parser_of(
        "explain",
        "Say of the last requests how much of them was cached, and what ended the match. The "
        "newest is last.",
    )
    parser.add_argument(
        "-n",
        dest="limit",
        type=int,
        default=20,
        metavar="N",
        help=f"how many requests, 1 to {MOST_EXPLAINED} (default: 20)",
    )
    parser.add_argument(
        "--engine",
        default="",
        metavar="NAME",
        help="of one engine only: the beginning of its id, or a part of its model's name",
    )
    parser.add_argument(
        "--request", default="", metavar="ID", help="one request, by the id in the API's answer"
    )
    parser.add_argument("--json", action="store_true", help="print all fields as JSON")
    own, named = daemon.parse(parser, argv)
    if not 1 <= own.limit <= MOST_EXPLAINED:
        raise ConfigError(f"-n: {own.limit} is not in 1..{MOST_EXPLAINED}")
    with daemon.client(named) as client:
        found = client.explain(own.engine, own.request, own.limit)
    if own.json:
        print(json.dumps(found, indent=2))
    elif found:
        print("\n".join(line for one in found for line in lines(one, time.time())))
    elif own.request:
        print(f"request {printable(own.request)} is not among the last 256 of its engine")
    else:
        print("no request was looked up")
    return 0


def lines(entry: Mapping[str, Any], now_s: float) -> Iterator[str]:
    """The lines of one lookup. ``now_s``: seconds since 1970."""
    when = time.strftime("%H:%M:%S", time.localtime(now_s - entry["age_s"]))
    model = entry["model"].rstrip("/").rpartition("/")[2] if entry["model"][:1] == "/" else ""
    engine = f"{model or entry['model'] or '?'} ({entry['engine'][:_ENGINE_CHARS]})"
    yield printable(f"{when}  {entry['request']}  {engine}")
    tokens = f"{entry['prompt_tokens']:,}" if entry["prompt_tokens"] else "?"
    times = f", looked up {entry['times']:,} times" if entry["times"] > 1 else ""
    come = "would come " if entry.get("shadow") else ""
    yield (
        f"  {tokens} tokens: {entry['local_tokens']:,} in the engine's own cache, "
        f"{entry['hit_tokens']:,} {come}from kvass{times}"
    )
    text = printable(entry["text"])
    yield from wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
