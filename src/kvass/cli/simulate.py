"""``kvass simulate``: how much memory a workload needs, and what it would gain."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvass.cli.geometry import BLOCK_TOKENS, add_model, count, model_layers, size
from kvass.config import Parser
from kvass.errors import UsageError
from kvass.simulate.models import Layers, layout
from kvass.simulate.optimal import optimal_hits
from kvass.simulate.player import WIDTH, Model, Player, Setting, digests, recorded
from kvass.simulate.report import Result, page, table
from kvass.simulate.synth import KINDS, write
from kvass.simulate.traces import Trace, read
from kvass.types import Size

_SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
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
    layers = model_layers(options)
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
    if trace.engines:
        models = {number: recorded(engine) for number, engine in trace.engines.items()}
        if options.chunk_tokens:
            raise UsageError("--chunk-tokens: a recording has chunks of its own")
        yield from _with(trace, options, models)
        return
    for chunk_tokens in options.chunk_tokens or [_CHUNK_TOKENS]:
        _check_chunk(chunk_tokens, trace)
        yield from _with(trace, options, {0: Model(chunk_tokens, layout(layers, BLOCK_TOKENS))})


def _with(trace: Trace, options: Namespace, models: dict[int, Model]) -> Iterator[Result]:
    prompts, whole = _chunks(trace, models)
    row_bytes = max(1, whole // max(1, len({chunk for prompt in prompts for chunk in prompt})))
    sizes = options.l1 or sorted(
        {max(int(whole * share), _LEAST_CHUNKS * row_bytes) for share in _SHARES}
    )
    infinite = _optimal(trace, models, prompts, 1 << 62)
    for l2 in options.l2 or [0]:
        for l1 in sizes:
            chunk_tokens = next(iter(models.values())).chunk_tokens
            setting = Setting(l1, chunk_tokens, l2, options.l2_speed, options.prefill_tokens_s)
            best = _optimal(trace, models, prompts, (l1 + l2) // row_bytes)
            yield _play(trace, setting, models, best, infinite)


def _chunks(trace: Trace, models: dict[int, Model]) -> tuple[list[list[int]], int]:
    """A small number for each different chunk, by request, and the bytes of all of them."""
    numbers: dict[tuple[int, bytes], int] = {}
    prompts, whole = [], 0
    for r in trace.requests:
        blob = digests(r, trace.tokens_of(r.engine), models[r.engine].chunk_tokens)
        known = len(numbers)
        prompts.append(
            [
                numbers.setdefault((r.engine, blob[i : i + WIDTH]), len(numbers))
                for i in range(0, len(blob), WIDTH)
            ]
        )
        whole += (len(numbers) - known) * models[r.engine].row_bytes
    return prompts, whole


def _optimal(
    trace: Trace, models: dict[int, Model], prompts: list[list[int]], capacity: int
) -> float:
    """The hit rate of the best choice of ``capacity`` chunks."""
    hits = optimal_hits(prompts, capacity)
    found = sum(
        hit * models[r.engine].chunk_tokens
        for r, hit in zip(trace.requests, hits, strict=True)
        if r.looks_up
    )
    return found / max(1, trace.input_tokens)


def _play(
    trace: Trace, setting: Setting, models: dict[int, Model], best: float, infinite: float
) -> Result:
    player, shown = Player(setting, models), sys.stderr.isatty()
    for number, _ in enumerate(player.play(trace), 1):
        if shown and number % _EVERY == 0:
            size = Size(setting.l1_bytes).rounded()
            done = number / len(trace.requests)
            print(f"\r{trace.name}  L1 {size}  {done:4.0%} ", end="", file=sys.stderr, flush=True)
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return Result(trace, player.outcome, best, infinite)


def _check_chunk(chunk_tokens: int, trace: Trace) -> None:
    piece = trace.piece_tokens
    if chunk_tokens % BLOCK_TOKENS or (chunk_tokens % piece and piece % chunk_tokens):
        raise UsageError(
            f"--chunk-tokens {chunk_tokens}: it must be a multiple of {BLOCK_TOKENS}, and divide "
            f"or be a multiple of the {piece} tokens of a piece of {trace.name}"
        )


def _sizes(text: str) -> list[int]:
    return [size(each) for each in text.split(",")]


def _counts(text: str) -> list[int]:
    return [count(each) for each in text.split(",")]


def _parser() -> Parser:
    parser = Parser(
        prog="kvass simulate",
        description="Play traces of requests through the cache and print what it would have hit.",
    )
    parser.add_argument(
        "trace",
        nargs="+",
        type=Path,
        help="a recording of kvass serve --record, Mooncake's JSON lines, or CSV (docs/sizing.md)",
    )
    add_model(parser)
    parser.add_argument(
        "--l1", type=_sizes, metavar="SIZES", help="like 16GiB,64GiB; default: shares of the trace"
    )
    parser.add_argument(
        "--l2", type=_sizes, metavar="SIZES", help="sizes of a tier behind it; default: none"
    )
    parser.add_argument(
        "--l2-speed",
        type=size,
        default=2_000_000_000,
        metavar="SIZE",
        help="what the tier loads, and stores, in a second; default: 2GB",
    )
    parser.add_argument(
        "--chunk-tokens", type=_counts, metavar="N", help="like 256,512; default: 256"
    )
    parser.add_argument(
        "--prefill-tokens-s",
        type=count,
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
        "--requests", type=count, default=2000, metavar="N", help="of --synth; default: 2000"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of --synth; default: 0")
    return parser
