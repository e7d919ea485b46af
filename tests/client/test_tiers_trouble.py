"""Tiers in trouble, behind a real daemon: never a wrong byte, a miss in bounded time, and back."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from kvass.errors import Unavailable
from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.fake_engine import WIDTH, FakeEngine, chunk_keys
from kvass.types import PAGE
from tests.client import test_tiers
from tests.client.test_tiers import (
    LARGE,
    PROMPT,
    engine,
    eventually,
    flushed,
    loaded,
    tier_of,
    tiered,
)
from tests.support.servers.redis import RedisServer

stored, cold = test_tiers.stored, test_tiers.cold
BOUND_S = 20.0
"""Far above any budget here, and far below for ever."""


class Faulty:
    """A daemon over a tier that obeys ``tell``, and the disk behind that."""

    def __init__(self, daemon: Daemon, orders: Path) -> None:
        self.daemon = daemon
        self._orders = orders

    def tell(self, *words: str) -> None:
        new = self._orders.with_suffix(".new")
        new.write_text(" ".join(words))
        new.replace(self._orders)


@contextmanager
def faulty(folder: Path, *more: str, **options: Any) -> Iterator[Faulty]:
    """``more``: tiers behind it."""
    disk, orders = folder / "disk", folder / "orders"
    disk.mkdir(exist_ok=True)
    inner = quote(f"disk:{disk}?capacity=256MiB", safe="")
    url = f"tests.support.tiers.faulty:FaultyTier?inner={inner}&orders={quote(str(orders))}"
    with running_daemon(
        folder, "16MiB", tier=[url, *more], lost_engine_grace_s=0.2, **options
    ) as daemon:
        yield Faulty(daemon, orders)


def in_bounds(one: FakeEngine, prompt: range) -> int:
    """``loaded``, which must not take long, whatever the tier does."""
    one.scheduler._lookup_budget_s = 0.2
    began = time.monotonic()
    chunks = loaded(one, prompt)
    assert time.monotonic() - began < BOUND_S
    return chunks


@pytest.mark.parametrize("trouble", ["dead", "raise", "spoil", "hang", "slow"])
def test_trouble_is_a_miss_and_goes_by(cold: Path, trouble: str) -> None:
    with faulty(cold) as tier:
        with engine(tier.daemon) as one:
            eventually(lambda: bool(tier_of(tier.daemon)))
            tier.tell(trouble)
            assert in_bounds(one, PROMPT) == 0
            assert one.store(range(1000, 1064)) == 4  # the engine's work goes on
            assert in_bounds(one, range(1000, 1064)) == 4
            tier.tell()
            eventually(lambda: in_bounds(one, PROMPT) == 8)
        tier.daemon.wait_until(leases=0, pins=0, rows_loading=0, promotions=0)


def test_a_tier_that_promises_everything_gives_nothing(tmp_path: Path) -> None:
    with faulty(tmp_path) as tier, engine(tier.daemon) as one:
        tier.tell("promise")
        eventually(lambda: bool(tier_of(tier.daemon)))
        eventually(
            lambda: in_bounds(one, PROMPT) == 0 and tier_of(tier.daemon).get("load_misses", 0) > 0
        )
        tier.tell()
        tier.daemon.wait_until(promotions=0, rows_loading=0)  # they would not be stored
        assert one.store(PROMPT) == 8
        eventually(lambda: in_bounds(one, PROMPT) == 8)


def test_a_tier_that_hangs_delays_no_other_and_no_end(cold: Path) -> None:
    """The first tier's loads never come back; the second one serves, and SIGTERM ends it all."""
    (cold / "second").mkdir()
    second = f"disk:{cold / 'second'}?capacity=64MiB"
    only_second = range(5000, 5128)
    with running_daemon(cold, "16MiB", tier=[second]) as daemon, engine(daemon) as one:
        assert one.store(only_second) == 8
        flushed(daemon)
    with faulty(cold, second, stop_s="0.2") as tier:

        def hanging() -> bool:
            return bool(tier_of(tier.daemon).get("loading_bytes", 0) > 0)

        with engine(tier.daemon) as one:
            tier.tell("hang")
            eventually(lambda: in_bounds(one, PROMPT) == 0 and hanging())
            eventually(lambda: in_bounds(one, only_second) == 8)
            assert hanging()
            assert tier_of(tier.daemon, 1)["loaded_rows"] >= 16
            assert one.store(range(1000, 1064)) == 4
            flushed(tier.daemon, 1)
            assert tier_of(tier.daemon, 1)["stored_rows"] > 0
        began = time.monotonic()
        tier.daemon.stop()
        assert time.monotonic() - began < BOUND_S


def test_many_lookups_of_one_cold_prompt_are_one_load(cold: Path) -> None:
    """64 requests that arrive together, each with lookups of its own, while the tier is slow."""
    with faulty(cold) as tier:
        with engine(tier.daemon) as one:
            keys = b"".join(chunk_keys(PROMPT, 16))
            eventually(lambda: bool(tier_of(tier.daemon)))
            tier.tell("slow")
            found: dict[int, Any] = {}
            deadline = time.monotonic() + BOUND_S
            while len(found) < 64 and time.monotonic() < deadline:
                one.scheduler.new_step()
                one.scheduler._step_wait_s = 0.002
                for request in set(range(64)) - found.keys():
                    answer = one.scheduler.match(f"r{request}", keys, WIDTH, 0)
                    if not hasattr(answer, "lease") and answer is not None:
                        continue
                    found[request] = answer
            assert [match.chunks for match in found.values() if match] == [8] * 64
            assert tier_of(tier.daemon)["loaded_rows"] == 16
            for request in found:
                one.scheduler.settle(f"r{request}")
        tier.daemon.wait_until(leases=0, pins=0)


def test_a_redis_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    with closing(RedisServer()) as server:
        url = f"redis:{server.address}?timeout_s=1"
        with running_daemon(tmp_path, "16MiB", tier=[url]) as daemon, engine(daemon) as one:
            assert one.store(PROMPT) == 8
            flushed(daemon)
            assert tier_of(daemon)["stored_rows"] == 16
            server.kill()
            assert one.store(range(1000, 1064)) == 4
            assert in_bounds(one, range(2000, 2064)) == 0
            eventually(lambda: tier_of(daemon)["up"] is False)
            server.start()

            numbers = itertools.count(3000, 64)

            def stored_again() -> bool:
                start = next(numbers)
                assert one.store(range(start, start + 64)) == 4
                in_bounds(one, range(10**6 + start, 10**6 + start + 64))  # each lane of its own
                return bool(tier_of(daemon)["up"])

            eventually(stored_again)
            put_off = chunk_keys(range(1000, 1064), 16)  # while there was no server

            def there() -> bool:
                held = server.client().keys("kvass:r:*")
                assert isinstance(held, list)
                return all(any(key in name for name in held) for key in put_off)

            eventually(there)


def test_damage_on_disk_is_a_miss(tmp_path: Path) -> None:
    """Every record gets some byte of it flipped while nobody looks: nothing of it comes back."""
    with tiered(tmp_path) as daemon:
        with engine(daemon, model=LARGE) as one:
            assert one.store(PROMPT) == 8
            flushed(daemon)
        daemon.stop()
        for segment in (tmp_path / "disk").glob("*.seg"):
            raw = bytearray(segment.read_bytes())
            for at in range(PAGE + 100_000, len(raw), 100_000):
                raw[at] ^= 0x10
            segment.write_bytes(raw)
        daemon.start()
        with engine(daemon, model=LARGE) as one:
            eventually(lambda: tier_of(daemon).get("records", 0) > 0)
            assert in_bounds(one, PROMPT) == 0
            daemon.wait_until(promotions=0, rows_loading=0)
            assert tier_of(daemon)["load_misses"] > 0
            assert one.store(PROMPT) == 8
            flushed(daemon)
            daemon.restart()
            one.wait_connected()
            eventually(lambda: in_bounds(one, PROMPT) == 8)


def test_engines_in_threads_over_a_tier_under_pressure(tmp_path: Path) -> None:
    """Four engines of one namespace, prompts of three times L1, daemons killed meanwhile: what
    is loaded is right, nobody starves, and in the end nothing is held."""
    prompts = [range(1000 * i, 1000 * i + 8 * 16) for i in range(24)]
    stop = threading.Event()

    def work(daemon: Daemon, me: int) -> int:
        hits = 0
        with engine(daemon, model=LARGE, seed=me) as one:
            for turn in itertools.count():
                if stop.is_set():
                    return hits
                prompt = prompts[(turn * 7 + me * 5) % len(prompts)]
                try:
                    hits += in_bounds(one, prompt)
                    one.store(prompt)
                except Unavailable:  # the daemon was killed just now
                    one.wait_connected()
        return hits

    with tiered(tmp_path) as daemon:
        with ThreadPoolExecutor(4) as pool:
            working = [pool.submit(work, daemon, me) for me in range(4)]
            try:
                for _ in range(2):
                    eventually(lambda: tier_of(daemon).get("loaded_rows", 0) > 50)
                    daemon.restart()
                eventually(lambda: tier_of(daemon).get("loaded_rows", 0) > 50)
            finally:
                stop.set()
                hits = [done.result(timeout=60) for done in working]
            assert all(hits)
        daemon.wait_until(leases=0, reservations=0, promotions=0, rows_loading=0)
        flushed(daemon)
        daemon.wait_until(pins=0)
