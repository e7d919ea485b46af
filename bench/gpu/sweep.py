"""Copies in runs of every length, by every method; ``transfer.descriptors.KERNEL_BELOW`` is chosen
from these.

In every round the methods get the same copies, one after the other, and every byte is compared
after each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final, Literal

import numpy as np

from bench.gpu.device import Device
from kvass.cli.bench.rig import PATIENCE_S, shared_memory
from kvass.errors import Unavailable
from kvass.transfer.base import U8Array
from kvass.transfer.cuda import BATCH_BYTES
from kvass.transfer.descriptors import batches
from kvass.transfer.runtime import Batch, Event, Fault, Kind, Region, Stream
from kvass.types import I64Array, Size

SIZES: Final = tuple(4096 << n for n in range(13))
"""4 KiB to 16 MiB."""
BYTES: Final = 64 << 20
"""Of one measurement, each way."""
Way = Literal["torch", "batch", "kernel"]
WAYS: Final[tuple[Way, ...]] = ("torch", "batch", "kernel")
DIRECTIONS: Final[dict[str, tuple[Kind, ...]]] = {
    "store": ("store",),
    "load": ("load",),
    "both": ("store", "load"),
}
Give = Callable[[Stream], object]


def measure_sweep(
    device: Device, rounds: int, sizes: Sequence[int] = SIZES, total: int = BYTES
) -> dict[str, Any]:
    """``gpu_sweep``: GB/s by direction, way and length; ``gpu_kernel_below``. Raises
    ``Unavailable``."""
    lanes = [_Lane(device, kind, total) for kind in DIRECTIONS["both"]]
    try:
        return _measure(lanes, rounds, sizes)
    finally:
        for lane in lanes:
            lane.close()


def _measure(lanes: list[_Lane], rounds: int, sizes: Sequence[int]) -> dict[str, Any]:
    sweep: dict[str, dict[str, dict[str, float]]] = {
        name: {way: {} for way in WAYS} for name in DIRECTIONS
    }
    same = True
    for size in sizes:
        for lane in lanes:
            lane.cut(size)
        for name, kinds in DIRECTIONS.items():
            chosen = [lane for lane in lanes if lane.kind in kinds]
            times: dict[Way, list[float]] = {way: [] for way in WAYS}
            for number in range(rounds + 1):  # the first warms up
                for way in WAYS:
                    for lane in chosen:
                        lane.prepare(number)
                    took_s = _race(chosen, way)
                    same = all(lane.right() for lane in chosen) and same
                    if number:
                        times[way].append(took_s)
            total = sum(lane.bytes for lane in chosen)
            for way in WAYS:
                sweep[name][way][str(Size(size))] = total / median(times[way]) / 1e9
    return {"gpu_sweep": sweep, "gpu_kernel_below": _below(sweep, sizes), "bytes_equal": same}


def _race(lanes: list[_Lane], way: Way) -> float:
    """Seconds until all copies of all lanes are over, given in turns."""
    gives = [lane.gives[way] for lane in lanes]
    began_s = time.perf_counter()
    for turn in zip(*gives, strict=True):
        for lane, give in zip(lanes, turn, strict=True):
            _must(give(lane.stream))
    for lane in lanes:
        lane.wait()
    return time.perf_counter() - began_s


def _below(sweep: dict[str, Any], sizes: Sequence[int]) -> dict[str, int]:
    """By direction, the shortest measured run from which on batches are never the slower way."""
    found: dict[str, int] = {}
    for kind in DIRECTIONS["both"]:
        at = len(sizes)
        while at and (
            sweep[kind]["batch"][str(Size(sizes[at - 1]))]
            >= sweep[kind]["kernel"][str(Size(sizes[at - 1]))]
        ):
            at -= 1
        found[kind] = 0 if at == 0 else sizes[at] if at < len(sizes) else 2 * sizes[-1]
    return found


class _Lane:
    """Copies of one kind between a region of the device and registered memory, on one stream: the
    pages in any order on the device, one after the other in the arena, as a slot has them."""

    def __init__(self, device: Device, kind: Kind, total: int) -> None:
        self.device, self.kind, self.bytes = device, kind, total
        self.gives: dict[Way, list[Give]] = {}
        self.arena = shared_memory(total)
        self.host: U8Array = self.arena.buffer
        self.host[:] = np.random.default_rng(1).integers(0, 256, total, np.uint8)
        self.region: Region = device.allocate(total)
        _must(device.runtime.register(self._at, total))
        self.stream: Stream = _must(device.runtime.open_stream(kind))
        self._order: I64Array = np.zeros(1, np.int64)
        self._batches: list[Batch] = []

    @property
    def _at(self) -> int:
        return int(self.host.ctypes.data)

    def close(self) -> None:
        """If it cannot be known that nothing runs any more, all stays where it is."""
        try:
            self.wait()
        except Unavailable:
            return
        runtime = self.device.runtime
        runtime.close_stream(self.stream)
        _must(runtime.unregister(self._at))
        self.gives.clear()
        del self.host
        self.arena.close()
        self.device.free(self.region)

    def cut(self, size: int) -> None:
        """Runs of ``size`` bytes from now on."""
        count = self.bytes // size
        self._order = np.random.default_rng(2).permutation(count)
        there = self.region.address + size * self._order
        here = self._at + size * np.arange(count)
        lengths = np.full(count, size, np.int64)
        self.gives, self._batches = {way: [] for way in WAYS}, []
        for part in batches(lengths, BATCH_BYTES):
            batch = self._batch(there[part], here[part], lengths[part])
            launched = replace(batch, way="kernel", keep=[])
            each = self.device.one_by_one(batch, self.region, self.host)
            self.gives["torch"].append(each)
            self.gives["batch"].append(self._giver(batch))
            self.gives["kernel"].append(self._giver(launched))

    def _batch(self, there: I64Array, here: I64Array, lengths: I64Array) -> Batch:
        ends = there.astype(np.uint64), here.astype(np.uint64)
        target, source = ends if self.kind == "load" else ends[::-1]
        total = int(lengths.sum())
        return Batch(self.kind, "dma", target, source, lengths.astype(np.uint64), total)

    def _giver(self, batch: Batch) -> Give:
        self._batches.append(batch)
        return lambda stream: self.device.runtime.copy(stream, batch)

    def prepare(self, seed: int) -> None:
        """Wrong bytes where right ones are to come."""
        self.device.fill(self.region, seed)
        if self.kind == "store":
            self.host[:] = 0

    def wait(self) -> None:
        """Until the stream's work is over."""
        runtime = self.device.runtime
        event: Event = _must(runtime.mark(self.stream))
        deadline = time.monotonic() + PATIENCE_S
        while not _must(runtime.done(event)):
            if time.monotonic() > deadline:
                raise Unavailable(f"copies did not end within {PATIENCE_S:.0f} s")
        runtime.forget(event)
        for batch in self._batches:
            batch.keep.clear()

    def right(self) -> bool:
        """Whether every run is where it belongs."""
        pages = self.device.read(self.region).reshape(len(self._order), -1)
        return np.array_equal(pages[self._order], self.host.reshape(pages.shape))


def _must(got: Any) -> Any:
    """``got``; raises Unavailable for a fault."""
    if isinstance(got, Fault):
        raise Unavailable(f"the device: {got.text}")
    return got


def sweep_table(sweep: dict[str, dict[str, dict[str, float]]]) -> str:
    """GB/s by length, for a person."""
    columns = [(name, way) for name in sweep for way in sweep[name]]
    heads = [f"{name} {way}" for name, way in columns]
    lines = [f"{'GB/s, runs of':<14}" + "".join(f"{head:>14}" for head in heads)]
    first, way = columns[0]
    for size in sweep[first][way]:
        figures = "".join(f"{sweep[name][way][size]:>14.3g}" for name, way in columns)
        lines.append(f"{size:<14}{figures}")
    return "\n".join(lines)
