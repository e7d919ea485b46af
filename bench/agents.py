"""``python -m bench.agents``: the first token after a pause, of agents whose KV left L1 meanwhile.

Two real vLLM engines with the pretrained model on this machine's CPU, one thread each. ``all`` has
an L1 that holds everything, the other one has room for a quarter of the sessions. Each has a disk
tier of 300 MB/s (``bench.queued.throttled``). Sessions take steps in turn: a prompt is the one
before it and a tool's result. Between two steps a session pauses, for half of ``--pause`` to one
and a half of it. All ``MODES`` get the same prompts' beginnings at the same times; another one
comes first in each round.

- ``none``: requests say nothing.
- ``ttl``: each says ``kvass.ttl``, of one and a half times the pause.
- ``then``: each says how long the pause is, in whole seconds (``kvass.then``).
- ``fetch``: each says that it may be long (``LONG``), and ``LEAD_S`` before the pause ends the
  session is fetched, as ``POST /api/v1/session`` does.
- ``all``: requests say nothing, to the engine with the large L1.

The last request of a session says in the three modes between that the session ends.

Figures are medians over rounds. ``mean_s``, ``p99_s``: of the first token after a pause.
``p99_vs_all``: divided by that of ``all`` in the same round. ``waited_p99_s``: of the time that a
lookup after a pause waited for the tier. ``cached``: the part of prompts that
was not computed. ``tier``: the part that a lookup waited for. ``session_fetches``,
``promotions_cut``: of a round, as in ``kvass status``.

``--model tiny`` has random weights and 32 KiB per token. It computes almost nothing, so a busy
machine changes its figures less, and all is loaded although computing would be faster.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import repeat
from math import ceil, prod
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any, Final, NamedTuple

import numpy as np

from bench.engine import ENVIRONMENT, MODELS, rotated
from bench.queued import flushed
from kvass.cli.bench.rig import PATIENCE_S, say, start_daemon, wait_for
from kvass.client.client import Client
from kvass.errors import ConfigError, KvassError, Refused, Unavailable
from tests.support.real_model import real_model
from tests.support.vllm.models import Shape, build
from tests.support.vllm.process import Answer, EngineProcess, Prompt

MODES: Final = ("none", "ttl", "then", "fetch", "all")
SHAPE: Final = Shape(hidden=128, intermediate=256, layers=4, heads=8, kv_heads=8, head_dim=128)
RESULT: Final = 32
"""Tokens of a tool's result."""
ANSWER: Final = 2
"""Tokens of an answer. The next prompt leaves them out."""
LEAD_S: Final = 0.5
LONG: Final = "10m"
MB_S: Final = 300.0
BLOCK: Final = 32
COUNTED: Final = ("session_fetches", "promotions_cut")
WAIT_S: Final = 300.0
_LEAST_L1: Final = 16 << 20


class Fleet(NamedTuple):
    """What is played. ``tokens``: of a session's first prompt; ``pause_s``: the mean."""

    model: str
    sessions: int
    steps: int
    tokens: int
    pause_s: float

    @property
    def longest(self) -> int:
        return self.tokens + (self.steps - 1) * RESULT

    def folder(self) -> Path:
        """That of the model. Raises ``Unavailable``."""
        if self.model == "tiny":
            return build(MODELS, SHAPE)
        if (model := real_model()) is None:
            raise Unavailable("no pretrained model: bash requirements/model.sh .venv")
        return model

    def sessions_bytes(self) -> int:
        """What the KV of all sessions takes in the end."""
        config = json.loads((self.folder() / "config.json").read_text())
        sizes = [config[name] for name in ("num_key_value_heads", "head_dim", "num_hidden_layers")]
        return self.sessions * self.longest * 2 * prod(map(int, sizes)) * 4

    def prompt(self, session: int, step: int, run: object) -> list[int]:
        """Sessions begin alike in all runs."""
        begin = _words(self.tokens, session)
        return begin + _words(step * RESULT, (session, run))

    def times(self) -> list[list[float]]:
        """When the steps of each session come; the same in all runs."""
        random, times = Random(54), list[list[float]]()
        for session in range(self.sessions):
            of = [self.pause_s * session / self.sessions]
            for _ in range(self.steps - 1):
                of.append(of[-1] + self.pause_s * random.uniform(0.5, 1.5))
            times.append(of)
        return times


class Step(NamedTuple):
    """A request of a session. ``next_s``: when its next one comes; None: it has none."""

    at_s: float
    session: int
    number: int
    next_s: float | None


class Machine(NamedTuple):
    """A daemon and its engine."""

    engine: EngineProcess
    client: Client


def _words(count: int, seed: object) -> list[int]:
    random = Random(repr(seed))
    return [random.randrange(4, SHAPE.vocab) for _ in range(count)]


def steps_of(fleet: Fleet) -> list[Step]:
    """All steps, in order of time."""
    found = [
        Step(at_s, session, number, (*of[1:], None)[number])
        for session, of in enumerate(fleet.times())
        for number, at_s in enumerate(of)
    ]
    return sorted(found)


def hints(mode: str, step: Step, name: str) -> dict[str, Any] | None:
    """The ``kv_transfer_params`` of a step."""
    if mode in ("none", "all"):
        return None
    if step.next_s is None:
        return {"kvass.session": name, "kvass.ttl": 0}
    pause_s = step.next_s - step.at_s
    ttl, then = {"kvass.ttl": f"{ceil(1.5 * pause_s)}s"}, f"{max(1, round(pause_s))}s"
    said = {"ttl": ttl, "then": {"kvass.then": then}, "fetch": {"kvass.then": LONG}}[mode]
    return {"kvass.session": name, **said}


# ---------------------------------------------------------------- a run


def play(machine: Machine, fleet: Fleet, mode: str, number: int) -> list[tuple[Step, Answer]]:
    """All steps in one engine, with their answers. Raises ``Unavailable``."""
    if not machine.engine.reset():
        raise Unavailable("the engine's own cache could not be emptied")
    steps, run = steps_of(fleet), (mode, number)
    prompts = [
        Prompt(
            fleet.prompt(step.session, step.number, run),
            ANSWER,
            params=hints(mode, step, _name(step, run)),
            at_s=step.at_s,
        )
        for step in steps
    ]
    machine.engine.submit(*prompts)
    begun, ended = time.monotonic(), threading.Event()
    asked = [s for s in steps if s.number] if mode == "fetch" else []
    names = [(begun + step.at_s - LEAD_S, _name(step, run)) for step in asked]
    fetcher = threading.Thread(target=_fetch, args=(machine.client, names, ended))
    fetcher.start()
    try:
        answers = machine.engine.answers(steps[-1].at_s + WAIT_S)
    finally:
        ended.set()
        fetcher.join()
    return [*zip(steps, answers, strict=True)]


def _name(step: Step, run: object) -> str:
    return f"agent {step.session} of {run}"


def _fetch(client: Client, names: Sequence[tuple[float, str]], ended: threading.Event) -> None:
    """Have each session fetched at its time."""
    for at, name in names:
        if ended.wait(max(0.0, at - time.monotonic())):
            return
        with suppress(Refused):  # too many go on
            client.ask_session(name, fetch=True)


def figures_of(played: Sequence[tuple[Step, Answer]], fleet: Fleet) -> dict[str, float]:
    """Those of a run."""
    after = [(step, answer) for step, answer in played if step.number]
    first_s = [answer.first_token_s for _, answer in after]
    tokens = sum(fleet.tokens + step.number * RESULT for step, _ in after)
    return {
        "mean_s": mean(first_s),
        "p99_s": float(np.percentile(first_s, 99)),
        "cached": sum(answer.cached for _, answer in after) / tokens,
    }


# ---------------------------------------------------------------- all runs


@contextmanager
def machine(fleet: Fleet, folder: Path, name: str, l1_bytes: int) -> Iterator[Machine]:
    """A daemon with a disk tier, and its engine, which may not be ready yet."""
    disk = folder / f"{name}-disk"
    disk.mkdir()
    tier = f"bench.queued:throttled?folder={disk}&mb_s={MB_S:g}"
    running = max(1, fleet.sessions // 4)  # vLLM's own cache holds no more
    longest = fleet.longest + 2 * BLOCK
    args = {
        "block_size": BLOCK,
        "max_model_len": longest,
        "max_num_seqs": running,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": running * ceil(longest / BLOCK) + 1,
    }
    with ExitStack() as stack:
        patient = ("--skip-slow-loads", "no", "--lookup-budget-ms", "10000")
        flags = patient if fleet.model == "tiny" else ()
        daemon = stack.enter_context(start_daemon(l1_bytes, "--tier", tier, *flags))
        client = stack.enter_context(Client(daemon.socket))
        engine = stack.enter_context(
            EngineProcess(
                fleet.folder(),
                folder / f"{name}.log",
                socket=Path(daemon.socket),
                args=args,
                options={"kvass.chunk_tokens": BLOCK, "kvass.skip_slow_loads": not flags},
                environment=ENVIRONMENT,
            )
        )
        yield Machine(engine, client)


def prepare(machine: Machine, fleet: Fleet) -> None:
    """Have the disk tier get the sessions' first prompts."""
    machine.engine.wait_ready()
    for session in range(fleet.sessions):
        machine.engine.store(Prompt(fleet.prompt(session, 0, None), 1))
    wait_for(lambda: flushed(machine.client), "the disk", PATIENCE_S)


def measure(fleet: Fleet, modes: Sequence[str], rounds: int) -> dict[str, Any]:
    """The figures of each mode. Raises ``KvassError``."""
    all_bytes, found = fleet.sessions_bytes(), {mode: list[dict[str, float]]() for mode in modes}
    sizes = {"quarter": all_bytes // 4, "all": 2 * all_bytes}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvass-bench-")))
        say(f"two engines; {fleet.sessions} sessions take {all_bytes >> 20} MiB")
        machines = {
            name: stack.enter_context(machine(fleet, folder, name, max(_LEAST_L1, size)))
            for name, size in sizes.items()
            if name in {"all" if mode == "all" else "quarter" for mode in modes}
        }
        with ThreadPoolExecutor() as pool:
            list(pool.map(prepare, machines.values(), repeat(fleet)))
        for number in range(rounds):
            for mode in rotated([*modes], number):
                one = machines["all" if mode == "all" else "quarter"]
                if mode != "all":
                    one.client.clear_tenant("default")  # in L1 alone
                before = one.client.status(PATIENCE_S)
                figures = figures_of(play(one, fleet, mode, number), fleet)
                wait_for(lambda one=one: flushed(one.client), "the disk", PATIENCE_S)  # type: ignore[misc]
                figures |= waited(one.client, fleet)
                found[mode].append(figures | counted(before, one.client.status(PATIENCE_S)))
                say(f"{mode}: {found[mode][-1]}")
    return summary(found)


def waited(client: Client, fleet: Fleet) -> dict[str, float]:
    """How long lookups after a pause waited in the daemon: the last run's in one engine."""
    last = client.explain(limit=fleet.sessions * fleet.steps)
    waits = [one["waited_s"] for one in last if one["prompt_tokens"] > fleet.tokens]
    return {"waited_p99_s": float(np.percentile(waits, 99))}


def counted(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """What was counted between two answers of ``kvass status``."""
    both = after["counters"], before["counters"]
    figures = {name: float(both[0][name] - both[1][name]) for name in COUNTED}
    loaded = [sum(sum(ns["hit_tokens_tiers"]) for ns in s["namespaces"]) for s in (after, before)]
    tokens = [sum(ns["hit_tokens"] for ns in s["namespaces"]) for s in (after, before)]
    return {**figures, "tier": (loaded[0] - loaded[1]) / max(1, tokens[0] - tokens[1])}


def summary(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Medians over rounds."""
    figures: dict[str, Any] = {}
    for mode, runs in found.items():
        figures[mode] = {name: median(run[name] for run in runs) for name in runs[0]}
        if "all" in found:
            pairs = zip(runs, found["all"], strict=True)
            figures[mode]["p99_vs_all"] = median(a["p99_s"] / b["p99_s"] for a, b in pairs)
    return figures


def markdown(figures: Mapping[str, Mapping[str, float]]) -> str:
    """A line for each mode."""
    names = [*next(iter(figures.values()))]
    lines = [["", *names], ["---", *["---:"] * len(names)]]
    lines += [[mode, *(f"{one[name]:.3g}" for name in names)] for mode, one in figures.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.agents", description="Agents' pauses.")
    parser.add_argument("--sessions", type=int, default=24, metavar="N", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=640, metavar="N", help="of a first prompt")
    parser.add_argument("--pause", type=float, default=8.0, metavar="S", help="(%(default)g)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--modes", default=",".join(MODES), metavar="M,M", help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="one object")
    asked = parser.parse_args(argv)
    fleet = Fleet(asked.model, asked.sessions, asked.steps, asked.tokens, asked.pause)
    try:
        modes = asked.modes.split(",")
        if not {*modes} <= {*MODES}:
            raise ConfigError(f"--modes: some of {', '.join(MODES)}")
        figures = measure(fleet, modes, asked.rounds)
    except KvassError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=1) if asked.json else markdown(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
