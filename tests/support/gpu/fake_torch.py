"""What the GPU's runtime uses of torch, on a fake GPU: streams, events, tensors of addresses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.support.gpu.fake_gpu import FakeGpu

STALE = 0xA5
"""What new device memory holds."""


class FakeTensor:
    """A tensor on the CPU, over a numpy array."""

    def __init__(self, array: Any, pinned: bool = False) -> None:
        self.array, self.pinned, self.dtype, self.device = array, pinned, array.dtype, "cpu"

    def numpy(self) -> Any:
        return self.array

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, part: Any) -> FakeTensor:
        return FakeTensor(self.array[part], self.pinned)

    def __iter__(self) -> Iterator[FakeTensor]:
        return (FakeTensor(row, self.pinned) for row in self.array)


class FakeStream:
    """A stream of the fake GPU. In its context it is the thread's current one."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.capturing = False
        gpu.add_stream(self)

    def wait_event(self, event: FakeEvent) -> None:
        self.gpu.wait_on(self, event)

    def query(self) -> bool:
        return self.gpu.query_stream(self)

    def is_capturing(self) -> bool:
        return self.capturing

    def __enter__(self) -> FakeStream:
        self.gpu.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.gpu.current.pop()


class FakeEvent:
    """An event of the fake GPU."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def record(self, stream: FakeStream) -> None:
        self.gpu.record(stream, self)

    def query(self) -> bool:
        return self.gpu.query_event(self)


class Current(threading.local):
    """The streams that a thread has entered."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.engine = False


def fake_torch(gpu: FakeGpu) -> Any:
    """The module."""

    def new_stream(device: str, priority: int = 0) -> FakeStream:
        gpu.may("open_stream")
        return FakeStream(gpu)

    def empty(shape: Any, dtype: Any, pin_memory: bool = False, device: str = "") -> FakeTensor:
        if not device:
            return FakeTensor(np.zeros(shape, dtype), pin_memory)
        gpu.may("open_stage")
        _, memory = gpu.allocate(shape)
        memory[:] = STALE
        return FakeTensor(memory)

    return SimpleNamespace(
        Stream=new_stream,
        Event=lambda device: FakeEvent(gpu),
        accelerator=SimpleNamespace(
            current_stream=lambda device: gpu.current_stream(),
            set_device_index=gpu.devices.append,
        ),
        device=lambda name: SimpleNamespace(index=int(name.partition(":")[2])),
        from_numpy=FakeTensor,
        empty=empty,
        int64=np.int64,
        uint64=np.uint64,
        uint8=np.uint8,
    )
