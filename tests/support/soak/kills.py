"""Daemons of an engine over several nodes are killed again and again while it serves.

``python -m tests.support.soak.kills --times 100`` starts two engines on two daemons, kills one of
these in the middle of a hook or some ms later, compares every answer with that of an engine without
kvass, looks what both daemons still hold when the engines rest, and measures how long the next hit
takes. It prints a line for each kill that went wrong, and the sums; the exit status is 0 if none
did.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from kvass.testing.daemon import Daemon
from tests.support.vllm.judge import Judge, apart
from tests.support.vllm.models import TINY, build
from tests.support.vllm.nodes import NodesEngine, running_daemons
from tests.support.vllm.process import Answer, EngineProcess, Prompt

BACK_S: Final = 2.0
"""From the new daemon's start to the first hit."""
REST_S: Final = 5.0
PATIENCE_S: Final = 30.0
TOKENS: Final = 4
HELD: Final = ("leases", "reservations", "pins", "quarantined_bytes", "rows_loading")
SCHEDULERS: Final = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
)
RANKS: Final = (
    "bind_connector_metadata",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
)
ARGS: Final[dict[str, Any]] = {
    "max_model_len": 1024,
    "num_gpu_blocks_override": 128,
    "max_num_batched_tokens": 512,
}
OPTIONS: Final[dict[str, Any]] = {"kvass.chunk_tokens": 64, "kvass.skip_slow_loads": False}

Known = tuple[list[int], Answer]
"""A prompt, and the right answer to it."""


@dataclass
class Report:
    """What came of the kills. ``wrong``: answers; ``held``: what a daemon did not let go of;
    ``late``: hits that were not back in time. ``back_s``: when they were, by kill. ``longest_s``:
    of an answer."""

    kills: int = 0
    answers: int = 0
    hits: int = 0
    wrong: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    longest_s: float = 0.0
    moments: Counter[str] = field(default_factory=Counter)

    @property
    def failures(self) -> list[str]:
        """All that went wrong."""
        return [*self.wrong, *self.held, *self.late]


class Kills:
    """Each kill hits one daemon while all ``engines`` look up, load and store: of what they are
    asked, half was stored before."""

    def __init__(
        self,
        engines: Sequence[NodesEngine],
        daemons: Sequence[Daemon],
        known: Sequence[Known],
        noise: float,
        seed: int,
    ) -> None:
        self.engines, self.daemons, self.known, self.noise = engines, daemons, known, noise
        self.report = Report()
        self._random = Random(seed)

    def run(self, times: int) -> Report:
        """Kill a daemon ``times`` times."""
        for number in range(times):
            self._kill(number)
        return self.report

    def _kill(self, number: int) -> None:
        random, report = self._random, self.report
        node, engine = random.randrange(len(self.daemons)), random.choice(self.engines)
        daemon = self.daemons[node]
        stored, asked = random.sample(self.known, 3), dict[NodesEngine, list[Known]]()
        self._ask({engine: stored}, "before a kill")
        for one in self.engines:
            one.reset()
            asked[one] = [*random.sample(stored, 2), *random.sample(self.known, 2)]
        moment = self._arm(engine, daemon)
        name = f"kill {number} of node {node}, {moment}"
        report.kills += 1
        report.moments[moment] += 1
        self._ask(asked, name)
        for one in self.engines:
            one.reset_hooks()  # a hook that was not called
        daemon.restart()
        self._back(engine, time.monotonic(), name)
        for one in self.engines:
            one.reset()
        for at, each in enumerate(self.daemons):
            self._rest(each, f"{name}: node {at}")

    def _ask(self, asked: Mapping[NodesEngine, Sequence[Known]], name: str) -> None:
        """All engines at once."""
        for one, prompts in asked.items():
            one.submit(*(Prompt(tokens, TOKENS) for tokens, _ in prompts))
        for one, prompts in asked.items():
            for answer, (_, right) in zip(one.answers(), prompts, strict=True):
                self._compare(answer, right, f"{name}: an answer")

    def _arm(self, engine: NodesEngine, daemon: Daemon) -> str:
        """Have the daemon killed at the next call of some hook, or soon after it."""
        random = self._random
        rank = random.choice([None, *range(len(self.daemons))])
        hook, when = random.choice(SCHEDULERS if rank is None else RANKS), "after"
        if random.random() < 0.5:
            when = "before"
        after_s = random.choice([0.0, 0.0, random.uniform(0, 0.1)])
        engine.arm(hook, when, [(daemon.pid, signal.SIGKILL, after_s)], rank=rank)
        return f"{when} {hook} of {'the scheduler' if rank is None else f'rank {rank}'}"

    def _compare(self, answer: Answer, right: Answer, name: str) -> None:
        self.report.answers += 1
        self.report.hits += answer.external > 0
        self.report.longest_s = max(self.report.longest_s, answer.total_s)
        far = apart(answer, right)
        if answer.finish_reason != "length" or far > self.noise:
            self.report.wrong.append(
                f"{name}, {answer.external} tokens loaded: {answer.tokens}, not {right.tokens}: "
                f"{far:g} apart"
            )

    def _back(self, engine: NodesEngine, since_s: float, name: str) -> None:
        """Until a prompt that was stored since the kill is found."""
        tries = list[str]()
        while True:
            tokens = self._random.choices(range(4, TINY.vocab), k=200)
            cold = engine.one(tokens, TOKENS)
            engine.reset()
            warm = engine.one(tokens, TOKENS)
            took_s = time.monotonic() - since_s
            self._compare(warm, cold, f"{name}: a hit after it")
            tries.append(f"{took_s:.1f} s: {warm.local} + {warm.external}")
            if warm.external:
                self.report.back_s.append(took_s)
                if took_s > BACK_S:
                    self.report.late.append(f"{name}: the next hit was late, tries: {tries}")
                return
            if took_s > PATIENCE_S:
                self.report.late.append(f"{name}: no hit for {took_s:.1f} s")
                return

    def _rest(self, daemon: Daemon, name: str) -> None:
        try:
            daemon.wait_until(REST_S, **dict.fromkeys(HELD, 0))
        except AssertionError:
            status = daemon.status()
            held = {what: status[what] for what in HELD if status[what]}
            self.report.held.append(f"{name} holds {held}")


def prompts(seed: int, count: int) -> list[list[int]]:
    """Of random lengths, some with the same beginning."""
    random, made = Random(seed), list[list[int]]()
    stems = [random.choices(range(4, TINY.vocab), k=random.randint(64, 400)) for _ in range(4)]
    for _ in range(count):
        stem, rest = random.choice(stems), random.randint(20, 200)
        begin = stem[: random.randint(0, len(stem))]
        made.append([*begin, *random.choices(range(4, TINY.vocab), k=rest)])
    return made


def right_answers(judge: Judge, asked: Sequence[list[int]]) -> list[Known]:
    """``Kills.known``. ``judge``: of an engine without kvass."""
    return [(tokens, judge.cold(tokens, TOKENS)) for tokens in asked]


def main() -> int:
    parser = ArgumentParser(prog="python -m tests.support.soak.kills", description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all processes are ended
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    with tempfile.TemporaryDirectory(prefix="kvass-kills-") as place, ExitStack() as ending:
        folder = Path(place)
        model = build(folder / "models")
        daemons = ending.enter_context(running_daemons(folder, ["16MiB"] * 2))
        plain = EngineProcess(model, folder / "plain.log", args=ARGS)
        ending.callback(plain.kill)
        known = right_answers(judge := Judge(plain.wait_ready()), prompts(options.seed, 24))
        noise = judge.noise()
        plain.close()
        sockets, engines = [Path(daemon.socket) for daemon in daemons], []
        for name in "ab":
            one = NodesEngine(model, folder / f"{name}.log", sockets, args=ARGS, options=OPTIONS)
            ending.callback(one.kill)
            engines.append(one)
        for one in engines:
            one.wait_ready()
        kills = Kills(engines, daemons, known, noise, options.seed)
        try:
            report = kills.run(options.times)
        finally:
            sys.stdout.write(told(options.seed, kills.report))
            for one in engines:
                logs = [one.log(node) for node in range(len(daemons))]
                sys.stdout.writelines(log[-3000:] for log in logs if "Traceback" in log)
    return 1 if report.failures else 0


def told(seed: int, report: Report) -> str:
    """What came of it, for people."""
    back = sorted(report.back_s)
    times = f"{back[len(back) // 2]:.2f} s, at most {back[-1]:.2f} s" if back else "never"
    counts = (
        f"seed {seed}: {report.kills} kills, {report.answers} answers, {report.hits} of them hits, "
        f"{len(report.wrong)} wrong, {len(report.held)} held something, hits back in {times}, "
        f"the longest answer took {report.longest_s:.1f} s"
    )
    moments = [f"{count:5} {moment}" for moment, count in sorted(report.moments.items())]
    return "\n".join([*report.failures, counts, *moments, ""])


if __name__ == "__main__":
    sys.exit(main())
