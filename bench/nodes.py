"""``python -m bench.nodes``: what it costs that an engine's ranks are on several machines.

One tiny model on this machine's CPU, in three engines of two ranks, in turns. What is compared ran
within seconds, and another one comes first each time.

- ``machine``: ``-tp 2``. One process tree, one daemon.
- ``one``: ``-tp 2 --nnodes 2``. Two process trees, and one daemon for both.
- ``two``: the same with a daemon for each.

What the names mean, by the number of tokens that were seen before; 16 new ones follow. Times are to
the first token, in ms: medians over rounds with the quartiles. Ratios are those of the rounds.

- ``hit_ms``: kvass has the tokens, vLLM's own cache is empty. ``own_ms``: vLLM's own cache has
  them. ``new_ms``: nobody has seen the prompt.
- ``hit_steps``, ``own_steps``: the engine's steps until the first token, the mean over rounds.
- ``two_vs_one``, ``two_vs_machine``, ``one_vs_machine``: by what was asked. vLLM's own messages
  between process trees take longer than those on one machine: ``own`` shows how much.
- ``steps_more``: of a hit of ``two``, beside that of ``one``: the median over rounds. The goal is
  at most 1. ``most_steps_more``: the highest.
- ``missed``: how often a hit was none, by engine, because a busy machine answered too late. Then
  another prompt takes its place.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from bench.engine import MODELS, rotated
from bench.short_hits import ARGS, L1_BYTES, NEW, of_whole_blocks, shown, spread, words_of_tiny
from kvass._version import __version__
from kvass.cli.bench.rig import PATIENCE_S, say, start_daemon, wait_for
from kvass.client.client import Client
from kvass.errors import KvassError, Unavailable
from tests.support.vllm.models import TINY, build
from tests.support.vllm.nodes import NodesEngine
from tests.support.vllm.process import Answer, EngineProcess

SIZES: Final = (512, 2048)
MODES: Final = ("hit", "own", "new")
ROUNDS: Final = 21
WARM_UP: Final = 3
"""Rounds that do not count."""
TRIES: Final = 20
OPTIONS: Final = {"kvass.skip_slow_loads": False}
PAIRS: Final = (("two", "one"), ("two", "machine"), ("one", "machine"))


def _stored(socket: str) -> bool:
    """Whether nothing is being written."""
    with Client(socket) as client:
        return not client.status(PATIENCE_S)["reservations"]


class Bench:
    """Rounds in engines by name, each with the sockets of its daemons."""

    def __init__(
        self, engines: Mapping[str, tuple[EngineProcess, Sequence[str]]], sizes: Sequence[int]
    ) -> None:
        self._engines, self._sizes = engines, sizes
        self._answers = defaultdict[tuple[int, str, str], list[Answer]](list)
        """By size, engine and mode."""
        self._missed = Counter[str]()
        self._prompts = 0

    def round(self, number: int, *, counts: bool) -> None:
        """All of it once. Raises ``Unavailable`` if there is no hit again and again."""
        for size in self._sizes:
            for name in rotated(list(self._engines), number):
                answers = self._round(size, name)
                for mode in MODES if counts else ():
                    self._answers[size, name, mode].append(answers[mode])

    def _round(self, size: int, name: str) -> dict[str, Answer]:
        engine, sockets = self._engines[name]
        for _ in range(TRIES):
            self._prompts += 1
            seen, new = (words_of_tiny(size + NEW, (kind, self._prompts)) for kind in ("s", "n"))
            engine.one(seen[:size], 1)
            for socket in sockets:
                wait_for(partial(_stored, socket), "stores")
            if not engine.reset():
                raise Unavailable("vLLM's own cache could not be emptied")
            hit, own = engine.one(seen, 2), engine.one(seen, 2)
            if (hit.local, hit.external, own.local) == (0, size, size):
                return {"hit": hit, "own": own, "new": engine.one(new, 2)}
            self._missed[name] += 1
        raise Unavailable(f"{name}: no hit in {TRIES} tries: {engine.log()[-2000:]}")

    def figures(self) -> dict[str, Any]:
        """By the names in this module's docstring, by size as text."""
        made = {str(size): self._of(size) for size in self._sizes}
        return made | {"missed": dict(self._missed)}

    def _of(self, size: int) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        times = dict[tuple[str, str], list[float]]()
        steps = dict[tuple[str, str], list[int]]()
        for name in self._engines:
            for mode in MODES:
                answers = self._answers[size, name, mode]
                times[name, mode] = [1000 * one.first_token_s for one in answers]
                steps[name, mode] = [one.first_token_steps for one in answers]
            figures[name] = {f"{mode}_ms": spread(times[name, mode]) for mode in MODES}
            figures[name] |= {f"{mode}_steps": mean(steps[name, mode]) for mode in ("hit", "own")}
        for a, b in PAIRS:
            pairs = {mode: zip(times[a, mode], times[b, mode], strict=True) for mode in MODES}
            figures[f"{a}_vs_{b}"] = {m: spread([x / y for x, y in p]) for m, p in pairs.items()}
        more = [x - y for x, y in zip(steps["two", "hit"], steps["one", "hit"], strict=True)]
        return figures | {"steps_more": median(more), "most_steps_more": max(more)}


@contextmanager
def _engines() -> Iterator[dict[str, tuple[EngineProcess, Sequence[str]]]]:
    """The three engines."""
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="kvass-bench-")))
        sockets = [ending.enter_context(start_daemon(L1_BYTES)).socket for _ in range(2)]
        model = build(MODELS, TINY)
        used = {"machine": sockets[:1], "one": sockets[:1] * 2, "two": sockets}
        engines = dict[str, EngineProcess]()
        for name, theirs in used.items():
            log, paths = folder / f"{name}.log", list(map(Path, theirs))
            if name == "machine":
                args = {**ARGS, "tensor_parallel_size": 2}
                engines[name] = EngineProcess(
                    model, log, socket=paths[0], args=args, options=OPTIONS
                )
            else:
                engines[name] = NodesEngine(model, log, paths, args=ARGS, options=OPTIONS)
            ending.callback(engines[name].kill)
        for engine in engines.values():
            engine.wait_ready()
        yield {name: (engine, sorted(set(used[name]))) for name, engine in engines.items()}


def measure_nodes(rounds: int = ROUNDS, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """All figures. Raises ``KvassError``."""
    say("the start of three engines")
    with _engines() as engines:
        bench = Bench(engines, sizes)
        say(f"{rounds} rounds")
        for number in range(-WARM_UP, rounds):
            bench.round(number, counts=number >= 0)
    about = {"version": __version__, "cores": os.cpu_count(), "rounds": rounds}
    return about | bench.figures()


def markdown(figures: Mapping[str, Any]) -> str:
    """A table of times, and one of ratios."""
    lines = [
        "| seen | engine | hit, ms | own, ms | new, ms | steps: hit, own |",
        "|--:|---|" + "--:|" * 4,
    ]
    ratios = ["| seen | ratio | hit | own | new |", "|--:|---|" + "--:|" * 3]
    said = []
    for size, one in figures.items():
        if not size.isdigit():
            continue
        for name in ("machine", "one", "two"):
            cells = [shown(one[name][f"{mode}_ms"]) for mode in MODES]
            steps = ", ".join(f"{one[name][f'{mode}_steps']:.1f}" for mode in ("hit", "own"))
            lines.append(f"| {' | '.join([size, name, *cells, steps])} |")
        for a, b in PAIRS:
            cells = [shown(one[f"{a}_vs_{b}"][mode]) for mode in MODES]
            ratios.append(f"| {' | '.join([size, f'{a} / {b}', *cells])} |")
        most = one["most_steps_more"]
        said.append(f"{size}: {one['steps_more']:g} steps more with two daemons, at most {most}")
    missed = ", ".join(f"{name} {count}" for name, count in figures["missed"].items()) or "none"
    return "\n".join([*lines, "", *ratios, "", *said, f"missed: {missed}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.nodes", description="Several machines.")
    parser.add_argument("--json", action="store_true", help="one object")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="(%(default)s)")
    sizes = ",".join(map(str, SIZES))
    parser.add_argument("--sizes", type=of_whole_blocks, default=sizes, metavar="H,H")
    args = parser.parse_args(argv)
    try:
        figures = measure_nodes(max(2, args.rounds), args.sizes)
    except KvassError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures) if args.json else markdown(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
