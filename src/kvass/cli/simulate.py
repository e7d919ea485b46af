"""``kvass simulate``: how much memory a workload needs, and what it would gain."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvass.config import Parser
from kvass.errors import UsageError
from kvass.simulate.models import MODELS, Layers, layers_of, layout
from kvass.simulate.optimal import optimal_hits
from kvass.simulate.player import WIDTH, Player, Setting, digests
from kvass.simulate.report import Result, page, table
from kvass.simulate.synth import KINDS, write
from kvass.simulate.traces import Trace, read
from kvass.types import GroupLayout, Size

_SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_BLOCK_TOKENS: Final = 16
_CHUNK_TOKENS: Final = 256
_LEAST_CHUNKS: Final = 64
_EVERY: Final = 200


def run(argv: list[str]) -> int:
    """Play traces, print what each setting did. Raises ``UsageError``."""
    options = _parser().parse_args(argv)
    if options.synth:
        if len(options.trace) != 1:
            raise UsageError("--synth: name the one file to write")
        write(options.trace[0], options.synth, options.requests, options.seed)
        print(f"{options.requests} requests written to {options.trace[0]}")
        return 0
    layers = layers_of(options.model)
    if options.token_bytes:
        layers = (Layers(1, options.token_bytes),)
    results = []
    for path in options.trace:
        trace = read(path)
        results += list(_sweep(trace, options, layers))
    if options.html:
        try:
            options.html.write_text(page(results), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--html {options.html}: {error.strerror}") from error
    if options.json:
        print(json.dumps([result.fields() for result in results], indent=1))
    else:
        print("\n".join(table(results)))
    return 0


def _sweep(trace: Trace, options: Namespace, layers: tuple[Layers, ...]) -> Iterator[Result]:
    groups = layout(layers, _BLOCK_TOKENS)
    for chunk_tokens in options.chunk_tokens:
        _check_chunk(chunk_tokens, trace)
        row_bytes = sum(group.shard_bytes(chunk_tokens) for group in groups)
        whole = trace.unique_tokens // chunk_tokens * row_bytes
        sizes = options.l1 or sorted(
            {max(int(whole * share), _LEAST_CHUNKS * row_bytes) for share in _SHARES}
        )
        keys = [digests(r, trace.piece_tokens, chunk_tokens) for r in trace.requests]
        prompts = _numbered(keys)
        infinite = _rate(optimal_hits(prompts, 1 << 62), chunk_tokens, trace)
        for l2 in options.l2 or [0]:
            for l1 in sizes:
                setting = Setting(l1, chunk_tokens, l2, options.l2_speed, options.prefill_tokens_s)
                chunks = (l1 + l2) // row_bytes
                best = _rate(optimal_hits(prompts, chunks), chunk_tokens, trace)
                yield _play(trace, setting, groups, best, infinite)


def _play(
    trace: Trace, setting: Setting, groups: tuple[GroupLayout, ...], best: float, infinite: float
) -> Result:
    player, shown = Player(setting, groups), sys.stderr.isatty()
    for number, _ in enumerate(player.play(trace), 1):
        if shown and number % _EVERY == 0:
            size = Size(setting.l1_bytes).rounded()
            done = number / len(trace.requests)
            print(f"\r{trace.name}  L1 {size}  {done:4.0%} ", end="", file=sys.stderr, flush=True)
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return Result(trace, player.outcome, best, infinite)


def _rate(chunks: int, chunk_tokens: int, trace: Trace) -> float:
    return chunks * chunk_tokens / max(1, trace.input_tokens)


def _numbered(keys: list[bytes]) -> list[list[int]]:
    """A small number for each different hash."""
    numbers: dict[bytes, int] = {}
    return [
        [numbers.setdefault(blob[i : i + WIDTH], len(numbers)) for i in range(0, len(blob), WIDTH)]
        for blob in keys
    ]


def _check_chunk(chunk_tokens: int, trace: Trace) -> None:
    piece = trace.piece_tokens
    if chunk_tokens % _BLOCK_TOKENS or (chunk_tokens % piece and piece % chunk_tokens):
        raise UsageError(
            f"--chunk-tokens {chunk_tokens}: it must be a multiple of {_BLOCK_TOKENS}, and divide "
            f"or be a multiple of the {piece} tokens of a piece of {trace.name}"
        )


def _sizes(text: str) -> list[int]:
    sizes = [int(Size.parse(each)) for each in text.split(",")]
    if min(sizes) <= 0:
        raise ValueError("a size of 0 holds nothing")
    return sizes


def _counts(text: str) -> list[int]:
    return [_count(each) for each in text.split(",")]


def _count(text: str) -> int:
    number = int(text)
    if not 0 < number <= 1 << 31:
        raise ValueError(f"{number} is not between 1 and {1 << 31}")
    return number


def _parser() -> Parser:
    parser = Parser(
        prog="kvass simulate",
        description="Play traces of requests through the cache and print what it would have hit.",
    )
    parser.add_argument(
        "trace", nargs="+", type=Path, help="Mooncake's JSON lines, or CSV (docs/sizing.md)"
    )
    parser.add_argument(
        "--model", default="llama-3-8b", metavar="NAME", help=f"one of {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--token-bytes", type=_count, metavar="N", help="bytes of KV of one token, for other models"
    )
    parser.add_argument(
        "--l1", type=_sizes, metavar="SIZES", help="like 16GiB,64GiB; default: shares of the trace"
    )
    parser.add_argument(
        "--l2", type=_sizes, metavar="SIZES", help="sizes of a tier behind it; default: none"
    )
    parser.add_argument(
        "--l2-speed",
        type=Size.parse,
        default=Size(2_000_000_000),
        metavar="SIZE",
        help="what the tier loads, and stores, in a second; default: 2GB",
    )
    parser.add_argument(
        "--chunk-tokens", type=_counts, default=[_CHUNK_TOKENS], metavar="N", help="like 256,512"
    )
    parser.add_argument(
        "--prefill-tokens-s",
        type=_count,
        default=0,
        metavar="N",
        help="tokens that the engine computes in a second: shows the time saved, and loads from "
        "the tier only what would take longer to compute",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots, too")
    parser.add_argument(
        "--synth", choices=KINDS, help="write a made-up trace to the file instead of playing it"
    )
    parser.add_argument(
        "--requests", type=_count, default=2000, metavar="N", help="of --synth; default: 2000"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of --synth; default: 0")
    return parser
