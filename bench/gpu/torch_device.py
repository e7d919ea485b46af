"""The real ``Device``, by torch.

``open_device`` says in one line what this machine lacks, before anything is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from bench.gpu.device import Device, Plain, Table
from bench.gpu.torch_copies import TensorCopies, operations_here
from kvass.errors import ConfigError
from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import U8Array
from kvass.transfer.batch import Kind, Region, Stagings
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.device import DeviceRuntime
from kvass.transfer.open_device import TorchScratch
from kvass.transfer.staging import choose_stagings
from kvass.types import I64Array

WIDTH: Final = 8192
"""Of the matrices: large enough to keep every processor of the device busy."""
HELD_CYCLES: Final = 40_000_000
"""Some 20 ms."""


def open_device(index: int = 0) -> Device:
    """CUDA device ``index``, with vLLM's copy operation if vLLM is there. Raises ConfigError: one
    line that says what is missing."""
    if find_spec("torch") is None:
        raise ConfigError("copies on a GPU need torch, and it is not installed here")
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("torch finds no CUDA device")
    return TorchDevice(f"cuda:{index}")


class TorchMemory:
    """Memory of ``where``: what it holds. Works for "cpu" too, and so is tested without a GPU."""

    def __init__(self, where: str) -> None:
        import torch

        self._torch: Any = torch
        self._where = where
        self._tensors: dict[int, Any] = {}

    def allocate(self, count: int) -> Region:
        """Device memory, which is never given to anybody else before ``free``."""
        tensor = self._torch.empty(count, dtype=self._torch.uint8, device=self._where)
        self._tensors[tensor.data_ptr()] = tensor
        return Region(tensor.data_ptr(), count, self._where)

    def free(self, region: Region) -> None:
        del self._tensors[region.address]

    def fill(self, region: Region, seed: int) -> None:
        generator = self._torch.Generator(device=self._where).manual_seed(seed)
        self._tensors[region.address].random_(0, 256, generator=generator)
        self._over()

    def read(self, region: Region) -> U8Array:
        copy: U8Array = self._tensors[region.address].to("cpu", copy=True).numpy()
        return copy

    def clear(self, region: Region, planes: Sequence[GroupPlanes], table: Table) -> None:
        for group, ids in zip(planes, table, strict=True):
            chosen = self._ids(ids)
            for pages in self._pages(region, group):
                pages.index_fill_(0, chosen, 0)
        self._over()

    def same(
        self, region: Region, planes: Sequence[GroupPlanes], left: Table, right: Table
    ) -> bool:
        torch = self._torch
        for group, one, other in zip(planes, left, right, strict=True):
            a, b = self._ids(one), self._ids(other)
            for pages in self._pages(region, group):
                if not torch.equal(pages.index_select(0, a), pages.index_select(0, b)):
                    return False
        return True

    def index_select_s(self, region: Region, group: GroupPlanes, ids: I64Array) -> float:
        chosen, pages = self._ids(ids), self._pages(region, group)
        # Whole words where that is possible: torch copies an item at a time.
        pages = [
            p.view(self._torch.int64) if not plane.base % 8 | plane.block_stride % 8 else p
            for p, plane in zip(pages, group.planes, strict=True)
        ]
        out = [self._torch.empty((len(ids), p.shape[1]), dtype=p.dtype, device=self._where)
               for p in pages]  # fmt: skip
        self._over()
        began_s = time.perf_counter()
        for p, o in zip(pages, out, strict=True):
            self._torch.index_select(p, 0, chosen, out=o)
        self._over()
        return time.perf_counter() - began_s

    def _ids(self, ids: Any) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(ids).reshape(-1)).to(self._where)

    def _pages(self, region: Region, group: GroupPlanes) -> list[Any]:
        """Of each plane: its pages, of shape ``(blocks, run)``."""
        flat = self._tensors[region.address]
        return [
            flat.as_strided((group.blocks, p.run), (p.block_stride, 1), p.base)
            for p in group.planes
        ]

    def _over(self) -> None:
        """Wait for what was asked of the device."""
        if self._where != "cpu":
            self._torch.cuda.synchronize(self._where)


class TorchDevice(TorchMemory, Device):
    """A CUDA device."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        torch = self._torch
        self._vllm = find_spec("vllm") is not None
        self._copies = TensorCopies(torch, ())
        operations = operations_here(torch, where, self._copies)
        self._kernel = operations.copy_short
        self.runtime = DeviceRuntime(where, operations, torch)
        self._side = torch.cuda.Stream(device=where)
        a, b = (torch.randn(WIDTH, WIDTH, device=where, dtype=torch.bfloat16) for _ in range(2))
        self._factors = a, b, torch.empty_like(a)
        self._over()

    def facts(self) -> dict[str, str]:
        torch = self._torch
        return {
            "gpu": torch.cuda.get_device_name(self._where),
            "cuda": str(torch.version.cuda),
            "torch": str(torch.__version__),
            "copies": "vLLM's" if self._vllm else "torch's",
        }

    def need(self, count: int) -> None:
        free = int(self._torch.cuda.mem_get_info(self._where)[0])
        if free < count:
            raise ConfigError(
                f"this needs {count / 2**30:.1f}GiB of device memory, and {free / 2**30:.1f}GiB "
                "are free"
            )

    def allocate(self, count: int) -> Region:
        region = super().allocate(count)
        self._copies.add(self._tensors[region.address].untyped_storage())
        return region

    def free(self, region: Region) -> None:
        self._copies.remove(region.address)
        super().free(region)
        self._torch.cuda.empty_cache()

    def plain(self, count: int) -> Plain:
        return _Plain(count, self._where)

    def stagings(self, region: Region, planes: Sequence[GroupPlanes]) -> Stagings:
        scratch = partial(TorchScratch, self._where)
        return choose_stagings(self.runtime, [region], planes, KERNEL_BELOW, scratch)

    def kernel_s(self, sources: I64Array, targets: I64Array, sizes: I64Array) -> float | None:
        if self._kernel is None:
            return None
        torch = self._torch
        pinned = (torch.from_numpy(x.copy()).pin_memory() for x in (sources, targets, sizes))
        source, target, size = pinned
        self._over()
        with torch.cuda.stream(self._side):
            began_s = time.perf_counter()
            self._kernel(source, target, size, False)
            self._side.synchronize()
        return time.perf_counter() - began_s

    def host_kernel_s(
        self, sources: I64Array, offsets: I64Array, sizes: I64Array, total: int
    ) -> float | None:
        host = self._torch.empty(total, dtype=self._torch.uint8, pin_memory=True)
        return self.kernel_s(sources, host.data_ptr() + offsets, sizes)

    def compute(self, products: int) -> float:
        torch = self._torch
        a, b, out = self._factors
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._side):
            torch.cuda._sleep(HELD_CYCLES)  # until all is queued: only the device is to be measured
            begin.record()
            for _ in range(products):
                torch.mm(a, b, out=out)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class _Plain(Plain):
    """cudaMemcpyAsync, as torch gives it to a stream of its own for each kind."""

    def __init__(self, count: int, where: str) -> None:
        import torch

        self._torch: Any = torch
        self._ends: dict[Kind, tuple[Any, Any]] = {}
        self._streams: dict[Kind, Any] = {}
        kinds: tuple[Kind, Kind] = ("store", "load")
        for kind in kinds:
            host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
            there = torch.empty(count, dtype=torch.uint8, device=where)
            host.fill_(1)
            there.fill_(1)
            self._ends[kind] = (host, there) if kind == "store" else (there, host)
            self._streams[kind] = torch.cuda.Stream(device=where)
        torch.cuda.synchronize(where)

    def move(self, *kinds: Kind) -> None:
        for kind in kinds:
            target, source = self._ends[kind]
            with self._torch.cuda.stream(self._streams[kind]):
                target.copy_(source, non_blocking=True)
        for kind in kinds:
            self._streams[kind].synchronize()
