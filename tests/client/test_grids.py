"""Every tp x pp grid, dense and MLA, over real sockets: ranks die at random, bytes are never wrong.

The copies run on threads and the daemon in its own process, so when a rank dies is chance; what it
leaves behind must be right whatever it was doing.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvass.client.parallel import ParallelStrategy
from kvass.testing.daemon import Daemon
from kvass.testing.fake_engine import FakeEngine, chunk_keys, spread
from kvass.testing.fake_rank import MakeMover, Transfer
from kvass.transfer.host import HostMover
from kvass.types import SCHEDULER
from tests.client import test_fake_engine
from tests.client.test_fake_engine import MODEL
from tests.support.gpu.engine_mover import EngineGpus
from tests.support.simulation.random_models import GRIDS

WORLDS = [
    *(ParallelStrategy(tp, pp) for tp, pp in GRIDS),
    *(ParallelStrategy(tp, pp, replicas=tp) for tp, pp in GRIDS if tp > 1),
]
REQUESTS = 100
"""Of each grid: 2,100 in all."""


daemon = test_fake_engine.daemon


class Life:
    """One engine's random life. ``seen`` counts what came about."""

    def __init__(self, engine: FakeEngine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()

    def prompt(self) -> list[int]:
        """One to eight chunks; prompts share prefixes of any length."""
        tokens = [0] * 128
        if at := self.rng.randrange(8):
            tokens[16 * at] = self.rng.randrange(1, 8)
        return tokens[: 16 * self.rng.randint(1, 8)]

    def live(self, requests: int) -> None:
        for _ in range(requests):
            what = self.rng.choices(["store", "load", "die", "cancel"], [10, 10, 3, 1])[0]
            getattr(self, what)(self.prompt())
            self.seen["pages"] += self.engine.verify()

    def store(self, prompt: list[int]) -> None:
        self.seen["stored"] += self.engine.store(prompt)

    def load(self, prompt: list[int]) -> None:
        self.seen["loaded"] += self.engine.load(prompt)

    def die(self, prompt: list[int]) -> None:
        """A rank dies in the middle of a store or a load: before its copy, in it, or after it."""
        engine, rng = self.engine, self.rng
        if rng.random() < 0.5:
            what = engine.match(prompt)
        else:
            prompt[0] = rng.randrange(1 << 32)  # nobody has it
            what = engine.reserve(prompt)
        owing = engine.world.readers if what is None else what.ranks
        victim = rng.choice(rng.choice([owing, engine.world.readers]))
        if what is not None:
            assert engine.hand_over(what)
            early = rng.random() < 0.5
            engine.copy(what, [rank for rank in what.ranks if rank != victim or not early])
        engine.kill(victim)
        self.seen["deaths"] += 1
        whole = what is not None and engine.wait(what) > 0
        engine.revive(victim)
        if what is not None:
            self.seen[f"{what.kind} {'outlived' if whole else 'cut short'}"] += 1
        if what is not None and what.kind == "store" and what.outcomes.get(victim) == "dead":
            self.check_absent(prompt, what)

    def check_absent(self, prompt: list[int], what: Transfer) -> None:
        """A writer died before it wrote: nothing of it matches."""
        keys = chunk_keys(prompt, self.engine.chunk_tokens)
        assert self.engine.load(prompt) <= keys.index(what.keys[0])

    def cancel(self, prompt: list[int]) -> None:
        """The scheduler dies, or gives back, before anybody heard of it."""
        engine, rng = self.engine, self.rng
        what = engine.match(prompt) if rng.random() < 0.5 else engine.reserve(prompt)
        if rng.random() < 0.3:
            engine.kill(SCHEDULER)
            engine.revive(SCHEDULER)
            self.seen["deaths"] += 1
        elif what is not None:
            engine.give_back(what)


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"tp{w.tp}-pp{w.pp}-x{w.replicas}")
def test_a6_b5_ranks_die_at_random_and_nothing_is_wrong_or_left(
    daemon: Daemon, world: ParallelStrategy
) -> None:
    live(daemon, world, HostMover)


@pytest.mark.parametrize(
    "world", [ParallelStrategy(2, 2), ParallelStrategy(4, 1, replicas=4)], ids=["dense", "mla"]
)
def test_the_same_with_pages_on_fake_gpus(daemon: Daemon, world: ParallelStrategy) -> None:
    gpus = EngineGpus()
    live(daemon, world, gpus)
    gpus.check_closed()


def live(daemon: Daemon, world: ParallelStrategy, mover: MakeMover) -> None:
    layouts = spread(world, MODEL)
    with FakeEngine(daemon.socket, world, layouts, seed=world.ranks, mover=mover) as engine:
        life = Life(engine, seed=1000 * world.tp + 10 * world.pp + world.replicas)
        life.live(REQUESTS)
        daemon.wait_until(leases=0, reservations=0, pins=0, quarantined_bytes=0)
        assert engine.store([7] * 64) == 4
        assert engine.load([7] * 64) == 4
        assert engine.verify()
    seen = life.seen
    assert min(seen[name] for name in ("stored", "loaded", "deaths")) > 0, seen
    assert seen["pages"] > 100, seen
