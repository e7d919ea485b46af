"""``PageStore`` against memcpy of the same bytes in the same rounds.

``PAGES`` pages of each size are stored from consecutive pages of memory and loaded into pages in
random order. A memcpy has one call for each page, between private memory and memory of the arena's
kind. Each side goes first in every second round. The pages of one token have 16 KiB.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np

from kvass import PageStore, Plane
from kvass.cli.bench.rig import (
    MODEL,
    PATIENCE_S,
    WIDTH,
    best_ratio,
    fresh_name,
    private_memory,
    seconds,
    shared_memory,
)
from kvass.errors import Unavailable
from kvass.transfer.base import U8Array

PAGES: Final = 128
LARGE: Final = 1 << 20
TOKEN: Final = 16 << 10
ORDERS: Final = (
    ("put", "copy in", "has", "get", "copy out"),
    ("copy in", "put", "has", "copy out", "get"),
)


def measure_pages(socket: str, rounds: int = 15) -> dict[str, Any]:
    """Ratios and times; ``bench/__init__.py`` explains the names. Raises ``Unavailable``."""
    large, same = _measure(socket, LARGE, rounds)
    token, same_token = _measure(socket, TOKEN, rounds)
    return {
        "page_get_vs_memcpy": best_ratio(large["get"], large["copy out"]),
        "page_put_vs_memcpy": best_ratio(large["put"], large["copy in"]),
        "page_ms": {name: 1000 * median(large[name]) for name in ("get", "put", "has")},
        "token_page_ms": {name: 1000 * median(token[name]) for name in ("get", "put", "has")},
        "bytes_equal": same and same_token,
    }


def _measure(socket: str, size: int, rounds: int) -> tuple[dict[str, list[float]], bool]:
    """Seconds by step and round, and whether all loaded bytes were right."""
    times: dict[str, list[float]] = {}
    same = True
    memory = private_memory(2 * PAGES * size)
    grid = memory.reshape(2, PAGES, size)
    order = np.random.default_rng(0).permutation(PAGES)
    target = (order + PAGES).tolist()
    with ExitStack() as ending:
        shared = shared_memory(PAGES * size)
        ending.callback(shared.close)
        plane, name = Plane(0, size, size), fresh_name()
        fields = {"weights": name}
        store = PageStore(socket, fields, [plane], [memory], 1, 2 * PAGES, name=MODEL)
        ending.enter_context(closing(store))
        if not store.wait_connected(PATIENCE_S):
            raise Unavailable("the daemon does not answer")
        other: U8Array = shared.buffer.reshape(PAGES, size)
        ending.callback(lambda: store.clear(PATIENCE_S))
        for number in range(rounds + 2):  # the first two warm up
            keys = [os.urandom(WIDTH) for _ in range(PAGES)]
            grid[0, :, :: 1 << 10] += np.uint8(1)
            steps: dict[str, Callable[[], object]] = {
                "put": partial(_all, store.put, keys, range(PAGES)),
                "copy in": partial(_copy, other, grid[0]),
                "has": partial(store.has, keys),
                "get": partial(store.get, keys, target),
                "copy out": partial(_copy, grid[1], other),
            }
            for step in ORDERS[number % 2]:
                if step == "has":
                    grid[1] = 0
                took_s = seconds(steps[step])
                if number > 1:
                    times.setdefault(step, []).append(took_s)
                if step == "get":
                    same &= np.array_equal(grid[1, order], grid[0])
            store.clear(PATIENCE_S)  # the next round writes to the same slots
        del other
    return times, bool(same)


def _all(put: Any, keys: list[bytes], pages: range) -> None:
    if not all(put(keys, pages)):
        raise Unavailable("the daemon did not store all pages: give it more --l1-size")


def _copy(to: U8Array, source: U8Array) -> None:
    for page, other in zip(to, source, strict=True):
        page[:] = other
