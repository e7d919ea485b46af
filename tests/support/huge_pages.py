"""Huge pages for a test: reserved for it, and given back. Only root can reserve them."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvass.arena.huge import pool

PAGE = 2 << 20
_COUNT = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
_LOCK = Path(tempfile.gettempdir(), "kvass-tests-huge-pages.lock")


@contextmanager
def reserved(pages: int) -> Iterator[None]:
    """``pages`` more pages of ``PAGE`` bytes are reserved meanwhile. Other tests may reserve some
    at the same time. Skips the test where they cannot be had."""
    if os.geteuid() != 0 or not os.access(_COUNT, os.W_OK):
        pytest.skip("only root can reserve huge pages")
    before = pool(PAGE).free
    _add(pages)
    try:
        if pool(PAGE).free < min(pages, before + pages):
            pytest.skip(f"the kernel has no {pages} huge pages")
        yield
    finally:
        _add(-pages)


def _add(pages: int) -> None:
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _COUNT.write_text(str(max(0, pool(PAGE).total + pages)))
        except OSError as error:  # a sandbox
            if pages > 0:
                pytest.skip(f"no huge pages can be reserved: {error}")
