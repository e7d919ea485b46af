"""``python -m bench.short_hits``: is a hit worth it, however short it is?

One real vLLM engine on this machine's CPU, with a tiny model that computes fast: in front of it
kvass has the least to win. A prompt has H tokens that were seen before and 16 new ones; what counts
is the time to its first token. kvass can be switched off in the middle of the run
(``tests.support.vllm.switched``), so all that is compared ran in one engine, in turns, and another
one comes first each time. No prompt is asked twice.

- ``kvass``: kvass has the H tokens, vLLM's own cache is empty. They were stored by this engine, and
  its cache was emptied since, without kvass being told.
- ``computed``: kvass is off, and nobody has seen the prompt.
- ``again``: the same once more. What it differs from ``computed`` is noise.
- ``own``: kvass is off, and vLLM's own cache has the H tokens.

``idle``: nothing else runs. ``decoding``: three other requests generate tokens meanwhile.

What the names mean. Times are medians over rounds, in ms, with the quartiles. A ratio is the median
of the rounds' ratios, with their quartiles.

- ``kvass_vs_computed``: 1 or less is the goal at each H. ``again_vs_computed``: noise.
  ``kvass_vs_own``: 1 is as fast as a hit can be.
- ``steps``: the engine's steps until the first token, the mean over rounds. A busy machine does
  not change it, unless something waits for another process: then steps compute nothing.
- ``hooks_ms``: the part of ``kvass_ms`` in which the engine's thread is in kvass's hooks: it waits
  for the daemon's answer, copies, or plans stores.
- ``loaded``: the part of the H tokens that kvass loaded, the mean over rounds. What it found and
  the engine computed all the same has its reason in ``ended_by`` (docs/explain.md).
- ``worst``: the highest ``kvass_vs_computed`` of all H, and how much ``again_vs_computed`` reaches
  by chance. ``slower_at``: the H at which even the lower quartile of ``kvass_vs_computed`` is above
  1. That is more than noise.

``--slow-copies N`` makes each copy of a load take N times as long. An engine that weighs loading
against computing then computes what it would wait longer for, so no ratio is above 1.05.

``--table`` prints these figures in short, and two more: ``bench.short_hits_table``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, Final, NamedTuple

from bench.engine import BLOCK, MODELS, SWITCHED, rotated, switched_engine, words
from kvass._version import __version__
from kvass.cli.bench.rig import PATIENCE_S, say, start_daemon, wait_for
from kvass.client.client import Client
from kvass.errors import ConfigError, KvassError, Unavailable
from kvass.messages import MOST_EXPLAINED
from tests.support.vllm.models import TINY, build
from tests.support.vllm.process import OFF, Answer, EngineProcess, Prompt

SIZES: Final = (32, 64, 128, 256, 512, 1024, 2048)
NEW: Final = 16
BESIDE: Final = {"idle": 0, "decoding": 3}
MODES: Final = ("kvass", "computed", "own", "again")
ROUNDS: Final = 21
WARM_UP: Final = 2
"""Rounds that do not count. The engine verifies its first copies, and measures its own speed."""
L1_BYTES: Final = 1 << 30
ARGS: Final[dict[str, Any]] = {
    "block_size": BLOCK,
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,  # any of these prompts is computed in one step
    "num_gpu_blocks_override": 1024,
}
SWITCHED_OFF: Final = {OFF: "1"}
SLOW: Final = "BENCH_SLOW_COPIES"
PACE: Final = "BENCH_COPY_BYTES_S"
"""Of ``bench.waves``."""
_DECODER: Final = 64
_JOINS: Final = 6
"""The measured request comes when the others have generated so many tokens."""
_LEFT: Final = 16
"""Tokens that they generate after it has come: until it has its own first one, in any case."""


class Spread(NamedTuple):
    """The quartiles."""

    low: float
    middle: float
    high: float


class Times:
    """What was measured with H tokens seen: by mode, seconds and steps to the first token; and what
    was loaded, by round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        self.steps: dict[str, list[int]] = {mode: [] for mode in MODES}
        self.hooks_ms: list[float] = []
        self.loaded: list[int] = []
        self.ended_by: Counter[str] = Counter()

    def figures(self, seen: int) -> dict[str, Any]:
        times = {f"{m}_ms": spread([1000 * s for s in self.seconds[m]]) for m in MODES}
        ratios = {
            f"{one}_vs_{other}": spread(
                [a / b for a, b in zip(self.seconds[one], self.seconds[other], strict=True)]
            )
            for one, other in (("kvass", "computed"), ("again", "computed"), ("kvass", "own"))
        }
        steps = {mode: mean(self.steps[mode]) for mode in MODES}
        loaded = mean(self.loaded) / seen
        more = {"steps": steps, "loaded": loaded, "ended_by": dict(self.ended_by)}
        return times | ratios | {"hooks_ms": spread(self.hooks_ms)} | more


def spread(values: Sequence[float]) -> Spread:
    """Of at least two values."""
    return Spread(*quantiles(values, n=4, method="inclusive"))


# ---------------------------------------------------------------- one request


def ask(
    engine: EngineProcess, prompt: list[int], beside: int, name: object, **of_all: Any
) -> Answer:
    """The answer to a prompt, of which only the first token counts, with ``beside`` other requests
    that generate tokens meanwhile. ``of_all``: fields of all of these requests."""
    others = [words_of_tiny(_DECODER, ("decoder", name, number)) for number in range(beside)]
    decoders = [Prompt(one, _JOINS + _LEFT, **of_all) for one in others]
    return engine.generate(*decoders, Prompt(prompt, 2, joins=_JOINS, **of_all))[-1]


def words_of_tiny(tokens: int, seed: object) -> list[int]:
    """A random prompt of the tiny model."""
    return [4 + token % (TINY.vocab - 4) for token in words(tokens, seed)]


# ---------------------------------------------------------------- rounds


class Bench:
    """Rounds in one engine. ``daemon``: the socket of its daemon."""

    def __init__(self, engine: EngineProcess, daemon: str, sizes: Sequence[int]) -> None:
        self._engine, self._daemon, self._sizes = engine, daemon, sizes
        self.times = {name: {size: Times() for size in sizes} for name in BESIDE}
        self._explained: set[str] = set()

    def round(self, number: int, *, counts: bool) -> None:
        """All of it once. Raises ``Unavailable`` if something was found that should not be, or was
        not found that should be."""
        for name, beside in BESIDE.items():
            self._prepare(number, name)
            for at, size in enumerate(self._sizes):
                for mode in rotated(list(MODES), number + at):
                    answer = self._first_token(size, mode, beside, (number, name))
                    if counts:
                        times = self.times[name][size]
                        times.seconds[mode].append(answer.first_token_s)
                        times.steps[mode].append(answer.first_token_steps)
                        if mode == "kvass":
                            times.loaded.append(answer.external)
                            times.hooks_ms.append(1000 * answer.first_token_hooks_s)
            self._note_reasons(name, counts=counts)

    def figures(self) -> dict[str, Any]:
        """By the names of ``BESIDE``, and by H as text."""
        figures: dict[str, Any] = {}
        for name, by_size in self.times.items():
            figures[name] = {str(size): times.figures(size) for size, times in by_size.items()}
            figures[name] |= worst(figures[name])
        return figures

    def _prompt(self, size: int, mode: str, when: object) -> list[int]:
        return words_of_tiny(size + NEW, (size, mode, when))

    def _prepare(self, number: int, name: str) -> None:
        """Have the tokens where they are to be found: first in kvass, then in vLLM's own cache."""
        for size in self._sizes:
            self._engine.one(self._prompt(size, "kvass", (number, name))[:size], 1)
        with Client(self._daemon) as client:
            wait_for(lambda: not client.status(PATIENCE_S)["reservations"], "stores", PATIENCE_S)
        if not self._engine.reset():
            raise Unavailable("vLLM's own cache could not be emptied")
        for size in self._sizes:
            prompt = self._prompt(size, "own", (number, name))[:size]
            self._engine.one(prompt, 1, params=SWITCHED_OFF)

    def _first_token(self, size: int, mode: str, beside: int, when: object) -> Answer:
        params = None if mode == "kvass" else SWITCHED_OFF
        prompt = self._prompt(size, mode, when)
        answer = ask(self._engine, prompt, beside, (size, mode, when), params=params)
        own = size if mode == "own" else 0
        if answer.local != own or (answer.external and mode != "kvass"):
            raise Unavailable(f"{mode}: {answer.local} and {answer.external} tokens hit, not {own}")
        return answer

    def _note_reasons(self, name: str, *, counts: bool) -> None:
        """Why the hits of this round ended where they did."""
        with Client(self._daemon) as client:
            for one in client.explain(limit=MOST_EXPLAINED, timeout_s=PATIENCE_S):
                times = self.times[name].get(one["prompt_tokens"] - NEW)
                if counts and times and one["request"] not in self._explained:
                    times.ended_by[one["why"] or "the prompt"] += 1
                self._explained.add(one["request"])


def measure_short_hits(
    rounds: int = ROUNDS,
    sizes: Sequence[int] = SIZES,
    slow_copies: float = 1.0,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All figures, by the names in this module's docstring. Raises ``KvassError``."""
    say("the start of an engine")
    with ExitStack() as ending:
        folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="kvass-bench-"))
        daemon = ending.enter_context(start_daemon(L1_BYTES))
        log, slow = Path(folder) / "engine.log", slow_copies != 1
        one = ending.enter_context(
            switched_engine(
                build(MODELS, TINY),
                log,
                daemon.socket,
                args=ARGS,
                module="bench.slow_copies" if slow else SWITCHED,
                options=options,
                environment={SLOW: str(slow_copies)} if slow else None,
            )
        )
        bench = Bench(one, daemon.socket, sizes)
        say(f"hits of {sizes[0]} to {sizes[-1]} tokens, {rounds} rounds")
        for number in range(-WARM_UP, rounds):
            bench.round(number, counts=number >= 0)
    about = {"version": __version__, "cores": os.cpu_count(), "rounds": rounds}
    return about | {"slow_copies": slow_copies} | bench.figures()


def worst(by_size: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """``worst`` and ``slower_at``."""
    ratios = {size: one["kvass_vs_computed"] for size, one in by_size.items()}
    return {
        "worst": max(ratio.middle for ratio in ratios.values()),
        "worst_by_chance": max(one["again_vs_computed"].middle for one in by_size.values()),
        "slower_at": [int(size) for size, ratio in ratios.items() if ratio.low > 1],
    }


# ---------------------------------------------------------------- printing


def markdown(figures: Mapping[str, Any]) -> str:
    """A table for each of ``BESIDE``."""
    head = ["seen", *(f"{mode}, ms" for mode in MODES), "kvass / computed", "again / computed"]
    head += [
        "kvass / own",
        "in kvass's hooks, ms",
        "steps: kvass, computed, own",
        "loaded",
        "ended by",
    ]
    parts = []
    for name in BESIDE:
        lines = [head, ["---:"] * len(head)]
        lines += [[size, *_cells(one)] for size, one in figures[name].items() if size.isdigit()]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        parts.append(verdict(name, figures[name]))
    return "\n\n".join(parts)


def verdict(name: str, figures: Mapping[str, Any]) -> str:
    """The figures of ``worst``, as a line."""
    slower = ", ".join(map(str, figures["slower_at"])) or "no H"
    chance = f"{figures['worst_by_chance']:.2f} by chance"
    return f"{name}: at worst {figures['worst']:.2f} ({chance}); slower than computing at {slower}"


def _cells(one: Mapping[str, Any]) -> list[str]:
    names = [f"{mode}_ms" for mode in MODES]
    names += ["kvass_vs_computed", "again_vs_computed", "kvass_vs_own", "hooks_ms"]
    reasons = ", ".join(f"{why} {count}" for why, count in sorted(one["ended_by"].items()))
    steps = ", ".join(f"{one['steps'][mode]:.1f}" for mode in MODES[:3])
    return [*(shown(one[name]) for name in names), steps, f"{one['loaded']:.0%}", reasons]


def shown(figure: Sequence[float]) -> str:
    low, middle, high = figure
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def of_whole_blocks(text: str) -> tuple[int, ...]:
    """``--sizes``. Raises ``ValueError``."""
    sizes = tuple(map(int, text.split(",")))
    if any(size <= 0 or size % BLOCK for size in sizes):
        raise ValueError
    return sizes


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    args = _parser().parse_args(argv)
    try:
        if args.rounds < 2:
            raise ConfigError(f"--rounds {args.rounds}: 2 or more, 15 or more for figures")
        options = {name: json.loads(value) for name, value in args.option}
        figures = measure_short_hits(args.rounds, args.sizes, args.slow_copies, options)
        if not args.json:
            print(markdown(figures), flush=True)
        if args.table:
            from bench import short_hits_table  # it imports this module

            figures |= short_hits_table.measure_document_and_cost(args.rounds, options)
            if not args.json:
                print(f"\n{short_hits_table.markdown(figures)}")
    except KvassError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(figures))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.short_hits", description="Hits against computing, however short."
    )
    parser.add_argument("--json", action="store_true", help="one object")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="(%(default)s)")
    parser.add_argument("--table", action="store_true", help="two more figures, of a larger model")
    sizes, what = ",".join(map(str, SIZES)), f"whole blocks of {BLOCK} (%(default)s)"
    parser.add_argument("--sizes", type=of_whole_blocks, default=sizes, metavar="H,H", help=what)
    slow = "each copy of a load takes N times as long (%(default)g)"
    parser.add_argument("--slow-copies", type=float, default=1.0, metavar="N", help=slow)
    more = "of the connector, as kvass.chunk_tokens=32; may be repeated"
    parser.add_argument(
        "--option",
        type=lambda text: text.split("=", 1),
        action="append",
        default=[],
        metavar="NAME=JSON",
        help=more,
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
