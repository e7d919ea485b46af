"""``python -m bench --tier``: every kind of row, small; no figure is judged here."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench import tiers
from bench.__main__ import main
from bench.flood import Flood
from bench.flood import main as flood
from bench.promotion import promote
from bench.rows import Rows, flushed, wait_tier
from bench.tiers import Plan, measure_tier
from kvass.cli.bench.rig import WIDTH
from kvass.errors import Unavailable
from kvass.testing.daemon import running_daemon
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
    ratios = {"disk_write_vs_raw", "disk_read_vs_raw", "promote_4_rows_vs_raw_read"}
    check(figures, ratios | LOADED | {"direct_io"})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is measured alone: behind a daemon, the disk stands for all tiers."""
    monkeypatch.setattr(tiers, "_measure_daemons", lambda *_: None)


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


@pytest.mark.usefixtures("no_daemon")
def test_mooncake() -> None:
    server = MooncakeServer()
    try:
        figures = measure_tier(f"mooncake:{server.address}", L1, rounds=2, plan=PLAN)
    finally:
        server.close()
    check(figures, {"mooncake_put_vs_own", "mooncake_get_vs_own"})


# ---------------------------------------------------------------- negative controls


def test_a_promotion_that_is_none_is_told(tmp_path: Path) -> None:
    """Rows that L1 still has would be promoted in no time."""
    (tmp_path / "disk").mkdir()
    keys = [os.urandom(WIDTH) for _ in range(4)]
    tier = [f"disk:{tmp_path}/disk?capacity=16MiB"]
    with running_daemon(tmp_path, "16MiB", tier=tier) as daemon, ExitStack() as ending:
        rows = Rows(daemon.socket, "mine", 64 << 10, ending)
        rows.store(keys)
        wait_tier(rows.scheduler, flushed(4), "the flush")
        with pytest.raises(Unavailable, match="0 of 4 rows"):
            promote(rows, keys)
        matched = rows.find(keys)
        assert rows.holds(matched, keys)
        rows.views(matched.slots[0])[2][9] ^= 1
        assert not rows.holds(matched, keys)
        rows.release(matched)


def test_a_load_that_cannot_be_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    todo = {
        "socket": f"{tmp_path}/none",
        "cold": "",
        "keys": [],
        "row_bytes": 4096,
        "store_bytes": 1,
    }
    assert flood([json.dumps(todo)]) == 1
    assert "no daemon" in capsys.readouterr().err
    assert set(todo) < set(Flood.__struct_fields__)


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("flags", "says", "status"),
    [
        (["--tier", "floppy:/a"], "unknown scheme 'floppy'", 2),
        (["--tier", "disk"], "write SCHEME:WHERE", 2),
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
