"""A trial of a GPU before anything is entrusted to it: pages of known bytes, there and back.

Law of this file: what it says to be usable has moved the right bytes, and no others, on this very
machine; a store of it has waited for work that was queued before, and so has a load. It asks the
engine's memory for nothing: the pages are a scratch of its own.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np

from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer.base import Job, U8Array
from kvass.transfer.cuda import CudaMover
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.host import HostMover
from kvass.transfer.runtime import Kind, Region, Runtime

NO_KERNEL: Final[Mapping[Kind, int]] = {"store": 0, "load": 0}
_ALWAYS_KERNEL: Final[Mapping[Kind, int]] = {"store": 0, "load": 1 << 40}
_BLOCKS: Final = 24
_PAGES: Final = (4096 + 8, 64 << 10)
"""Bytes: a short run of odd words, and one that DMA likes."""
_PATIENCE_S: Final = 60.0
"""The first copy of a process compiles the kernel."""


class Scratch(Protocol):
    """Device memory that is nobody else's, of ``SCRATCH_BYTES``."""

    region: Region

    def write(self, data: U8Array) -> None:
        """Have the calling thread's compute stream write it, after something that takes time."""
        ...

    def read(self) -> U8Array:
        """What is there once that stream, and the device, have nothing left to do."""
        ...


def _planes() -> tuple[GroupPlanes, ...]:
    groups, at = [], 0
    for number, page in enumerate(_PAGES):
        planes = (Plane(at, page, page), Plane(at + _BLOCKS * page, page, page))
        groups.append(GroupPlanes(number, planes, _BLOCKS, 4))
        at += 2 * _BLOCKS * page
    return tuple(groups)


SCRATCH_BYTES: Final = sum(2 * _BLOCKS * page for page in _PAGES)


def self_check(runtime: Runtime, scratch: Scratch) -> tuple[Mapping[Kind, int] | None, str]:
    """Which table of ways this device can be trusted with, and what was wrong.

    ``KERNEL_BELOW`` and an empty text if all is right; ``NO_KERNEL`` if copy engines are, but not
    the kernel; None if bytes do not arrive at all.
    """
    if wrong := _trial(runtime, scratch, NO_KERNEL):
        return None, f"copies: {wrong}"
    if wrong := _trial(runtime, scratch, _ALWAYS_KERNEL):
        return NO_KERNEL, f"the kernel: {wrong}"
    return KERNEL_BELOW, ""


def _trial(runtime: Runtime, scratch: Scratch, below: Mapping[Kind, int]) -> str:
    """What is wrong with a store and a load this way; empty: nothing."""
    groups = _planes()
    rng = np.random.default_rng(len(below))
    slots = np.cumsum([0] + [g.shard_bytes for g in groups for _ in range(5)])
    plans, at = [], 0
    for group in groups:
        table = rng.permutation(np.arange(1, _BLOCKS))[: 5 * group.chunk_blocks].reshape(5, -1)
        plans.append(plan_copy(group, table, slots[at : at + 5]))
        at += 5
    arena: U8Array = np.frombuffer(mmap.mmap(-1, int(slots[-1])), np.uint8)
    ours, oracle = CudaMover(runtime, [scratch.region], groups, kernel_below=below), arena.copy()
    pages = rng.integers(0, 256, SCRATCH_BYTES, np.uint8)
    others = rng.integers(0, 256, SCRATCH_BYTES, np.uint8)
    try:
        trials: tuple[tuple[Kind, U8Array], ...] = (("store", pages), ("load", others))
        for kind, before in trials:
            scratch.write(before)
            ours.submit(Job(kind, tuple(plans), arena))
            if not ours.drain(_PATIENCE_S):
                return f"a {kind} did not end within {_PATIENCE_S:g} s"
            (done,) = ours.poll()
            if not done.ok:
                return f"a {kind} failed: {done.error}"
            right = HostMover([before], groups)
            right.submit(Job(kind, tuple(plans), oracle))
            assert right.drain(_PATIENCE_S), "copies in memory"
            right.close()
            if not np.array_equal(arena, oracle):
                return f"a {kind} left wrong bytes in host memory"
            if not np.array_equal(scratch.read(), before):
                return f"a {kind} left wrong bytes in device memory"
    finally:
        ours.close()
    return ""
