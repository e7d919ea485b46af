"""``python -m bench``: see the package's docstring."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bench import engine, sglang, tiers
from bench.core_time import measure_coverage, measure_longest
from bench.footprint import first_touch_gbps, measure_footprint
from bench.pages import measure_pages
from bench.pings import measure_pings
from bench.segments import measure_segments
from kvass._version import __version__
from kvass.cli import bench as shipped
from kvass.cli.bench.lookups import measure_lookups
from kvass.cli.bench.rig import say, start_daemon, table
from kvass.errors import KvassError, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except KvassError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def run(argv: Sequence[str]) -> int:
    """The same, but raises ``KvassError``."""
    parser = shipped.flags("python -m bench")
    parser.add_argument("--tier", metavar="URL", help="measure a tier instead: disk:PATH")
    parser.add_argument("--engine", action="store_true", help="measure vLLM with and without kvass")
    parser.add_argument("--sglang", action="store_true", help="measure SGLang with kvass and file")
    parser.add_argument(
        "--blend",
        action="store_true",
        help="measure transformers with blend; with --engine, vLLM with blend",
    )
    args = shipped.parse(parser, argv)
    shown: Callable[[dict[str, Any]], str] = table
    if args.blend:
        from bench import blend, blend_engine  # transformers is slow to import

        measure_one = blend_engine.measure_blend_engine if args.engine else blend.measure_blend
        figures, shown = measure_one(args.l1_size, args.rounds), blend.markdown
    elif args.sglang:
        figures = sglang.measure_sglang(args.l1_size, args.rounds)
    elif args.engine:
        figures = engine.measure_engine(args.l1_size, args.rounds)
    elif args.tier is not None:
        figures = tiers.measure_tier(args.tier, args.l1_size, args.rounds)
    else:
        figures = measure(args.l1_size)
    print(json.dumps(figures) if args.json else shown(figures))
    return 0 if figures.get("bytes_equal", True) else 1


def measure(l1_bytes: int) -> dict[str, Any]:
    """What ``kvass bench`` does not measure of a daemon. Raises ``KvassError``."""
    say("first touch of fresh shared memory")
    figures: dict[str, Any] = {"version": __version__, "cores": os.cpu_count()}
    figures["first_touch_gbps"] = first_touch_gbps()
    say("segments of prompts of 128k tokens among 100,000 chunks and 1,000,000")
    figures |= measure_segments()
    say("a daemon")
    with start_daemon(l1_bytes) as daemon:
        say("lookups among 65,536 rows, ranks: 8")
        figures |= measure_lookups(daemon.socket, tp=8)
        say("pings")
        figures["coverage_3x512_us"] = measure_coverage()
        figures["ping_rps"] = {str(n): measure_pings(daemon.socket, n) for n in (1, 16)}
        say("a PageStore")
        figures |= measure_pages(daemon.socket)
        say("the longest step at 1 TiB of 1 MiB rows")
        figures |= measure_longest()
        say("an idle daemon")
        figures |= measure_footprint(daemon.socket)
    return figures


if __name__ == "__main__":
    sys.exit(main())
