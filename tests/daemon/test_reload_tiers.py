"""SIGHUP: tiers come, go and get other options while the daemon serves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvass.cli.main import main
from kvass.client.parallel import ParallelStrategy
from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.fake_engine import FakeEngine, spread
from kvass.types import GroupLayout, RankLayout
from tests.daemon.tier_rig import disk
from tests.support.waiting import eventually

WORLD = ParallelStrategy()
LAYOUTS = spread(WORLD, RankLayout((GroupLayout("full", 4, ("l0",), (64 << 10,)),)))
PROMPTS = [range(1000 * i, 1000 * i + 64) for i in range(8)]  # 8 of 1 MiB


class Reloaded:
    """A daemon of 8 MiB with a file, an engine, and folders ``a`` and ``b`` for tiers."""

    def __init__(self, folder: Path, daemon: Daemon, engine: FakeEngine) -> None:
        self.folder, self.daemon, self.engine = folder, daemon, engine

    def url(self, name: str, **options: str) -> str:
        (self.folder / name).mkdir(mode=0o755, exist_ok=True)
        return disk(self.folder / name, **options)

    def tiers(self, *urls: str, more: str = "") -> str:
        """Write them into the file; what the daemon says to SIGHUP."""
        (self.folder / "kvass.yaml").write_text(f"tier: {[*urls]}\n{more}")
        before = len(self.daemon.log())
        os.kill(self.daemon.pid, signal.SIGHUP)
        assert eventually(lambda: "SIGHUP: " in self.daemon.log()[before:])
        return next(x for x in self.daemon.log()[before:].splitlines() if "SIGHUP: " in x)

    def status(self) -> dict[str, dict[str, Any]]:
        return {Path(tier["tier"]).name: tier for tier in self.daemon.status()["tiers"]}

    def fill(self, first: int = 0) -> None:
        """Store all prompts, each flushed before the next."""
        for prompt in PROMPTS:
            assert self.engine.store(range(prompt.start + first, prompt.stop + first))
            assert eventually(lambda: not any(map(queue_of, self.status().values())))

    def hits(self, first: int = 0) -> int:
        """How many of the 32 chunks are there, each checked byte for byte."""
        shifted = [range(p.start + first, p.stop + first) for p in PROMPTS]
        chunks = sum(map(self.engine.load, shifted))
        self.engine.verify()
        return chunks


def queue_of(tier: dict[str, Any]) -> int:
    return int(tier["flush_queue_rows"] + tier["storing_bytes"])


@pytest.fixture
def reloaded(tmp_path: Path) -> Iterator[Reloaded]:
    (file := tmp_path / "kvass.yaml").write_text("")
    with (
        running_daemon(tmp_path, "8MiB", config=str(file)) as daemon,
        FakeEngine(daemon.socket, WORLD, LAYOUTS, chunk_tokens=16, identity={"m": "m"}) as engine,
    ):
        yield Reloaded(tmp_path, daemon, engine)


def test_a_tier_comes_goes_and_comes_back(reloaded: Reloaded) -> None:
    """What it holds are hits while it is there, and misses while it is not."""
    it = reloaded
    boot = it.daemon.boot.hex()
    assert "INFO SIGHUP: tier is ['disk:" in it.tiers(it.url("a"))
    it.fill()
    it.fill(first=500)  # pushes the others out of L1
    assert it.hits() == 32
    assert it.status()["a"]["loaded_rows"] > 16
    assert it.tiers().endswith("SIGHUP: tier is [] (was ['" + it.url("a") + "'])")
    assert it.status()["a"]["place"] == 0
    it.fill(first=500)
    assert it.hits() == 0
    it.tiers(it.url("b"), it.url("a"))
    assert {name: tier["place"] for name, tier in it.status().items()} == {"b": 1, "a": 2}
    assert it.hits() == 32
    assert eventually(lambda: it.status()["b"]["stored_rows"] == 32), "what came from a, goes to b"
    assert it.daemon.status()["boot"] == boot
    assert it.daemon.stop() == 0


def test_a_clear_counts_for_a_tier_that_was_away(
    reloaded: Reloaded, capsys: pytest.CaptureFixture[str]
) -> None:
    it = reloaded
    it.tiers(it.url("a"))
    it.fill()
    it.tiers()
    assert main(["clear", "--socket", it.daemon.socket]) == 0
    assert capsys.readouterr().out == "cleared 32 rows\n"
    it.tiers(it.url("a"))
    assert it.hits() == 0
    it.fill()
    it.fill(first=500)
    assert it.hits() == 32


def test_options_change_and_the_records_stay(reloaded: Reloaded) -> None:
    it = reloaded
    it.tiers(it.url("a"))
    it.fill()
    it.fill(first=500)
    said = it.tiers(it.url("a", quota="calm=:4MiB", capacity="32MiB"), more="quota: ['calm=:0']\n")
    assert "capacity=32MiB" in said
    assert eventually(lambda: it.status()["a"].get("capacity_bytes", 1 << 40) < 32 << 20)
    assert it.status()["a"]["tenants"]["calm"]["reserved_bytes"] == 4 << 20
    assert it.hits() == 32
    it.engine.tenant = "calm"
    it.fill(first=250)
    assert eventually(lambda: it.status()["a"]["tenants"]["calm"]["bytes"] > 4 << 20)


@pytest.mark.alone
def test_who_waits_for_a_tier_that_hangs_is_answered_when_it_is_removed(
    reloaded: Reloaded,
) -> None:
    it = reloaded
    it.tiers(it.url("a"))
    it.fill()
    it.fill(first=500)
    (process,) = Path(f"/proc/{it.daemon.pid}/task/{it.daemon.pid}/children").read_text().split()
    os.kill(int(process), signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(it.engine.load, PROMPTS[0])
        assert eventually(lambda: bool(it.daemon.status()["promotions"]))
        (it.folder / "kvass.yaml").write_text("")
        os.kill(it.daemon.pid, signal.SIGHUP)
        began_s = time.monotonic()
        assert waiting.result(timeout=30) == 0
        assert time.monotonic() - began_s < 1.5, "it waited until the process was killed"
        assert it.status()["a"]["place"] == 0


WRONG = (
    ("disk:/nowhere?capacity=64MiB", "/nowhere: no such folder"),
    ("disk:{a}?capacity=64MiB&quota=x=1MiB", "quota of x: it has none in L1: add --quota x=:0"),
    ("disk:{a}?capacity=64MiB&colour=red", "unknown option 'colour'"),
    ("redis:h?quota=x=1MiB&password=hunter2", "only the capacity of a disk tier"),
    ("disk:{a}?capacity=100000TiB", "but the disk has"),  # known only after its process has ended
)


def test_an_error_leaves_the_tiers_as_they_were(reloaded: Reloaded) -> None:
    it = reloaded
    it.tiers(it.url("a"))
    it.fill()
    it.fill(first=500)
    for wrong, why in WRONG:
        said = it.tiers(it.url("b"), wrong.format(a=it.folder / "a"), more="allow_uid: [12345]\n")
        assert "ERROR SIGHUP: the options stay as they were: " in said
        assert why in said
        assert it.status().keys() == {"a"}
    assert "hunter2" not in it.daemon.log()
    for _ in range(2):  # who tries again finds the tier down no longer for it
        it.tiers(wrong.format(a=it.folder / "a"))
    assert eventually(lambda: it.daemon.log().count("another process starts in 1 s") == 3)
    assert eventually(lambda: bool(it.status()["a"].get("up")))
    assert eventually(lambda: it.hits() == 32)
    assert "a" in it.tiers(it.url("a"), it.url("b")), "the file can be put right"
    assert it.status().keys() == {"a", "b"}
