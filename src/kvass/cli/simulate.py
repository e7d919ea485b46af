"""The command ``kvass simulate``: how much memory a workload needs, and what a cache would save."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final, get_args

from kvass.cli.geometry import (
    BLOCK_TOKENS,
    DEFAULT_MODEL,
    add_model,
    count,
    model_layers,
    size,
)
from kvass.config import Parser
from kvass.core.pending.tier_state import FlushMode
from kvass.errors import UsageError
from kvass.simulate.hints import with_ends
from kvass.simulate.models import Layers, layout
from kvass.simulate.optimal import Best
from kvass.simulate.player import Model, Player, Setting, recorded
from kvass.simulate.report import Result, page, table
from kvass.simulate.synth import KINDS, write
from kvass.simulate.traces import Trace, read
from kvass.types import Size

_SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_CHUNK_TOKENS: Final = 256
_LEAST_CHUNKS: Final = 64
_EVERY: Final = 200
_NO_END: Final = 1 << 80
_SWEPT: Final[dict[str, Any]] = {
    name: Setting.__dataclass_fields__[name].default
    for name in (
        "l2_bytes",
        "l2_bytes_s",
        "flush",
        "keep_loaded",
        "skip_slow_loads",
        "tails",
        "ends",
        "wrong_ends",
        "windows",
    )
}
"""The swept options except the sizes of chunks and of L1, and their defaults."""
_OF_TIERS: Final = ("l2_bytes_s", "flush", "keep_loaded", "skip_slow_loads")


def run(argv: list[str]) -> int:
    """Play traces, and print the result of each setting. Raises ``UsageError``."""
    options = _parser().parse_args(argv)
    if options.synth:
        if len(options.trace) != 1:
            raise UsageError("--synth: name the one file to write")
        write(options.trace[0], options.synth, options.requests, options.seed)
        print(f"{options.requests} requests written to {options.trace[0]}")
        return 0
    _check(options)
    layers = model_layers(options)
    results = []
    for path in options.trace:
        _show(f"{path.name}  reading")
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
        if options.chunk_tokens or options.tails:
            raise UsageError("--chunk-tokens, --tails: a recording says that itself")
        if options.ends:
            raise UsageError("--ends: a recording does not say which requests are of one session")
        own = {"tails": [bool(trace.blocks)], "windows": options.windows or [0]}
        options = Namespace(**vars(options) | own)
        yield from _with(trace, options, models)
        return
    for chunk_tokens in options.chunk_tokens or [_CHUNK_TOKENS]:
        _check_chunk(chunk_tokens, trace)
        yield from _with(trace, options, {0: Model(chunk_tokens, layout(layers, BLOCK_TOKENS))})


def _with(trace: Trace, options: Namespace, models: dict[int, Model]) -> Iterator[Result]:
    swept = {name: getattr(options, name) or [default] for name, default in _SWEPT.items()}
    _show(f"{trace.name}  the best possible eviction")
    best = {tails: Best(trace, models, tails) for tails in swept["tails"]}
    sizes = options.l1 or _sizes_of(best[swept["tails"][0]])
    chunk_tokens, geometry = next(iter(models.values())).chunk_tokens, _geometry(trace, options)
    for each in product(*swept.values()):
        for l1 in sizes:
            setting = Setting(
                l1,
                chunk_tokens,
                prefill_tokens_s=options.prefill_tokens_s,
                **dict(zip(swept, each, strict=True)),
            )
            if setting.ends or setting.wrong_ends == swept["wrong_ends"][0]:
                yield _play(trace, setting, models, best[setting.tails], geometry, options.seed)


def _geometry(trace: Trace, options: Namespace) -> str:
    """Whose KV cache the sizes are for. Only a recording says it itself."""
    if trace.engines:
        ignored = ", --model is ignored" if options.model or options.token_bytes else ""
        return f"KV cache of the recorded engines{ignored}"
    groups = layout(model_layers(options), BLOCK_TOKENS)
    each = Size(sum(sum(group.page_bytes) // group.block_tokens for group in groups))
    if options.token_bytes:
        return f"KV cache of {each.rounded()} a token"
    if options.model:
        return f"KV cache of {options.model}, {each.rounded()} a token"
    return (
        f"KV cache of {DEFAULT_MODEL}, {each.rounded()} a token: assumed, the trace names no "
        "model. Name yours: --model NAME, or --token-bytes N"
    )


def _sizes_of(best: Best) -> list[int]:
    """Default sizes of L1: shares of the memory that all rows of the trace need."""
    least = _LEAST_CHUNKS * best.row_bytes
    return sorted({max(int(best.whole_bytes * share), least) for share in _SHARES})


def _play(
    trace: Trace,
    setting: Setting,
    models: dict[int, Model],
    best: Best,
    geometry: str,
    seed: int,
) -> Result:
    player, size = Player(setting, models), Size(setting.l1_bytes).rounded()
    hinted = with_ends(trace, setting.ends, setting.wrong_ends, seed)
    for number, _ in enumerate(player.play(hinted), 1):
        if number % _EVERY == 0:
            done = number / len(trace.requests)
            _show(f"{trace.name}  L1 {size}  [{'#' * int(20 * done):20}] {done:4.0%}")
    _show("")
    reach = best.rate(setting.l1_bytes + setting.l2_bytes)
    return Result(trace, player.outcome, reach, best.rate(_NO_END), geometry)


def _show(text: str) -> None:
    """Show progress: replace the last line on a terminal by ``text``."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _check_chunk(chunk_tokens: int, trace: Trace) -> None:
    piece = trace.piece_tokens
    if chunk_tokens % BLOCK_TOKENS or (chunk_tokens % piece and piece % chunk_tokens):
        raise UsageError(
            f"--chunk-tokens {chunk_tokens}: it must be a multiple of {BLOCK_TOKENS}, and divide "
            f"or be a multiple of the {piece} tokens of a piece of {trace.name}"
        )


def _check(options: Namespace) -> None:
    for name in _OF_TIERS:
        if getattr(options, name) and not options.l2_bytes:
            flag = "l2-speed" if name == "l2_bytes_s" else name.replace("_", "-")
            raise UsageError(f"--{flag}: it says something of a tier: give --l2, too")
    if options.wrong_ends and not options.ends:
        raise UsageError("--wrong-ends: say how many sessions say that they end with --ends")
    if options.skip_slow_loads and not options.prefill_tokens_s:
        raise UsageError("--skip-slow-loads: say how fast is fast with --prefill-tokens-s")


def _sizes(text: str) -> list[int]:
    return [size(each) for each in text.split(",")]


def _counts(text: str) -> list[int]:
    return [count(each) for each in text.split(",")]


def _intervals(text: str) -> list[int]:
    return [0 if each == "dense" else count(each) for each in text.split(",")]


def _words(*known: str) -> Callable[[str], list[str]]:
    """A parser of a comma-separated list of words of ``known``, each at most once."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        if not set(words) <= set(known) or len(set(words)) < len(words):
            raise ArgumentTypeError(f"{text!r}: some of {','.join(known)}, each once")
        return words

    return parse


def _shares(text: str) -> list[float]:
    shares = [float(each) for each in text.split(",")]
    if not all(0 <= each <= 1 for each in shares):
        raise ArgumentTypeError(f"{text!r}: shares from 0 to 1")
    return shares


def _switch(text: str) -> list[bool]:
    return [word == "yes" for word in _words("yes", "no")(text)]


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
    for flag, dest, kind, example in (
        ("--l2", "l2_bytes", _sizes, "sizes of a tier behind it; default: none"),
        (
            "--l2-speed",
            "l2_bytes_s",
            _sizes,
            "what it loads, and stores, in a second; default: 2GB",
        ),
    ):
        parser.add_argument(flag, dest=dest, type=kind, metavar="SIZES", help=example)
    modes = get_args(FlushMode)
    parser.add_argument(
        "--flush",
        type=_words(*modes),
        metavar="MODES",
        help=f"as for kvass serve: {','.join(modes)}",
    )
    for flag in ("--keep-loaded", "--skip-slow-loads"):
        parser.add_argument(flag, type=_switch, metavar="yes,no", help="as for kvass serve")
    parser.add_argument(
        "--tails",
        type=_switch,
        metavar="yes,no",
        help="hits end at blocks of 16 tokens, and what ends inside of a chunk is stored",
    )
    parser.add_argument(
        "--ends",
        type=_shares,
        metavar="SHARES",
        help="the share of sessions whose last request says so (kvass.ttl: 0), like 0,0.25,1",
    )
    parser.add_argument(
        "--wrong-ends",
        type=_shares,
        metavar="SHARES",
        help="the share of these hints that are wrong: the session goes on; default: 0",
    )
    parser.add_argument(
        "--windows",
        type=_intervals,
        metavar="TOKENS",
        help="how many tokens lie between windows that are stored, like dense,4096; default: as "
        "kvass.window_interval, of a recording all that was stored",
    )
    parser.add_argument(
        "--chunk-tokens", type=_counts, metavar="N", help="like 256,512; default: 256"
    )
    parser.add_argument(
        "--prefill-tokens-s",
        type=count,
        default=0,
        metavar="N",
        help="tokens that the engine computes in a second: shows the time saved, and says which "
        "loads from the tier are too slow",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots, too")
    parser.add_argument(
        "--synth", choices=KINDS, help="write a made-up trace to the file instead of playing it"
    )
    parser.add_argument(
        "--requests",
        type=count,
        default=2000,
        metavar="N",
        help="requests that --synth writes; default: 2000",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="random seed of --synth and --ends; default: 0",
    )
    return parser
