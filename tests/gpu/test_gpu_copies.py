"""Bytes, order and reuse: one mover, one arena. On a fake, and on a GPU (never run: docs/gpu.md).

Each test of an order has a control without it that must go wrong.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from kvass.arena import memory
from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer.base import Job
from kvass.transfer.batch import Kind
from kvass.transfer.device_mover import DeviceMover
from tests.gpu.device import Counting, Device, Hasty, Refusing
from tests.gpu.kv import NAMES, keys_of
from tests.gpu.rig import ALWAYS_KERNEL, NEVER_KERNEL, rigged

MANY = [name for name in NAMES if not name.endswith("_blocks")]
"""A geometry of each model."""


@pytest.mark.parametrize("way", ["dma", "kernel", "pageable"])
@pytest.mark.parametrize("name", NAMES)
def test_every_byte_there_and_back(device: Device, name: str, way: str) -> None:
    """And no block of anybody else's is touched."""
    runtime: Any = Counting(Refusing(device.runtime) if way == "pageable" else device.runtime)
    more: dict[str, Any] = {"kernel_below": ALWAYS_KERNEL} if way == "kernel" else {}
    with rigged(device, name, runtime=runtime, **more) as rig:
        rig.compute()
        assert rig.move("store").ok
        assert rig.stored()
        rig.fill(0)
        rig.fill(0x5A, table=1)
        before = rig.kv.digest(rig.tables[1])
        assert rig.move("load").ok
        assert rig.loaded()
        assert rig.kv.digest(rig.tables[1]) == before
        sizes = {page % 8 for group in rig.geometry.groups for page in group.page_bytes}
        assert way != "kernel" or (way in runtime.ways) == (0 in sizes), "words of 8 bytes"
        assert runtime.ways <= {way, "dma"}


# ------------------------------------------------------------ order, each with its control


@pytest.mark.parametrize("hasty", [False, True])
@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("name", MANY)
def test_copies_wait_for_what_the_engine_has_queued(
    device: Device, name: str, kind: Kind, hasty: bool
) -> None:
    """A store for the forward pass, a load for blocks that are zeroed."""
    runtime: Any = Hasty(device.runtime) if hasty else device.runtime
    storing = kind == "store"
    with rigged(device, name, runtime=runtime) as rig:
        rig.compute(keys=keys_of("before", rig.rows) if storing else None)
        assert rig.move("store").ok  # pins, too
        kernels = rig.kv.writes(rig.keys, rig.tables[0])
        if not storing:
            kernels = rig.kv.fills(rig.tables[1], 0)
        device.hold()
        for kernel in kernels:
            device.queue(kernel)
        rig.submit(kind, table=int(not storing))
        assert not device.idle(), "whoever launches too much waits for the stream"
        rig.given_time()
        assert rig.end().ok
        assert (rig.stored() if storing else rig.loaded(table=1)) is not hasty


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("why", ["finish", "preemption", "window"])
@pytest.mark.parametrize("name", ["llama_8b", "gpt_oss", "deepseek_v4"])
def test_blocks_are_reused_when_poll_said_so(
    device: Device, name: str, why: str, early: bool
) -> None:
    """The blocks of a store in flight are freed and another request's kernels come: when a request
    finishes all of them, when it is preempted too (and it loads again into others), when a window
    slides the first half. Control: they are reused as soon as freed."""
    with rigged(device, name, rows=4) as rig:
        rig.compute()
        freed = [t if why != "window" else t[: len(t) // 2] for t in rig.tables[0]]
        other = rig.kv.fills(freed, 0x77)
        rig.submit("store")
        if not early:
            assert rig.end().ok
        for kernel in other:
            device.queue(kernel)
        if early:
            assert rig.end().ok
        right = rig.stored()
        if why == "preemption":
            rig.fill(0, table=1)
            assert rig.move("load", table=1).ok
            right = right and rig.loaded(table=1)
        assert right is not early


@pytest.mark.parametrize("early", [False, True])
def test_blocks_of_a_load_are_reused_when_poll_said_so(device: Device, early: bool) -> None:
    """A request is aborted while it loads: another's kernels write its blocks."""
    with rigged(device, "llama_8b", rows=4) as rig:
        rig.compute()
        assert rig.move("store").ok
        theirs = keys_of("other", rig.rows)
        kernels = rig.kv.writes(theirs, rig.tables[1])
        rig.submit("load", table=1)
        if not early:
            assert rig.end().ok
        for kernel in kernels:
            device.queue(kernel)
        if early:
            rig.kv.digest(rig.tables[1])  # they ran
            assert rig.end().ok
        assert rig.loaded(table=1, keys=theirs) is not early


def test_both_directions_while_the_engine_rewrites_other_blocks(device: Device) -> None:
    with rigged(device, "llama_70b_tp8", rows=4) as rig, rigged(device, "deepseek_v3") as two:
        rig.compute()
        two.compute()
        assert two.move("store").ok
        two.fill(0)
        kinds: list[Kind] = ["store", "load"]
        for _ in range(3):
            for one, kind in zip((rig, two), kinds, strict=True):
                one.submit(kind)
            for n in range(20):
                rig.fill(n, table=1)
                two.fill(n, table=1)
            assert rig.end().ok
            assert two.end().ok
            assert rig.stored()
            assert two.loaded()
            two.fill(0)


# ------------------------------------------------------------ numbers of descriptors


@pytest.mark.parametrize("count", [1, 4096, 4097, 9000])
def test_any_number_of_descriptors(device: Device, count: int) -> None:
    """Pages of 64 bytes in blocks that are no neighbours: as many runs as pages."""
    size = 64
    group = GroupPlanes(0, (Plane(0, 2 * size, size),), blocks=count + 1, chunk_blocks=count)
    codes = np.random.default_rng(count).integers(0, 256, (count + 1, 2, size), np.uint8)
    storage = torch.zeros(codes.size, dtype=torch.uint8, device=device.where)
    arena = memory.create(group.shard_bytes)
    counting: Any = Counting(device.runtime)
    mover = DeviceMover(counting, [device.region(storage)], [group], kernel_below=NEVER_KERNEL)
    plan = plan_copy(group, np.arange(1, count + 1)[None, :], [0])
    there = device.up(codes.reshape(-1))

    def move(kind: Kind) -> None:
        with device.engine():
            mover.submit(Job(kind, (plan,), arena.buffer))
        assert mover.drain(300)
        assert mover.poll()[0].ok

    device.queue(lambda: storage.copy_(there))
    move("store")
    assert np.array_equal(arena.buffer[: count * size], codes[1:, 0].reshape(-1))
    assert counting.descriptors.sum() == count
    assert counting.descriptors.max() <= 4096
    device.queue(lambda: storage.zero_())
    move("load")
    codes[:, 1] = codes[0] = 0
    assert np.array_equal(device.read(lambda: storage), codes.reshape(-1))
    mover.close()
    arena.close()


# ------------------------------------------------------------ pinning


@pytest.mark.parametrize("nth", [0, 1, 2])
@pytest.mark.parametrize("name", ["llama_8b_blocks", "deepseek_v4"])
def test_a_window_that_cannot_be_pinned_goes_slowly(
    device: Device, name: str, nth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, all bytes right, also of pages that lie in two windows, and the other windows go
    the fast way."""
    refusing = Refusing(device.runtime, nth)
    runtime: Any = Counting(refusing)
    with rigged(device, name) as plain:
        window = plain.arena.size // 4 // 4096 * 4096
    with (
        caplog.at_level(logging.WARNING),
        rigged(device, name, runtime=runtime, window=window) as rig,
    ):
        rig.compute()
        assert rig.move("store").ok
        assert rig.stored()
        rig.fill(0)
        assert rig.move("load").ok
        assert rig.loaded()
    assert refusing.asked >= 4
    assert runtime.ways == {"dma", "pageable"}
    assert len([r for r in caplog.records if "could not pin" in r.message]) == 1


# ------------------------------------------------------------ what it costs the engine


def test_submit_waits_for_nothing(device: Device) -> None:
    """Neither for the engine's stream nor for copies that wait for it."""
    with rigged(device, "llama_8b") as rig:
        rig.compute()
        assert rig.move("store").ok
        device.hold()
        rig.fill(1, table=1)
        for _ in range(50):
            rig.submit("store")
        assert not device.idle(), "submit took as long as the work before it"
        device.let_go()
        assert rig.mover.drain(120)
        ends = rig.mover.poll()
        assert len(ends) == 50
        assert all(done.ok for done in ends)
