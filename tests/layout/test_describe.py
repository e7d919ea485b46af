"""Planes say where pages lie, and agree with what the daemon derives from the same layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.errors import UsageError
from kvass.layout.describe import GroupPlanes, Plane, describe_group
from kvass.types import PAGE, GroupLayout


def llama(layers: int = 3, page: int = 100) -> GroupLayout:
    return GroupLayout("full", 32, tuple(f"l{i}" for i in range(layers)), (page,) * layers)


@given(
    pages=st.lists(st.integers(1, 9000), min_size=1, max_size=6),
    block_tokens=st.sampled_from([1, 16, 32]),
    chunk_blocks=st.integers(1, 20),
)
def test_slot_size_agrees_with_the_daemons(
    pages: list[int], block_tokens: int, chunk_blocks: int
) -> None:
    layout = GroupLayout("full", block_tokens, tuple(map(str, range(len(pages)))), tuple(pages))
    chunk_tokens = block_tokens * chunk_blocks
    bases = [10_000 * i * 8 for i in range(len(pages))]
    planes = describe_group(0, layout, chunk_tokens, 8, bases, [10_000] * len(pages))
    assert planes.shard_bytes == layout.shard_bytes(chunk_tokens)
    assert planes.shard_bytes % PAGE == 0
    assert planes.shard_bytes - chunk_blocks * planes.block_bytes in range(PAGE)


def test_the_slot_holds_layer_after_layer() -> None:
    planes = GroupPlanes(0, (Plane(0, 64, 64), Plane(900, 48, 40), Plane(2000, 8, 8)), 4, 4)
    assert planes.slot_offsets() == (0, 256, 416)
    assert planes.block_bytes == 112


def test_describe_places_each_layer_where_the_engine_put_it() -> None:
    planes = describe_group(2, llama(), 64, 10, [0, 1000, 2000], [100, 100, 100], [0, 0, 1])
    assert planes.planes[1] == Plane(1000, 100, 100)
    assert planes.planes[2].region == 1
    assert planes.chunk_blocks == 2
    assert planes.planes[1].end(10) == 2000


@pytest.mark.parametrize(
    ("bases", "strides", "chunk", "says"),
    [
        ([0, 1], [100, 100, 100], 64, "give one each"),
        ([0, 1000, 2000], [100, 100], 64, "give one each"),
        ([0, 1000, 2000], [100, 100, 99], 64, "blocks overlap"),
        ([0, -1, 2000], [100, 100, 100], 64, "negative"),
        ([0, 1000, 2000], [100, 100, 100], 48, "no multiple"),
        ([0, 1000, 2000], [100, 100, 100], 0, "no multiple"),
    ],
)
def test_a_contradictory_description_is_refused(
    bases: list[int], strides: list[int], chunk: int, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        describe_group(0, llama(), chunk, 10, bases, strides)


@pytest.mark.parametrize(("group", "blocks", "per_chunk"), [(-1, 2, 1), (0, 0, 1), (0, 2, -1)])
def test_a_group_without_blocks_is_refused(group: int, blocks: int, per_chunk: int) -> None:
    with pytest.raises(UsageError):
        GroupPlanes(group, (Plane(0, 8, 8),), blocks, per_chunk)


def test_planes_must_lie_in_their_regions() -> None:
    planes = GroupPlanes(0, (Plane(0, 64, 64), Plane(640, 64, 64)), 10, 2)
    planes.check([1280])
    with pytest.raises(UsageError, match="ends at byte 1280 of a region of 1279"):
        planes.check([1279])
    with pytest.raises(UsageError, match="0 regions, and Plane"):
        planes.check([])
