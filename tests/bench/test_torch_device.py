"""``bench.gpu.torch_device`` with all of ``torch.cuda`` replaced: its own Python runs, on the CPU's
memory, and moves the right bytes. What a device makes of the same calls only a device can show
(docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu import torch_device
from bench.gpu.torch_device import TorchDevice
from kvass.errors import ConfigError
from kvass.transfer.base import U8Array
from kvass.transfer.runtime import Batch, Kind, Region, Stream
from tests.support.gpu.fake_cuda import FakeCuda


class Cuda:
    """Says what was asked; ``inside``: the stream that is current."""

    def __init__(self) -> None:
        self.inside: list[Any] = []
        self.streams: list[Any] = []
        self.asked: list[str] = []

    class Stream:
        def __init__(self, device: str) -> None:
            assert device == "cpu"
            self.waited = 0

        def synchronize(self) -> None:
            self.waited += 1

    def ExternalStream(self, handle: int, device: str) -> tuple[int, str]:  # noqa: N802 - torch's
        return handle, device

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.inside.append(stream)
        self.streams.append(stream)
        yield
        self.inside.pop()

    def synchronize(self, device: str) -> None:
        self.asked.append(f"synchronize {device}")

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return 3 << 30, 8 << 30

    def empty_cache(self) -> None:
        self.asked.append("empty_cache")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made, empty = Cuda(), torch.empty
    monkeypatch.setattr(torch, "cuda", made)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **more: empty(*a, **more))
    monkeypatch.setattr(torch_device, "WIDTH", 16)
    return made


@pytest.fixture
def device(cuda: Cuda) -> TorchDevice:
    return TorchDevice(FakeCuda(0), "cpu")


def test_memory(device: TorchDevice, cuda: Cuda) -> None:
    assert device.used_bytes() == 5 << 30
    device.need(3 << 30)
    with pytest.raises(ConfigError, match=r"needs 4\.0GiB of device memory, and 3\.0GiB are free"):
        device.need(4 << 30)
    region = device.allocate(1000)
    assert region.bytes == 1000
    device.fill(region, 1)
    first = device.read(region)
    device.fill(region, 2)
    assert len(np.unique(first)) > 200
    assert not np.array_equal(first, device.read(region))
    device.free(region)
    assert cuda.asked[-1] == "empty_cache"


@pytest.mark.parametrize("kind", ["store", "load"])
def test_one_by_one_moves_every_run(kind: Kind, device: TorchDevice, cuda: Cuda) -> None:
    region = device.allocate(4096)
    device.fill(region, 1)
    host: U8Array = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    before, kept = device.read(region), host.copy()
    places = np.array([[1024, 0], [0, 512], [2048, 3000]])
    batch = _batch(kind, region, host, places, 256)
    give = device.one_by_one(batch, region, host)
    assert np.array_equal(host, kept)
    give(Stream(77))
    assert cuda.streams == [(77, "cpu")]
    after = device.read(region)
    for there, here in places.tolist():
        at, to = slice(there, there + 256), slice(here, here + 256)
        right = before[at] if kind == "store" else kept[to]
        assert np.array_equal(after[at], right)
        assert np.array_equal(host[to], right)
    assert np.count_nonzero(after != before) <= (768 if kind == "load" else 0)
    assert np.count_nonzero(host != kept) <= (768 if kind == "store" else 0)


def _batch(kind: Kind, region: Region, host: U8Array, places: Any, count: int) -> Batch:
    there = (region.address + places[:, 0]).astype(np.uint64)
    here = (host.ctypes.data + places[:, 1]).astype(np.uint64)
    target, source = (there, here) if kind == "load" else (here, there)
    lengths = np.full(len(places), count, np.uint64)
    return Batch(kind, "dma", target, source, lengths, count * len(places))


def test_plain_copies_go_each_way_on_streams_of_their_own(device: TorchDevice, cuda: Cuda) -> None:
    plain: Any = device.plain(100)
    for target, _ in plain._ends.values():
        target.zero_()
    plain.move("store")
    assert plain._ends["store"][0].sum() == 100
    assert plain._ends["load"][0].sum() == 0
    cuda.streams.clear()
    plain.move("store", "load")
    assert plain._ends["load"][0].sum() == 100
    assert len(set(cuda.streams)) == 2
    assert [stream.waited for stream in plain._streams.values()] == [2, 1]
