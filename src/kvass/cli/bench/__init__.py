"""The command ``kvass bench``: the speed of kvass on this machine, relative to the machine's own.

It starts a daemon, or measures one that runs. In a running daemon it uses at most a sixteenth of L1
at a time, in a namespace that no tier stores and that it clears. Bytes are compared after every
load (the exit status is 1 if they differ), and hits are counted. The two sides of a ratio are
measured in turns. A ratio is that of the fastest rounds; for lookups it is the median of the
rounds' ratios. If there are several engines, all of them do the same step at once.

The figures:

- ``ready_s``: from the daemon's start to its ready line.
- ``store_vs_memcpy``: the store of a prompt of 64 MiB (all engines together): reserve, copies,
  commit. Its pages are scattered over the engine's memory. It is compared with memcpy of the same
  bytes into the same kind of memory, one call per chunk. ``load_vs_memcpy``: the load of that
  prompt: lookup, copies, release.
- ``store_copies_vs_pages``: only the copies of that store, from ``submit`` until the job has ended.
  They are compared with memcpy of the same pages, one by one in the same order.
  ``load_copies_vs_pages``: likewise for the load, which has two threads; its memcpy has one.
- ``lookup_128k_us``: the round trip of a lookup of 512 keys (131,072 tokens in chunks of 256). The
  prompt is chosen at random among 128 that were stored, so all keys are hits. Rows have 4 KiB.
  ``release_128k_us``: its release, until the daemon has carried it out. ``lookup_128k_vs_dict``:
  the sum of the two, compared with a process that finds 512 keys in a dict and answers on a socket.
- ``tier_store_vs_raw``: the time from the commit of a prompt of 64 MiB until a disk tier has it.
  The tier is full, and evicts. It is compared with writing as many bytes of a fallocated file
  past the page cache (``direct_io``). ``tier_load_vs_raw``: the time from a lookup to its match, by
  a daemon that has none of the prompt in L1, compared with reading the file into memory of the
  arena's kind. Where that has pages of 4 KiB, a tier may be faster (decision 046).
- ``compress_gbps``, ``decompress_gbps``: what a core compresses, and gives back, of values in
  bfloat16 of a normal distribution, which then take ``compressed_part`` of their size. A tier that
  is slower than that is faster with ``compress=lossless``. Absent without a library for it.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from kvass._version import __version__
from kvass.cli.bench import baseline
from kvass.cli.bench.copies import PromptShape, measure_copies
from kvass.cli.bench.disk import disk_url, measure_tier
from kvass.cli.bench.lookups import KEYS, RESIDENT, ROW_BYTES, measure_lookups
from kvass.cli.bench.rig import PATIENCE_S, say, start_daemon, table
from kvass.cli.geometry import (
    BLOCK_TOKENS,
    DEFAULT_MODEL,
    add_model,
    count,
    model_layers,
    size,
)
from kvass.client.client import Client
from kvass.config import Parser, add_flags, load
from kvass.errors import ConfigError
from kvass.simulate.models import layout
from kvass.types import Size

MIN_ROUNDS = 7
_L1_BYTES: Final = 3 << 30
_OWN_SHARE: Final = 4
"""One engine may write a quarter of L1 at a time (``Limits.instance_write_share``)."""
_SHARE: Final = 16
_MOST_ENGINES: Final = 64


def run(argv: Sequence[str]) -> int:
    """Measure and print; the exit status is 1 if loaded bytes differed from stored ones, or a ratio
    fell."""
    args = _arguments(argv)
    settings = _settings(args)
    known = baseline.read(args.check, settings) if args.check else None
    runs = [measure(args) for _ in range(baseline.RUNS if args.write_baseline else 1)]
    if known and known.fallen(runs[0]):
        runs += [measure(args) for _ in range(baseline.RUNS_AGAIN)]
    figures = baseline.merged(runs)
    fallen = known.fallen(figures) if known else []
    if args.write_baseline and figures["bytes_equal"]:
        baseline.write(args.write_baseline, settings, runs)
    if args.json:
        print(json.dumps(figures | ({"fallen": fallen} if known else {})))
    else:
        print("\n".join([table(figures), *(fallen or ["no ratio fell"] if known else [])]))
    return 0 if figures["bytes_equal"] and not fallen else 1


def flags(prog: str, rounds: int = 9) -> Parser:
    parser = Parser(prog=prog, description="Measure copies and lookups on this machine.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--l1-size",
        type=size,
        metavar="SIZE",
        help=f"L1 of the daemon that it starts (default: {Size(_L1_BYTES)})",
    )
    parser.add_argument(
        "--rounds",
        default=rounds,
        type=int,
        metavar="N",
        help=f"rounds per figure, {MIN_ROUNDS} or more (default: {rounds})",
    )
    return parser


def parse(parser: Parser, argv: Sequence[str]) -> Namespace:
    args = parser.parse_args(argv)
    if args.rounds < MIN_ROUNDS:
        raise ConfigError(f"--rounds {args.rounds}: use {MIN_ROUNDS} or more, or figures are noise")
    if args.l1_size and getattr(args, "socket", None):
        raise ConfigError("--l1-size: the daemon at --socket has its own")
    args.l1_size = args.l1_size or _L1_BYTES
    return args


def _arguments(argv: Sequence[str]) -> Namespace:
    parser = flags("kvass bench", rounds=40)
    parser.add_argument(
        "--socket", metavar="PATH", help="measure the daemon there (default: one of its own)"
    )
    add_flags(parser, "daemon_uid")
    add_model(parser)
    parser.add_argument(
        "--chunk-tokens",
        type=count,
        default=256,
        metavar="N",
        help="tokens of a chunk; default: 256",
    )
    parser.add_argument(
        "--engines", type=count, default=1, metavar="N", help="engines at once; default: 1"
    )
    parser.add_argument("--tier", metavar="URL", help="measure a disk tier, too: disk:FOLDER")
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="exit status 1 if a ratio is below this baseline"
    )
    parser.add_argument(
        "--write-baseline",
        type=Path,
        metavar="FILE",
        help=f"measure {baseline.RUNS} times, write the file that --check reads",
    )
    args = parse(parser, argv)
    if args.chunk_tokens % BLOCK_TOKENS:
        raise ConfigError(f"--chunk-tokens {args.chunk_tokens}: use a multiple of {BLOCK_TOKENS}")
    if args.engines > _MOST_ENGINES:
        raise ConfigError(f"--engines {args.engines}: use {_MOST_ENGINES} at most")
    if args.tier and args.socket:
        raise ConfigError("--tier: only a daemon of bench's own gets a tier: leave out --socket")
    if args.check and args.write_baseline:
        raise ConfigError("--check and --write-baseline: use one at a time")
    if args.write_baseline and not args.write_baseline.parent.is_dir():
        raise ConfigError(f"--write-baseline {args.write_baseline}: there is no such folder")
    if args.daemon_uid and not args.socket:
        raise ConfigError("--daemon-uid: of the daemon at --socket: name that, too")
    if args.socket:
        named = {"daemon_uid": args.daemon_uid}
        args.daemon_uid = load(named, os.environ, wanted=[*named]).daemon_uid
    args.groups = layout(model_layers(args), BLOCK_TOKENS)
    args.tier = args.tier and disk_url(args.tier)
    return args


def _settings(args: Namespace) -> dict[str, str | int]:
    """The settings that the ratios depend on."""
    model = f"{args.token_bytes} bytes a token" if args.token_bytes else args.model or DEFAULT_MODEL
    tier = "disk" if args.tier else "none"
    chunk_tokens, engines = args.chunk_tokens, args.engines
    return {"model": model, "chunk_tokens": chunk_tokens, "engines": engines, "tier": tier}


def measure(args: Namespace) -> dict[str, Any]:
    """All figures; this module's docstring explains the names. Raises ``KvassError``."""
    figures = {"version": __version__, "cores": os.cpu_count(), "rounds": args.rounds}
    figures |= _settings(args) | {"bytes_equal": True}
    socket, engines, private = args.socket, args.engines, args.socket is not None
    l1_bytes, share = args.l1_size, max(_OWN_SHARE, 2 * engines)
    if private:
        with Client(socket, daemon_uid=args.daemon_uid) as client:
            l1_bytes, share = client.status(PATIENCE_S)["l1_capacity_bytes"], _SHARE * engines
    prompt = PromptShape(args.groups, args.chunk_tokens).within(l1_bytes // share, engines)
    if args.tier:
        figures |= measure_tier(args.tier, l1_bytes, args.rounds, prompt)
    with ExitStack() as ending:
        if not private:
            say("a daemon")
            daemon = ending.enter_context(start_daemon(l1_bytes))
            socket, figures["ready_s"] = daemon
        copies = measure_copies(
            socket,
            args.rounds,
            prompt,
            engines=engines,
            private=private,
            daemon_uid=args.daemon_uid,
        )
        figures |= copies | {"bytes_equal": copies["bytes_equal"] and figures["bytes_equal"]}
        rows = max(KEYS, min(RESIDENT // engines, l1_bytes // share // ROW_BYTES))
        say(f"lookups among {engines} x {rows} rows")
        figures |= measure_lookups(
            socket, rows, engines=engines, private=private, daemon_uid=args.daemon_uid
        )
    return figures
