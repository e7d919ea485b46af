"""Which rank holds, writes and reads what; and what `import kvass` costs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvass
from kvass.client.parallel import ParallelStrategy
from kvass.errors import UsageError
from kvass.types import MAX_RANKS, SCHEDULER, RankLayout

LAYOUT = RankLayout(())
GRIDS = [
    (tp, pp, replicas)
    for tp in range(1, MAX_RANKS + 1)
    for pp in range(1, MAX_RANKS // tp + 1)
    for replicas in range(1, tp + 1)
    if tp % replicas == 0
]


@pytest.mark.parametrize(
    ("tp", "pp", "replicas", "shards", "writers"),
    [
        (1, 1, 1, [0], (0,)),
        (4, 2, 1, [0, 1, 2, 3, 4, 5, 6, 7], (0, 1, 2, 3, 4, 5, 6, 7)),  # a dense model
        (4, 2, 4, [0, 0, 0, 0, 1, 1, 1, 1], (0, 4)),  # MLA
        (4, 1, 2, [0, 0, 1, 1], (0, 2)),  # GQA: 2 KV heads on 4 tensor ranks
    ],
)
def test_a3_b3_b4_who_holds_and_who_writes_a_shard(
    tp: int, pp: int, replicas: int, shards: list[int], writers: tuple[int, ...]
) -> None:
    world = ParallelStrategy(tp, pp, replicas)
    assert [world.at(r).shard for r in world.readers] == shards
    assert world.writers == writers


def test_b1_one_value_for_every_grid_up_to_128_ranks() -> None:
    """Every shard has exactly one writer, which holds it, and every rank reads its one shard."""
    assert len(GRIDS) > 1000
    for tp, pp, replicas in GRIDS:
        world = ParallelStrategy(tp, pp, replicas)
        each = [world.at(rank) for rank in world.readers]
        assert len(each) == world.ranks == tp * pp
        assert world.world_size * replicas == world.ranks
        assert [x.shard for x in each if x.writes] == list(range(world.world_size))
        assert tuple(x.rank for x in each if x.writes) == world.writers
        assert {x.shard for x in each} == set(range(world.world_size))
        assert not world.writes


@given(grid=st.sampled_from(GRIDS), data=st.data())
def test_b2_tensor_groups_are_consecutive_and_stages_stride_over_them(
    grid: tuple[int, int, int], data: st.DataObject
) -> None:
    """vLLM: ranks are a (stages, tensor ranks) array in C order."""
    tp, pp, replicas = grid
    stage = data.draw(st.integers(0, pp - 1))
    tensor = data.draw(st.integers(0, tp - 1))
    here = ParallelStrategy(tp, pp, replicas, stage * tp + tensor)
    assert here.shard == stage * (tp // replicas) + tensor // replicas
    assert here.writes == (tensor % replicas == 0)
    assert here.last_stage == (stage == pp - 1)
    other = here.at(data.draw(st.sampled_from(here.readers)))
    same_bytes = (stage, tensor // replicas) == (other.rank // tp, other.rank % tp // replicas)
    assert same_bytes == (here.shard == other.shard)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tp": 0}, "use sizes of at least 1"),
        ({"pp": -1}, "use sizes of at least 1"),
        ({"tp": 64, "pp": 3}, "at most 128 ranks"),
        ({"tp": 4, "replicas": 3}, "give a divisor of tp 4"),
        ({"tp": 4, "replicas": 0}, "give a divisor of tp 4"),
        ({"tp": 4, "rank": 4}, r"a world of 4 has 0\.\.3"),
        ({"rank": -2}, "-1 for its scheduler"),
    ],
)
def test_wrong_sizes(sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ParallelStrategy(**sizes)


def test_a_registration_says_what_the_strategy_says() -> None:
    world = ParallelStrategy(2, 2, replicas=2)
    last = world.at(3).register("engine", {"model": "m"}, 256, LAYOUT)
    assert (last.rank, last.ranks, last.world_size, last.shard) == (3, 4, 2, 1)
    assert not last.writer
    assert world.at(2).register("engine", {}, 256, LAYOUT).writer
    scheduler = world.register("engine", {"model": "m"}, 256)
    assert (scheduler.rank, scheduler.ranks, scheduler.world_size) == (SCHEDULER, 4, 2)
    with pytest.raises(UsageError, match="every worker gives one"):
        world.at(0).register("engine", {}, 256)
    with pytest.raises(UsageError, match="a scheduler none"):
        world.register("engine", {}, 256, LAYOUT)


def test_public_names_are_imported_when_used() -> None:
    check = (
        "import sys, kvass; cheap = not {'numpy', 'msgspec', 'torch'} & set(sys.modules);"
        "names = [getattr(kvass, n) for n in kvass.__all__];"
        "sys.exit(0 if cheap and 'torch' not in sys.modules else 1)"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = kvass.Nonsense
