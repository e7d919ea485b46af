"""libcuda, made of Python: it notes what it is asked, and in which context and capture mode."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvass.transfer import cuda_copies
from kvass.transfer.cuda_runtime import DriverRuntime
from kvass.transfer.kernel_tables import TABLE_WORDS, Tables
from kvass.transfer.runtime import Batch
from kvass.types import I64Array

OURS, THEIRS = 0xC0, 0xE0
"""Contexts: the device's primary one, and another that a thread of the engine may have."""


class Driver:
    """Answers every call with ``results[name]``, or success; notes what was asked. What needs a
    context is refused without one (201), and in another than the device's (400)."""

    ANYWHERE = frozenset(
        {
            *("cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetAttribute"),
            *("cuGetProcAddress_v2", "cuGetErrorString", "cuDevicePrimaryCtxRetain"),
            *("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode"),
        }
    )

    def __init__(self, version: int = 13000, direct: int = 1, **results: int) -> None:
        self.version, self.direct, self.results = version, direct, results
        self.calls: list[str] = []
        self.batches: list[tuple[Any, ...]] = []
        self.orders: list[int] = []
        self.capturing = 0
        self.late, self.lateness = random.Random(1), 0.0
        self.modes: dict[int, int] = {}
        """Of threads that have another than the default."""
        self.made_in: dict[str, set[int]] = {}
        """Capture modes in which calls were made, by their names."""
        self.priorities: list[int] = []
        self.contexts: dict[int, list[int]] = {}
        """Of each thread; the last is the current one."""
        self.batch = cuda_copies.BatchCopy(self._batch)

    def _batch(self, *args: Any) -> int:
        if refused := self._note("cuMemcpyBatchAsync"):
            return refused
        self.batches.append(args)
        self.orders.append(cuda_copies.Attributes.from_address(args[4]).order)
        return self.results.get("cuMemcpyBatchAsync", 0)

    @property
    def stack(self) -> list[int]:
        """The contexts of the calling thread."""
        return self.contexts.setdefault(threading.get_ident(), [])

    def _note(self, name: str) -> int:
        self.calls.append(name)
        self.made_in.setdefault(name, set()).add(self.modes.get(threading.get_ident(), 0))
        if name in self.ANYWHERE or self.stack[-1:] == [OURS]:
            return 0
        return 400 if self.stack else 201

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            if refused := self._note(name):
                return refused
            if name == "cuDevicePrimaryCtxRetain":
                args[0]._obj.value = OURS
            elif name == "cuCtxPushCurrent_v2" and not self.results.get(name, 0):
                self.stack.append(args[0].value)
            elif name == "cuCtxPopCurrent_v2":
                args[0]._obj.value = self.stack.pop()
            elif name == "cuDriverGetVersion":
                args[0]._obj.value = self.version
            elif name == "cuDeviceGetAttribute":
                args[0]._obj.value = self.direct
            elif name == "cuGetProcAddress_v2":
                args[1]._obj.value = ctypes.cast(self.batch, ctypes.c_void_p).value
            elif name == "cuStreamIsCapturing":
                args[1]._obj.value = self.capturing
            elif name == "cuThreadExchangeStreamCaptureMode":
                mode, thread = args[0]._obj, threading.get_ident()
                if not self.results.get(name, 0):
                    was = self.modes.get(thread, 0)
                    self.modes[thread], mode.value = mode.value, was
            elif name == "cuCtxGetStreamPriorityRange":
                args[0]._obj.value, args[1]._obj.value = 0, -5
                if self.results.get(name, 0):
                    args[0]._obj.value = args[1]._obj.value = 77
            elif name in ("cuEventQuery", "cuStreamQuery") and self.late.random() < self.lateness:
                return 600
            elif name in ("cuEventCreate", "cuStreamCreateWithPriority"):
                if name == "cuStreamCreateWithPriority":
                    self.priorities.append(args[2].value)
                args[0]._obj.value = 4096 + len(self.calls)
            return self.results.get(name, 0)

        return call


def runtime(
    driver: Driver,
    launch: Callable[[int, I64Array], None] = lambda stream, rows: None,
    tables: int = 1,
    single: bool = False,
) -> DriverRuntime:
    return DriverRuntime(driver, 0, lambda: 55, launch, made(tables), single)


def made(count: int) -> Tables:
    return Tables(np.zeros((count, TABLE_WORDS), np.int64))


def kernel_batch(runs: int = 1) -> Batch:
    target, source, count = (np.arange(n, n + runs, dtype=np.uint64) * 8 for n in (1, 100, 200))
    return Batch("load", "kernel", target, source, count, int(count.sum()))
