"""Streams, events and vLLM's copy operation without a GPU, for ``offloading_spec``.

A stream is a thread that carries out its copies in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch

from bench.short_hits import PACE

BYTES_S: Final = float(os.environ.get(PACE, "inf"))
"""A copy takes as long as at this rate, unless it takes longer."""


class Stream:
    """Carries out what it is given in order, on a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "offloading-stream")

    def do(self, work: Any, *args: Any) -> Future[Any]:
        return self._thread.submit(work, *args)

    def wait_stream(self, other: None) -> None:
        """The model's stream: what it was given is done, on the thread that calls."""
        assert other is None

    def wait_event(self, event: Event) -> None:
        self.do(event.synchronize)


class Event:
    """The time at which a stream came to it."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self._reached: Future[float] | None = None

    def record(self, stream: Stream) -> None:
        self._reached = stream.do(time.perf_counter)

    def query(self) -> bool:
        return self._future.done()

    def synchronize(self) -> None:
        self._future.result()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return (end._future.result() - self._future.result()) * 1e3

    @property
    def _future(self) -> Future[float]:
        assert self._reached is not None
        return self._reached


_current: list[Stream] = []


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    _current.append(stream)
    try:
        yield
    finally:
        _current.remove(stream)


def copy_runs(
    sources: torch.Tensor,
    targets: torch.Tensor,
    sizes: torch.Tensor,
    is_src_access_order_any: bool = False,
) -> None:
    """vLLM's ``swap_blocks_batch``, on the current stream."""
    runs = [tensor.numpy().copy() for tensor in (sources, targets, sizes)]
    _current[-1].do(_copy, *joined(*runs))


def joined(sources: Any, targets: Any, sizes: Any) -> Iterator[list[int]]:
    """The runs, those joined that follow each other on both sides: fewer calls."""
    follow = [side[1:] == side[:-1] + sizes[:-1] for side in (sources, targets)]
    first = np.flatnonzero(np.concatenate(([True], ~(follow[0] & follow[1]))))
    lengths = np.add.reduceat(sizes, first)
    return (column.tolist() for column in (sources[first], targets[first], lengths))


def _copy(sources: list[int], targets: list[int], sizes: list[int]) -> None:
    until_s = time.perf_counter() + sum(sizes) / BYTES_S
    for source, target, size in zip(sources, targets, sizes, strict=True):
        ctypes.memmove(target, source, size)
    time.sleep(max(0.0, until_s - time.perf_counter()))
