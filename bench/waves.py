"""``python -m bench.waves``: many hits at once, in engines whose cache has room for some of them.

Sixteen prompts come together, each of 2,048 tokens that were seen before and some new ones. The
cache of the engine has room for six. So they are served in waves: the next loads begin when
requests end. What costs time beside the copies are steps in which nothing is computed, and loads
that begin later than they could.

Real vLLM engines with a tiny model, on this machine's CPU, in turns. ``kvass``; ``offloading``:
vLLM's own, which from vLLM 0.33 on loads up to a number of bytes inside a step
(``offloading_sync``); ``instant`` and ``instant_sync``: a connector whose loads take no time
(``bench.instant``), so that none needs fewer steps; ``before``: kvass of another tree.

What the names mean. Counts are of one round, medians over rounds.

- ``s``: until the last one's first token. ``steps``: the engine's, until then. ``idle_steps`` and
  ``idle_s``: those in which nothing was computed.
- ``hooks_s``: the part of ``s`` in the connector's hooks, on the engine's thread.
- ``begins``: the steps in which loads began, as one number of loads each.
- ``lacking``: prompts of all rounds that were not loaded whole; the last block does not count.
- ``step_ms``: by how many requests a step computed: how many such steps, and their median time.
- ``kvass_vs_offloading``: the ratio of ``s``, the median of the rounds' ratios.

``--copy-gb-s``: each copy takes as long as at so many GB/s, on a thread that sleeps; 0: as long as
it takes. Copies of an engine go one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.engine import BLOCK, MODELS, rotated
from bench.peers.engines import connector
from bench.peers.short import newest
from bench.short_hits import PACE, words_of_tiny
from kvass.cli.bench.rig import PATIENCE_S, say, start_daemon, wait_for
from kvass.client.client import Client
from kvass.errors import KvassError, Unavailable
from tests.support.vllm.models import TINY, build
from tests.support.vllm.process import Answer, EngineProcess, Prompt, SeenStep

SYSTEMS: Final = ("kvass", "offloading", "offloading_sync", "instant", "instant_sync")
SEEN: Final = 2048
NEW: Final = 16
AT_ONCE: Final = 16
ROOM: Final = 6
ANSWER: Final = 1
ROUNDS: Final = 5
WARM_UP: Final = 1
COPY_GB_S: Final = 2.0
L1_BYTES: Final = 3 << 29


class Wave:
    """What happened in one round."""

    def __init__(self, steps: Sequence[SeenStep], answers: Sequence[Answer]) -> None:
        first = next(n for n, step in enumerate(steps) if step.asked)
        last = max(n for n, step in enumerate(steps) if step.computed)
        self.steps = steps[first : last + 1]
        self.seconds, self.hooks_s = max((a.first_token_s, a.first_token_hooks_s) for a in answers)

    @property
    def idle(self) -> list[SeenStep]:
        return [step for step in self.steps if not step.computed]

    @property
    def begins(self) -> list[int]:
        return [len(step.loads) for step in self.steps if step.loads]

    def timeline(self) -> str:
        """A line for each step."""
        names: dict[str, str] = {}
        lines = []
        for number, step in enumerate(self.steps):
            for name in (*step.asked, *step.computed):
                names.setdefault(name, f"r{len(names) + 1}")
            asked = [f"{names[n]}{'?' if a is None else ''}" for n, a in step.asked.items()]
            lines.append(
                f"{number:3} {1000 * step.took_s:6.1f} ms  free {step.free_blocks:4}"
                f"  asked {' '.join(asked) or '-'}"
                f"  loads {' '.join(names[n] for n in step.loads) or '-'}"
                f"  loaded {' '.join(names.get(n, n) for n in step.loaded) or '-'}"
                f"  computed {' '.join(f'{names[n]}:{t}' for n, t in step.computed.items()) or '-'}"
                f"  ended {' '.join(names[n] for n in step.ended) or '-'}"
            )
        return "\n".join(lines)


def transfer(system: str, socket: str) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config``."""
    kind, _, sync = system.partition("_")
    if kind == "offloading":
        found = connector("offloading", None, L1_BYTES)
        assert found is not None
        if not sync:
            found["kv_connector_extra_config"].pop("sync_load_budget_bytes")
        return found
    if kind == "instant":
        module, name = "bench.instant", "InstantConnector"
        options: dict[str, Any] = {"inside": bool(sync)}
    else:
        module, name = "bench.slow_copies", "SwitchedConnector"
        options = {"kvass.socket": socket, "kvass.fixed_weights": True}
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_connector_extra_config": options,
        "kv_role": "kv_both",
    }


class Bench:
    """Rounds in one engine. ``socket``: of its daemon."""

    def __init__(self, system: str, engine: EngineProcess, socket: str, args: Any) -> None:
        self._system, self._engine, self._socket, self._args = system, engine, socket, args
        self._seen: list[list[int]] = []
        self.waves: list[Wave] = []
        self.lacking = 0

    def prepare(self) -> None:
        """Have the prompts seen."""
        self._seen = [words_of_tiny(self._args.seen, n) for n in range(self._args.at_once)]
        if self._system.startswith("instant"):
            return
        for tokens in self._seen:
            self._engine.one(tokens, 1)
        if self._system in ("kvass", "before"):
            with Client(self._socket) as client:
                wait_for(lambda: not client.status(PATIENCE_S)["reservations"], "", PATIENCE_S)

    def round(self, number: int) -> None:
        """All at once. Raises ``Unavailable`` if vLLM's own cache cannot be emptied."""
        if not self._engine.reset():
            raise Unavailable("vLLM's own cache could not be emptied")
        self._engine.steps()
        answers = self._engine.generate(
            *(
                Prompt(seen + words_of_tiny(self._args.new, (number, n)), self._args.answer)
                for n, seen in enumerate(self._seen)
            )
        )
        wave = Wave(self._engine.steps(), answers)
        whole = self._args.seen // BLOCK * BLOCK - BLOCK
        self.lacking += (number >= 0) * sum(answer.external < whole for answer in answers)
        if self._args.timeline:
            print(f"\n{self._system}, round {number}: {wave.seconds:.3f} s")
            print(wave.timeline(), flush=True)
        if number >= 0:
            self.waves.append(wave)

    def figures(self) -> dict[str, Any]:
        """By the names in this module's docstring."""
        return {
            "s": median(wave.seconds for wave in self.waves),
            "steps": median(len(wave.steps) for wave in self.waves),
            "idle_steps": median(len(wave.idle) for wave in self.waves),
            "idle_s": median(sum(step.took_s for step in wave.idle) for wave in self.waves),
            "hooks_s": median(wave.hooks_s for wave in self.waves),
            "lacking": self.lacking,
            "step_ms": self.step_ms(),
            "begins": [" ".join(map(str, wave.begins)) for wave in self.waves],
        }

    def step_ms(self) -> dict[int, tuple[int, float]]:
        """How many steps computed so many requests, and how long they took: the median."""
        took: dict[int, list[float]] = {}
        for wave in self.waves:
            for step in wave.steps:
                took.setdefault(len(step.computed), []).append(1000 * step.took_s)
        return {n: (len(ms), round(median(ms), 1)) for n, ms in sorted(took.items())}


def measure_waves(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, by system. Raises ``KvassError``."""
    blocks = -(-(args.seen + args.new) // BLOCK)
    engine_args = {
        "block_size": BLOCK,
        "max_model_len": args.seen + args.new + 256,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": args.at_once,
        "num_gpu_blocks_override": 1 + args.room * blocks + args.spare,
    }
    which, environment = newest()
    if args.copy_gb_s:
        environment[PACE] = str(args.copy_gb_s * 1e9)
    paths = args.before, environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    before = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="kvass-bench-")))
        daemon = ending.enter_context(start_daemon(L1_BYTES))
        say(f"the start of {len(args.systems)} engines, vLLM {which}")
        benches = {}
        for system in args.systems:
            engine = EngineProcess(
                build(MODELS, TINY),
                folder / f"{system}.log",
                transfer=transfer(system, daemon.socket),
                args=engine_args,
                environment=environment | (before if system == "before" else {}),
            )
            ending.callback(engine.close)
            benches[system] = Bench(system, engine.wait_ready(), daemon.socket, args)
        for bench in benches.values():
            bench.prepare()
        for number in range(-WARM_UP, args.rounds):
            for system in rotated(list(benches), number):
                benches[system].round(number)
    figures: dict[str, Any] = {name: bench.figures() for name, bench in benches.items()}
    if "kvass" in benches:
        for other in {"before", "offloading", "offloading_sync"} & benches.keys():
            pairs = zip(benches["kvass"].waves, benches[other].waves, strict=True)
            figures[f"kvass_vs_{other}"] = median(a.seconds / b.seconds for a, b in pairs)
    return {"cores": os.cpu_count(), "vllm": which, **figures}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    args = _parser().parse_args(argv)
    try:
        print(json.dumps(measure_waves(args), indent=1))
    except KvassError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.waves")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--room", type=int, default=ROOM)
    parser.add_argument("--spare", type=int, default=0, help="more blocks than that")
    parser.add_argument("--seen", type=int, default=SEEN)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--answer", type=int, default=ANSWER)
    parser.add_argument("--copy-gb-s", type=float, default=COPY_GB_S)
    parser.add_argument("--systems", type=lambda text: text.split(","), default=SYSTEMS)
    parser.add_argument("--before", help="another src, of the system 'before'")
    parser.add_argument("--timeline", action="store_true", help="a line for each step")
    return parser


if __name__ == "__main__":
    sys.exit(main())
