"""A test of a GPU before it is used: stores and loads of pages of known bytes.

A GPU that passes has copied the right bytes, and no others, on this machine, and its stores and
loads have waited for work that was queued before. The pages are in memory that only the test uses.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np

from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer.base import Job, U8Array
from kvass.transfer.batch import Kind, Region, Stage, Staging, Stagings, Way
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.device import DeviceRuntime
from kvass.transfer.device_mover import NO_STAGES, DeviceMover
from kvass.transfer.host import HostMover

NO_KERNEL: Final[Mapping[Kind, int]] = {"store": 0, "load": 0}
NO_PINS: Final[Mapping[Kind, int]] = {}
"""The argument ``kernel_below`` of a ``DeviceMover`` that pins nothing."""
_ALWAYS_KERNEL: Final[Mapping[Kind, int]] = {"store": 0, "load": 1 << 40}
_BLOCKS, _CHUNK, _ROWS = 24, 4, 5
_PAGES: Final = (4096 + 8, 16 << 10)
"""Page sizes in bytes: a short one with an odd number of words, and a longer one. All pages
together are below 1 MiB, because for more torch takes 20 MiB of device memory, and keeps them."""
_KINDS: Final[tuple[Kind, ...]] = ("store", "load")
_SOME_BYTES: Final = 256 << 10
"""Of a stage: all pages pass through it in two or three batches."""
_PATIENCE_S: Final = 60.0
"""The time limit of a copy. The first copy of a process compiles the kernel."""


class Scratch(Protocol):
    """``SCRATCH_BYTES`` of device memory that only the test uses."""

    region: Region

    def write(self, data: U8Array) -> None:
        """Queue a write of ``data`` on the calling thread's compute stream, behind work that takes
        time."""

    def read(self) -> U8Array:
        """The bytes that are there now. Waits for no other work."""


def _groups() -> tuple[GroupPlanes, ...]:
    groups, at = [], 0
    for number, page in enumerate(_PAGES):
        planes = (Plane(at, page, page), Plane(at + _BLOCKS * page, page, page))
        groups.append(GroupPlanes(number, planes, _BLOCKS, _CHUNK))
        at += 2 * _BLOCKS * page
    return tuple(groups)


SCRATCH_BYTES: Final = sum(2 * _BLOCKS * page for page in _PAGES)


def self_check(runtime: DeviceRuntime, scratch: Scratch) -> tuple[Mapping[Kind, int] | None, str]:
    """The argument ``kernel_below`` for a mover of this device, and what was wrong.

    ``KERNEL_BELOW`` if everything works. ``NO_KERNEL`` if copy engines work, but the kernel does
    not, or there is none. ``NO_PINS`` if no memory could be pinned, so that neither could be
    tested; the mover has logged a warning. None if copies are wrong.
    """
    wrong, ways = _trial(runtime, scratch, NO_KERNEL)
    if wrong:
        return None, f"copies: {wrong}"
    if "dma" not in ways:
        return NO_PINS, ""
    if runtime.tables is None:
        return NO_KERNEL, ""
    wrong, ways = _trial(runtime, scratch, _ALWAYS_KERNEL)
    if wrong or "kernel" not in ways:
        return NO_KERNEL, f"the kernel: {wrong or 'no memory could be pinned to try it'}"
    return KERNEL_BELOW, ""


def check_stages(runtime: DeviceRuntime, scratch: Scratch, stages: tuple[Stage, ...]) -> str:
    """What is wrong with stores and loads that go through ``stages``; empty if nothing is. Call it
    where ``self_check`` found nothing wrong."""
    # Of a part of each, so that each is written to again.
    some = tuple(Stage(one.address, _SOME_BYTES, one.owner) for one in stages)
    stagings: Stagings = {kind: Staging(1 << 40, some) for kind in _KINDS}
    wrong, ways = _trial(runtime, scratch, NO_KERNEL, stagings)
    return wrong or ("" if "staged" in ways else "no memory could be pinned to try it")


def _trial(
    runtime: DeviceRuntime,
    scratch: Scratch,
    below: Mapping[Kind, int],
    stagings: Stagings = NO_STAGES,
) -> tuple[str, set[Way]]:
    """What is wrong with a store and a load with ``below`` and ``stagings`` (empty: nothing), and
    the ways used."""
    groups, rng = _groups(), np.random.default_rng(1)
    plans, at = [], 0
    for group in groups:
        table = rng.permutation(np.arange(1, _BLOCKS))[: _ROWS * _CHUNK].reshape(_ROWS, _CHUNK)
        slots = at + group.shard_bytes * np.arange(_ROWS)
        plans.append(plan_copy(group, table, slots))
        at = plans[-1].end
    arena: U8Array = np.frombuffer(mmap.mmap(-1, at), np.uint8)
    mover = DeviceMover(runtime, [scratch.region], groups, kernel_below=below, stagings=stagings)
    try:
        return _rounds(mover, scratch, groups, tuple(plans), arena), mover.ways
    finally:
        mover.close()


def _rounds(
    mover: DeviceMover,
    scratch: Scratch,
    groups: tuple[GroupPlanes, ...],
    plans: tuple[CopyPlan, ...],
    arena: U8Array,
) -> str:
    """Do a store and a load twice. Returns what is wrong in the second round; empty if nothing is.

    The first round compiles the kernel, pins memory and opens streams. That takes longer than any
    work that is queued before it, so it would hide a copy that does not wait.
    """
    rng = np.random.default_rng(2)
    for judged in (False, True):
        for kind in _KINDS:
            before = rng.integers(0, 256, SCRATCH_BYTES, np.uint8)
            oracle = arena.copy()
            scratch.write(before)
            mover.submit(Job(kind, plans, arena))
            if not mover.drain(_PATIENCE_S):
                return f"a {kind} did not end within {_PATIENCE_S:g} s"
            found = (
                scratch.read() if judged else before
            )  # read at once, so that no later write is seen
            there = arena.copy()
            (done,) = mover.poll()
            if not done.ok:
                return f"a {kind} failed: {done.error}"
            right = HostMover([before], groups)
            right.submit(Job(kind, plans, oracle))
            right.drain(_PATIENCE_S)
            right.close()
            if judged and not np.array_equal(there, oracle):
                return f"a {kind} left wrong bytes in host memory"
            if judged and not np.array_equal(found, before):
                return f"a {kind} left wrong bytes in device memory"
    return ""
