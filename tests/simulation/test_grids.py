"""Every tp x pp grid, dense and MLA, under the simulator: ranks die at random, no law is broken.

The world's dead are drawn from all processes alike, so in a wide world nearly all are ranks.
"""

from __future__ import annotations

from multiprocessing.pool import ApplyResult, Pool
from typing import Any

import pytest

from kvass.client.parallel import ParallelStrategy
from tests.support.simulation.random_models import GRIDS
from tests.support.simulation.simulator import Simulation

WORLDS = [
    *(ParallelStrategy(tp, pp) for tp, pp in GRIDS),
    *(ParallelStrategy(tp, pp, replicas=tp) for tp, pp in GRIDS if tp > 1),
    ParallelStrategy(4, 2, replicas=2),
    ParallelStrategy(8, 1, replicas=4),
]


Lives = dict[ParallelStrategy, ApplyResult[tuple[int, int, int]]]


def live(world: ParallelStrategy) -> tuple[int, int, int]:
    """How many requests, deaths and reads in time there were: enough of each, or all there were."""
    requests = deaths = reads = 0
    for seed in range(8):  # in some seeds the daemon has too few sessions for anybody to get far
        sim = Simulation(
            1000 * world.tp + 100 * world.pp + 10 * world.replicas + seed, strategy=world
        )
        sim.mischief, sim.stalls = 0.01, 0.001
        sim.run(steps=3000 // (1 + world.ranks // 8))
        for engine in sim.engines:
            requests += engine.requests
            deaths += engine.deaths - len(engine.processes)  # but for the end of all
            reads += engine.reads - engine.late_reads
        if enough(world, requests, deaths, reads):
            break
    return requests, deaths, reads


def enough(world: ParallelStrategy, requests: int, deaths: int, reads: int) -> bool:
    return requests > 200 and deaths > 5 and reads >= 3 * world.ranks


@pytest.fixture(scope="module")
def lives(cores: Pool, selected: dict[str, list[Any]]) -> Lives:
    return {world: cores.apply_async(live, (world,)) for world in selected["world"]}


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"tp{w.tp}-pp{w.pp}-x{w.replicas}")
def test_b5_ranks_of_every_grid_die_at_random(world: ParallelStrategy, lives: Lives) -> None:
    """Some 500 requests each; every page that a rank reads in time is what its shard's writer left
    there, and nothing matches that a rank did not finish."""
    requests, deaths, reads = lives[world].get()
    assert enough(world, requests, deaths, reads)
