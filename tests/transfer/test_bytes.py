"""Both movers move the right bytes and no others, in any layout; the GPU is a fake.

The model is a loop over single pages. All of engine memory and all of the arena are compared, so
every byte outside the planes, the blocks and the slots of a job is a guard byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.layout.copy_plan import CopyPlan, RowCopy, plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import host
from kvass.transfer.base import Job, Kind, U8Array
from kvass.transfer.batch import Region
from kvass.transfer.device import DeviceRuntime
from kvass.transfer.host import HostMover
from tests.support.gpu.fake_gpu import FakeGpu
from tests.support.gpu.stepped_mover import SteppedMover

Where = Literal["host", "cuda"]


@dataclass
class Case:
    planes: GroupPlanes
    regions: list[U8Array]
    arena: U8Array
    plan: CopyPlan


def place(
    draw: st.DrawFn, runs: list[int], blocks: int, per_chunk: int
) -> tuple[GroupPlanes, list[int]]:
    """Planes for ``runs`` in one of the ways engines lay them out, and the regions' sizes."""
    style = draw(st.sampled_from(["layers outermost", "blocks outermost", "own regions"]))
    pad, at = draw(st.integers(0, 9)), draw(st.integers(0, 70))
    planes, sizes = [], []
    for number, run in enumerate(runs):
        if style == "blocks outermost":
            planes.append(Plane(at, sum(runs) + pad, run))
            at += run
        elif style == "layers outermost":
            planes.append(Plane(at, run + pad, run))
            at = planes[-1].end(blocks) + draw(st.sampled_from([0, 0, 0, 13]))
        else:
            planes.append(Plane(at, run + pad, run, number))
    planes = draw(st.permutations(planes)) if draw(st.booleans()) else planes
    group = GroupPlanes(draw(st.integers(0, 3)), tuple(planes), blocks, per_chunk)
    for region in range(1 + max(p.region for p in planes)):
        ends = [p.end(blocks) for p in planes if p.region == region]
        sizes.append(max(ends) + draw(st.integers(0, 40)))
    return group, sizes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    per_chunk, rows = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    run = st.sampled_from([1, 7, 8, 24, 64, 100, 4096])
    runs = draw(st.lists(run, min_size=1, max_size=5) | run.map(lambda r: [r] * 4))
    blocks = draw(st.integers(per_chunk * rows + 1, per_chunk * rows + 9))
    planes, sizes = place(draw, runs, blocks, per_chunk)

    ids = draw(st.permutations(range(1, blocks))) if draw(st.booleans()) else range(1, blocks)
    table = np.array(ids[: rows * per_chunk]).reshape(rows, per_chunk)
    slots = draw(st.permutations(range(rows + 1)))[:rows]
    skip = draw(st.integers(0, per_chunk - 1))
    plan = plan_copy(planes, table, [s * planes.shard_bytes for s in slots], skip=skip)

    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    regions = [rng.integers(0, 256, n, np.uint8) for n in sizes]
    arena = rng.integers(0, 256, (rows + 1) * planes.shard_bytes + 64, np.uint8)
    return Case(planes, regions, arena, plan)


def pages(case: Case) -> Iterator[tuple[U8Array, U8Array]]:
    """Every page of the plan, one by one: (the engine's bytes, the slot's bytes)."""
    for row in case.plan.rows:
        for plane, offset in zip(case.planes.planes, case.planes.slot_offsets(), strict=True):
            for i, block in enumerate(row.blocks.tolist()):
                here = plane.base + block * plane.block_stride
                there = row.slot + offset + (row.first + i) * plane.run
                yield (
                    case.regions[plane.region][here : here + plane.run],
                    case.arena[there : there + plane.run],
                )


def model(case: Case, kind: Kind) -> None:
    for page, slot in pages(case):
        if kind == "store":
            slot[:] = page
        else:
            page[:] = slot


def copy(case: Case) -> Case:
    return Case(case.planes, [r.copy() for r in case.regions], case.arena.copy(), case.plan)


def move(case: Case, kind: Kind, where: Where = "host") -> None:
    if where == "cuda":
        fake = FakeGpu(case.plan.bytes)
        move_on_gpu(case, kind, fake, fake, fake.map(len(case.arena)))
        assert fake.violations == []
        return
    mover = HostMover(case.regions, [case.planes])
    mover.submit(Job(kind, (case.plan,), case.arena))
    assert mover.drain(10)
    mover.close()
    (done,) = mover.poll()
    assert done.ok, done.error


def move_on_gpu(
    case: Case, kind: Kind, device: Any, runtime: DeviceRuntime, arena: U8Array, **more: Any
) -> list[Region]:
    """The same with copies of all in the device's memory (which is returned) and in ``arena``, in
    windows that rows straddle; by DMA what the kernel does not take."""
    made = [device.allocate(len(region)) for region in case.regions]
    arena[:] = case.arena
    for (_, memory), region in zip(made, case.regions, strict=True):
        memory[:] = region
    regions = [region for region, _ in made]
    mover = SteppedMover(runtime, regions, [case.planes], window=8192, **more)
    done = mover.move(Job(kind, (case.plan,), arena))
    assert done.ok, done.error
    case.arena[:] = arena
    for (_, memory), region in zip(made, case.regions, strict=True):
        region[:] = memory
    return regions


def assert_equal(one: Case, other: Case) -> None:
    assert np.array_equal(one.arena, other.arena)
    for a, b in zip(one.regions, other.regions, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("where", ["host", "cuda"])
@settings(max_examples=300)
@given(case=cases(), kind=st.sampled_from(["store", "load"]))
def test_like_a_loop_over_pages(where: Where, case: Case, kind: Kind) -> None:
    expected = copy(case)
    model(expected, kind)
    move(case, kind, where)
    assert_equal(case, expected)


def shifted(row: RowCopy) -> RowCopy:
    return RowCopy(row.slot, row.first, row.blocks[::-1].copy())


@pytest.mark.parametrize("kind", ["store", "load"])
def test_negative_control_wrong_blocks_are_seen(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes = GroupPlanes(0, (Plane(0, 8, 8), Plane(64, 8, 8)), 8, 3)
    rng = np.random.default_rng(1)
    regions, arena = [rng.integers(0, 256, 128, np.uint8)], rng.integers(0, 256, 4096, np.uint8)
    case = Case(planes, regions, arena, plan_copy(planes, [[3, 5, 1]], [0]))
    expected, good = copy(case), copy(case)
    model(expected, kind)
    move(good, kind)
    assert_equal(good, expected)
    right = getattr(host.Bundle, kind)
    monkeypatch.setattr(host.Bundle, kind, lambda b, a, row: right(b, a, shifted(row)))
    move(case, kind)
    with pytest.raises(AssertionError):
        assert_equal(case, expected)
