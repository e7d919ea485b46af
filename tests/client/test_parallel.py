"""Which rank holds, writes and reads what; and what `import kvass` costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvass
from kvass.client.parallel import ParallelStrategy
from kvass.errors import UsageError


def test_world_of_one() -> None:
    one = ParallelStrategy()
    assert (one.ranks, one.world_size, one.readers) == (1, 1, (0,))
    assert one.shard(0) == 0
    assert one.writer(0)


def test_every_shard_has_exactly_one_writer() -> None:
    for tp, pp, mla in ((2, 1, False), (2, 3, False), (4, 1, True), (2, 2, True)):
        world = ParallelStrategy(tp, pp, mla)
        writers = [rank for rank in world.readers if world.writer(rank)]
        assert [world.shard(rank) for rank in writers] == list(range(world.world_size))
        assert {world.shard(rank) for rank in world.readers} == set(range(world.world_size))


@pytest.mark.parametrize(("tp", "pp"), [(0, 1), (1, -1), (64, 3)])
def test_sizes_out_of_range(tp: int, pp: int) -> None:
    with pytest.raises(UsageError, match="use sizes of at least 1"):
        ParallelStrategy(tp, pp)


def test_public_names_are_imported_when_used() -> None:
    check = (
        "import sys, kvass; cheap = not {'numpy', 'msgspec', 'torch'} & set(sys.modules);"
        "names = [getattr(kvass, n) for n in kvass.__all__];"
        "sys.exit(0 if cheap and 'torch' not in sys.modules else 1)"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = kvass.Nonsense
