"""The router of the examples against blind round robin: two engines on two machines, each with a
daemon of its own. vLLM's real schedulers and publishers; no model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from examples.router import Router
from kvass.testing.daemon import running_daemon
from tests.engine.test_scheduler_events import Engine
from tests.support.vllm.ranks import until

CONVERSATIONS, TURNS, TURN_TOKENS = 6, 5, 70
"""A turn's prompt is all turns so far."""
Choose = Callable[[list[int]], int]


class CountingEngine(Engine):
    """``computed``: how many tokens of prompts it computed."""

    computed = 0

    def step(self) -> Any:
        output = super().step()
        self.computed += output.total_num_scheduled_tokens
        return output


@contextmanager
def two_machines(folder: Path) -> Iterator[list[CountingEngine]]:
    with ExitStack() as stack:
        engines = []
        for name in ("one", "two"):
            (folder / name).mkdir(parents=True)
            daemon = stack.enter_context(running_daemon(folder / name, l1_size="8MiB"))
            engines.append(CountingEngine(daemon, name))
            stack.callback(engines[-1].close)
        yield engines


def announced(engine: Engine) -> bool:
    """After one step more: whether all that it stored is announced."""
    return bool(engine.step()) and not engine.events.pending


def hit_rate(engines: list[CountingEngine], choose: Choose) -> float:
    """The share of all prompts' tokens that an engine had, itself or from its daemon."""
    rng, asked = random.Random(3), 0
    talks = [
        [rng.randrange(1000) for _ in range(TURNS * TURN_TOKENS)] for _ in range(CONVERSATIONS)
    ]
    order = [talk for talk in range(CONVERSATIONS) for _ in range(TURNS)]
    rng.shuffle(order)
    for number, talk in enumerate(order):
        tokens = talks[talk][: order[: number + 1].count(talk) * TURN_TOKENS]
        for engine in engines:
            engine.router.poll()
        engine = engines[choose(tokens)]
        engine.generate(f"{number}", tokens, max_tokens=1)
        until(partial(announced, engine), "its events")
        engine.router.poll(20)
        asked += len(tokens)
    return 1 - sum(engine.computed for engine in engines) / asked


def test_it_beats_blind_round_robin(tmp_path: Path) -> None:
    with two_machines(tmp_path / "blind") as engines:
        turns = itertools.cycle(range(len(engines)))
        blind = hit_rate(engines, lambda tokens: next(turns))
    with two_machines(tmp_path / "aware") as engines:
        router = Router([engine.router.index for engine in engines])
        asked = [0, 0]

        def choose(tokens: list[int]) -> int:
            chosen, _ = router.choose(tokens)
            asked[chosen] += 1
            return chosen

        aware = hit_rate(engines, choose)
    assert aware > blind + 0.1, (aware, blind)
    assert min(asked) > sum(asked) / 4, "both have work"
