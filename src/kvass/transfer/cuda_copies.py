"""How the driver is given copies: all of a batch by one call, each by a call, or by a kernel.

The caller has the device's context. A result is an error of CUDA's, or 0. The first error ends the
call, and any part of the batch may have been given. The kernel's tables are allocated once, because
allocating pinned memory stops the whole device, and the engine with it.
"""

from __future__ import annotations

import ctypes
from collections import deque
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Final

import numpy as np

from kvass.transfer.runtime import MAX_DESCRIPTORS, Batch, Stream
from kvass.types import I64Array

SINGLE_RUNS: Final = 400
"""Of one batch, if each run is a call. A stream that waits takes about a thousand calls before the
driver blocks the caller: twice this, and what is called in between, are fewer."""
TABLE_SHAPE: Final = (32, 3 * MAX_DESCRIPTORS)
"""3 MiB. Of full batches no more than four are in flight."""
_STREAM_ORDER, _ANY_ORDER = 1, 3

BatchCopy: Final = ctypes.CFUNCTYPE(
    c_int,
    c_void_p,  # targets
    c_void_p,  # sources
    c_void_p,  # bytes
    c_size_t,
    c_void_p,  # attributes
    c_void_p,  # first copy of each
    c_size_t,
    c_void_p,  # index of the one that failed
    c_void_p,  # stream
)
"""``cuMemcpyBatchAsync`` of CUDA 12.8."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class Attributes(ctypes.Structure):
    """How a batch reads its sources; the hints concern managed memory only."""

    _fields_ = (
        ("order", c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", c_uint),
    )


def give_batch(copy: Any, stream: Stream, batch: Batch) -> int:
    """All by one call of ``copy``, a ``BatchCopy``."""
    attributes, first, failed = Attributes(), c_size_t(0), c_size_t(0)
    attributes.order = _ANY_ORDER if batch.kind == "load" else _STREAM_ORDER
    result: int = copy(
        batch.target.ctypes.data,
        batch.source.ctypes.data,
        batch.bytes.ctypes.data,
        len(batch.bytes),
        ctypes.addressof(attributes),
        ctypes.addressof(first),
        1,
        ctypes.addressof(failed),
        stream,
    )
    return result


def give_each(driver: Any, stream: Stream, batch: Batch) -> int:
    """A call per run: the slow way, and the only one for memory that is not registered."""
    runs = zip(batch.target.tolist(), batch.source.tolist(), batch.bytes.tolist(), strict=True)
    down, up = driver.cuMemcpyDtoHAsync_v2, driver.cuMemcpyHtoDAsync_v2
    for target, source, count in runs:
        size, handle = c_size_t(count), c_void_p(stream)
        if batch.kind == "store":
            result = down(c_void_p(target), c_uint64(source), size, handle)
        else:
            result = up(c_uint64(target), c_void_p(source), size, handle)
        if result:
            return int(result)
    return 0


class Table:
    """``rows``: targets, sources and bytes. It is free again when nobody holds it."""

    def __init__(self, number: int, rows: I64Array, free: deque[int]) -> None:
        self.rows = rows
        self._number, self._free = number, free

    def __del__(self) -> None:
        self._free.append(self._number)


class Tables:
    """The kernel's tables: ``words`` is like ``TABLE_SHAPE``, and the device can read it.

    Tables are taken on any thread and let go of on any.
    """

    def __init__(self, words: I64Array) -> None:
        self._words = words
        self.free = deque(range(len(words)))

    def take(self, batch: Batch) -> Table | None:
        """A table of the batch's runs; None if all are in use."""
        try:
            number = self.free.popleft()
        except IndexError:
            return None
        rows = self._words[number, : 3 * len(batch.bytes)].reshape(3, -1)
        for row, column in zip(rows, (batch.target, batch.source, batch.bytes), strict=True):
            row[:] = column.view(np.int64)
        return Table(number, rows, self.free)
