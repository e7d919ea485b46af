"""Tiers in trouble, behind a real daemon: never a wrong byte, a miss in bounded time, and back."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvass.errors import Unavailable
from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.fake_engine import FakeEngine
from tests.client import test_tiers
from tests.client.test_tiers import (
    LARGE,
    PROMPT,
    engine,
    eventually,
    flushed,
    loaded,
    tiered,
)
from tests.daemon.tier_rig import tier_of
from tests.support.tiers.faulty import url

stored, cold = test_tiers.stored, test_tiers.cold
BOUND_S = 20.0
"""Far above any budget here, and far below for ever."""


class Faulty:
    """A daemon over a tier that obeys ``tell``, and the disk behind that."""

    def __init__(self, daemon: Daemon, orders: Path) -> None:
        self.daemon = daemon
        self._orders = orders

    def tell(self, *words: str) -> None:
        for one in self._orders.iterdir():
            one.unlink()
        for word in words:
            (self._orders / word).touch()


@contextmanager
def faulty(folder: Path) -> Iterator[Faulty]:
    for name in ("disk", "orders"):
        (folder / name).mkdir(exist_ok=True)
    tier = url(folder / "orders", f"disk:{folder / 'disk'}?capacity=256MiB")
    with running_daemon(folder, "16MiB", tier=[tier], lost_engine_grace_s=0.2) as daemon:
        yield Faulty(daemon, folder / "orders")


def in_bounds(one: FakeEngine, prompt: range, budget_s: float = 0.2) -> int:
    """``loaded``, which must not take long, whatever the tier does."""
    one.scheduler.lookups.budget_s = budget_s
    began = time.monotonic()
    chunks = loaded(one, prompt)
    assert time.monotonic() - began < BOUND_S
    return chunks


@pytest.mark.parametrize("trouble", [("dead",), ("raise",), ("spoil",), ("hold-load",), ("slow",)])
def test_trouble_is_a_miss_and_goes_by(cold: Path, trouble: tuple[str, ...]) -> None:
    with faulty(cold) as tier:
        with engine(tier.daemon) as one:
            eventually(lambda: bool(tier_of(tier.daemon)))
            tier.tell(*trouble)
            assert in_bounds(one, PROMPT) == 0
            assert one.store(range(1000, 1064)) == 4  # the engine's work goes on
            assert in_bounds(one, range(1000, 1064), budget_s=BOUND_S / 2) == 4
            tier.tell()
            eventually(lambda: in_bounds(one, PROMPT) == 8)
        tier.daemon.wait_until(leases=0, pins=0, rows_loading=0, promotions=0)


def test_engines_in_threads_over_a_tier_under_pressure(tmp_path: Path) -> None:
    """Four engines of one namespace, prompts of three times L1, daemons killed meanwhile: what
    is loaded is right, nobody starves, and in the end nothing is held."""
    prompts = [range(1000 * i, 1000 * i + 8 * 16) for i in range(24)]
    stop = threading.Event()

    hits = [0] * 4

    def work(daemon: Daemon, me: int) -> None:
        with engine(daemon, model=LARGE, seed=me) as one:
            for turn in itertools.count():
                if stop.is_set():
                    return
                prompt = prompts[(turn * 7 + me * 5) % len(prompts)]
                try:
                    hits[me] += in_bounds(one, prompt)
                    one.store(prompt)
                except Unavailable:  # the daemon was killed just now
                    one.wait_connected()

    with tiered(tmp_path) as daemon:
        with ThreadPoolExecutor(4) as pool:
            working = [pool.submit(work, daemon, me) for me in range(4)]
            try:
                for _ in range(2):
                    eventually(lambda: tier_of(daemon).get("loaded_rows", 0) > 50)
                    daemon.restart()
                eventually(lambda: tier_of(daemon).get("loaded_rows", 0) > 50 and all(hits))
            finally:
                stop.set()
                for done in working:
                    done.result(timeout=60)
            assert all(hits), hits
        daemon.wait_until(leases=0, reservations=0, promotions=0, rows_loading=0)
        flushed(daemon)
        daemon.wait_until(pins=0)
