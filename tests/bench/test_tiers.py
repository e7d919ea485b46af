"""``python -m bench --tier``: every kind of row, small; no figure is judged here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from bench import tiers
from bench.__main__ import main
from bench.records import measure_records
from bench.rows import Rows
from bench.tiers import Plan, measure_tier
from kvass.cli.bench.rig import WIDTH
from kvass.errors import TierDown
from kvass.testing.daemon import running_daemon
from kvass.tiers.base import Buffer
from kvass.tiers.buffers import page_buffer
from kvass.tiers.disk import DiskTier
from tests.support.servers.mooncake import MooncakeServer
from tests.support.servers.redis import RedisServer
from tests.support.servers.s3 import S3Server, credentials

SIZES = (("", 256 << 10, 4),)
PLAN = Plan(SIZES, 64 << 20, 1 << 40, queue_bytes=1 << 20, load_s=0.5)
L1 = 32 << 20
LOADED = {
    "lookup_p50_idle_us",
    "lookup_p99_idle_us",
    "lookup_p50_under_tier_load_us",
    "lookup_p99_under_tier_load_us",
    "lookup_max_under_tier_load_us",
    "tier_load_store_gbps",
    "tier_load_load_gbps",
    "promote_4_rows_gbps",
}


def check(figures: dict[str, Any], names: set[str]) -> None:
    """All of them, and each is a figure."""
    assert names <= set(figures)
    assert all(figures[name] > 0 for name in names)
    assert figures["bytes_equal"] is True


def test_disk(tmp_path: Path) -> None:
    figures = measure_tier(f"disk:{tmp_path}?threads=2", L1, rounds=2, plan=PLAN)
    check(figures, LOADED)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is measured alone: behind a daemon, the disk stands for all tiers."""
    monkeypatch.setattr(tiers, "_measure_daemons", lambda *_: None)


@pytest.mark.slow  # a benchmark's figures; what the tiers do is in tests/tiers
@pytest.mark.usefixtures("no_daemon")
def test_redis() -> None:
    server = RedisServer()
    try:
        server.client().set("kvass:r:mine", b"stays")
        figures = measure_tier(f"redis:{server.address}", L1, rounds=2, plan=PLAN)
        assert server.client().keys("*") == [b"kvass:r:mine"]
    finally:
        server.close()
    check(figures, {"redis_put_vs_client", "redis_get_vs_client"})


@pytest.mark.slow
@pytest.mark.usefixtures("no_daemon")
def test_s3() -> None:
    server = S3Server()
    try:
        with credentials():
            figures = measure_tier(server.url("mine"), L1, rounds=2, plan=PLAN)
        assert server.names() == []
    finally:
        server.close()
    check(figures, {"s3_put_vs_client", "s3_get_vs_client"})


@pytest.mark.slow
@pytest.mark.usefixtures("no_daemon")
def test_mooncake() -> None:
    server = MooncakeServer()
    try:
        figures = measure_tier(f"mooncake:{server.address}", L1, rounds=2, plan=PLAN)
    finally:
        server.close()
    check(figures, {"mooncake_put_vs_own", "mooncake_get_vs_own"})


# ---------------------------------------------------------------- negative controls


class Forgetful:
    """A disk tier that breaks one promise."""

    def __init__(self, tier: DiskTier, fault: str) -> None:
        self._tier, self._fault = tier, fault

    def store(self, keys: list[bytes], data: Any) -> list[bool]:
        kept = self._tier.store(keys, data)
        return [*kept[:-1], False] if self._fault == "store" else kept

    def load(self, keys: list[bytes], into: Any) -> list[bool]:
        found = self._tier.load(keys, into)
        if self._fault == "bytes":
            into[1][0][77] ^= 1
        return [*found[:-1], False] if self._fault == "load" else found


class InMemory:
    """What it is compared with."""

    names = ("tier_put_vs_memory", "tier_get_vs_memory")

    def put(self, data: Sequence[Buffer]) -> None:
        self._kept = [each.copy() for each in data]

    def get(self, into: Sequence[Buffer]) -> None:
        for kept, each in zip(self._kept, into, strict=True):
            each[:] = kept


@pytest.mark.parametrize("fault", ["", "store", "load", "bytes"])
def test_a_tier_that_cheats_gets_no_figures(fault: str, tmp_path: Path) -> None:
    with closing(DiskTier(tmp_path, 16 << 20)) as tier:
        mine: Any = Forgetful(tier, fault)
        memory = page_buffer(8 * 8192)
        if fault in ("store", "load"):
            with pytest.raises(TierDown, match="3 of 4 records"):
                measure_records(mine, InMemory(), memory, 8192, 1)
        else:
            same = measure_records(mine, InMemory(), memory, 8192, 1)["bytes_equal"]
            assert same is (not fault)


def test_a_row_of_other_bytes_is_seen(tmp_path: Path) -> None:
    keys = [os.urandom(WIDTH) for _ in range(4)]
    with running_daemon(tmp_path, "16MiB") as daemon, ExitStack() as ending:
        rows = Rows(daemon.socket, "mine", 64 << 10, ending)
        rows.store(keys)
        matched = rows.find(keys)
        assert rows.holds(matched, keys)
        rows.views(matched.slots[0])[2][9] ^= 1
        assert not rows.holds(matched, keys)
        rows.release(matched)


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("flags", "says", "status"),
    [
        (["--tier", "floppy:/a"], "unknown scheme 'floppy'", 2),
        (["--tier", "disk:/nowhere/at/all"], "/nowhere/at/all: No such file", 2),
        (["--tier", "my.module:Tier"], "bench knows disk, redis", 2),
        (["--tier", "redis:127.0.0.1:1"], "redis:127.0.0.1:1: ", 1),
        (["--tier", "disk:{tmp}", "--rounds", "1"], "use 7 or more", 2),
    ],
)
def test_bad_flags_get_one_line(
    flags: list[str], says: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([flag.format(tmp=tmp_path) for flag in flags]) == status
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if not line.startswith("measuring")]
    assert error.startswith("bench: ")
    assert says in error
    assert list(tmp_path.iterdir()) == []
