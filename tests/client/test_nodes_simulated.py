"""Engines over 1, 2, 4 and 8 nodes in the simulator."""

from __future__ import annotations

import pytest

from tests.support.simulation.nodes import play

SIZES = [(1, 2), (2, 2), (2, 4), (4, 8), (8, 8)]
"""Machines, and ranks."""


@pytest.mark.parametrize(("machines", "ranks"), SIZES)
@pytest.mark.parametrize("faults", [False, True], ids=["quiet", "faults"])
def test_a_seed_holds_every_law(machines: int, ranks: int, faults: bool) -> None:
    world = play(machines * 10 + ranks, machines, ranks, 150, faults=faults)
    assert faults or (world.hits, world.failed) > (20, -1)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize(("machines", "ranks"), SIZES)
def test_forty_seeds_hold_every_law(machines: int, ranks: int, block: int) -> None:
    """Those of a block end within a test's time on a busy machine, too."""
    worlds = [play(seed, machines, ranks) for seed in range(block * 10, block * 10 + 10)]
    assert any(world.hits for world in worlds), "nothing was ever cached"
