"""Tiers behind a real daemon: what was stored outlives it; more than L1 holds is found again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvass.client.client import Client
from kvass.client.parallel import ParallelStrategy
from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.fake_engine import WIDTH, FakeEngine, chunk_keys, spread
from kvass.testing.fake_rank import MakeMover
from kvass.transfer.host import HostMover
from kvass.types import GroupLayout, RankLayout
from tests.client.test_fake_engine import MODEL
from tests.daemon.tier_rig import tier_of
from tests.support import waiting
from tests.support.gpu.engine_mover import EngineGpus

LARGE = RankLayout((GroupLayout("full", 16, ("a", "b"), (128 << 10, 128 << 10)),))
"""A quarter of a mebibyte a chunk."""
ONE, GRID = ParallelStrategy(tp=1, pp=1), ParallelStrategy(tp=2, pp=2)
PROMPT = range(8 * 16)


@contextmanager
def tiered(folder: Path, l1_size: str = "16MiB", **options: Any) -> Iterator[Daemon]:
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    tier = f"disk:{disk}?capacity=256MiB"
    with running_daemon(
        folder, l1_size, **{"tier": [tier], "lost_engine_grace_s": 0.2, **options}
    ) as real:
        yield real


@contextmanager
def engine(
    daemon: Daemon, world: ParallelStrategy = ONE, model: RankLayout = MODEL, **options: Any
) -> Iterator[FakeEngine]:
    """All of one namespace, unless ``options`` say other. Small pages are on fake GPUs."""
    gpus = EngineGpus()
    mover: MakeMover = HostMover if model is LARGE else gpus
    common = {"identity": {"model": "m"}, "mover": mover, **options}
    with FakeEngine(daemon.socket, world, spread(world, model), **common) as one:
        yield one
    gpus.check_closed()


def eventually(ask: Callable[[], bool]) -> None:
    assert waiting.eventually(ask), "it never came"


def flushed(daemon: Daemon) -> None:
    """Wait until the tier has got all that was queued for it."""

    def idle() -> bool:
        tier = tier_of(daemon)
        return not tier["flush_queue_rows"] and not tier["storing_bytes"]

    eventually(idle)


def loaded(one: FakeEngine, prompt: range) -> int:
    """Load ``prompt`` and check every page; how many chunks of it came."""
    chunks = one.load(prompt)
    one.verify()
    return chunks


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a disk tier that has ``PROMPT``, as a daemon left it."""
    folder = tmp_path_factory.mktemp("stored")
    with tiered(folder) as daemon, engine(daemon) as one:
        assert one.store(PROMPT) == 8
        flushed(daemon)
    return folder / "disk"


@pytest.fixture
def cold(tmp_path: Path, stored: Path) -> Path:
    """The folder for a daemon whose L1 is empty and whose disk tier has ``PROMPT``."""
    shutil.copytree(stored, tmp_path / "disk")
    return tmp_path


@pytest.mark.parametrize(
    ("end", "flush"), [("kill", "write_through"), ("stop", "write_through"), ("stop", "on_evict")]
)
def test_what_was_stored_outlives_the_daemon(tmp_path: Path, end: str, flush: str) -> None:
    with tiered(tmp_path, flush=flush) as daemon:
        for world in (ONE, GRID):
            with engine(daemon, world) as one:
                assert one.store(PROMPT) == 8
                if end == "kill":
                    flushed(daemon)
        assert flush == "write_through" or not tier_of(daemon).get("stored_rows", 0)
        getattr(daemon, end)()
        daemon.start()
        for world in (ONE, GRID):
            before = tier_of(daemon).get("loaded_rows", 0)
            with engine(daemon, world) as one:
                eventually(lambda one=one: loaded(one, PROMPT) == 8)  # type: ignore[misc]
                assert loaded(one, range(1000, 1064)) == 0
            assert tier_of(daemon)["loaded_rows"] >= before + 16
        daemon.wait_until(leases=0, pins=0, rows_loading=0, promotions=0)


def test_prefetch_promotes_ahead_of_use(cold: Path) -> None:
    keys = b"".join(chunk_keys(PROMPT, 16))
    with tiered(cold) as daemon, engine(daemon) as one, Client(daemon.socket) as client:
        space = bytes.fromhex(daemon.status()["namespaces"][0]["namespace"])
        eventually(lambda: client.prefetch(space, keys, WIDTH) == 8)
        assert daemon.status()["rows"] == 16
        assert daemon.status()["pins"] == 0
        assert one.load(PROMPT) == 8
        one.verify()
        assert tier_of(daemon)["loaded_rows"] == 16
        assert one.scheduler.prefetch("r", keys, WIDTH), "which waits for nothing"
