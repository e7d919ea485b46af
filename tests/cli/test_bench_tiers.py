"""``kvass bench --tier``: every kind of row, small; no figure is judged here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvass.cli.bench import tiers
from kvass.cli.bench.copies import WIDTH
from kvass.cli.bench.counterparts import RawFile
from kvass.cli.bench.flood import Flood
from kvass.cli.bench.flood import main as flood
from kvass.cli.bench.promotion import promote
from kvass.cli.bench.records import measure_records
from kvass.cli.bench.rows import Rows, flushed, wait_tier
from kvass.cli.bench.tiers import Sizes, measure_tier
from kvass.cli.main import main
from kvass.errors import TierDown, Unavailable
from kvass.testing.daemon import running_daemon
from kvass.tiers.base import Buffer
from kvass.tiers.disk import DiskTier
from kvass.tiers.slots import page_buffer
from tests.support.servers.mooncake import MooncakeServer
from tests.support.servers.redis import RedisServer
from tests.support.servers.s3 import S3Server, credentials

SIZES = Sizes(
    row_bytes=256 << 10,
    rows=4,
    small_bytes=64 << 10,
    small_rows=4,
    tier_bytes=64 << 20,
    flood_bytes=1 << 40,
    queue_bytes=1 << 20,
    load_s=0.5,
)
SERVER = Sizes(256 << 10, 4, 64 << 10, 4, 0, 1 << 40, 1 << 20, 0.5)
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
    """All of them, twice, and each is a figure."""
    wanted = names | LOADED | {name + "_small" for name in names | LOADED}
    assert wanted <= set(figures)
    assert all(figures[name] > 0 for name in wanted)
    assert figures["bytes_equal"] is True


def test_disk(tmp_path: Path) -> None:
    figures = measure_tier(f"disk:{tmp_path}?threads=2", L1, rounds=2, sizes=SIZES)
    ratios = {"disk_write_vs_raw", "disk_read_vs_raw", "promote_4_rows_vs_raw_read"}
    check(figures, ratios | {"direct_io"})
    assert list(tmp_path.iterdir()) == []


def test_redis() -> None:
    server = RedisServer()
    try:
        server.client().set("kvass:r:mine", b"stays")
        figures = measure_tier(f"redis:{server.address}", L1, rounds=2, sizes=SERVER)
        assert server.client().keys("*") == [b"kvass:r:mine"]
    finally:
        server.close()
    check(figures, {"redis_put_vs_client", "redis_get_vs_client"})


def test_s3() -> None:
    server = S3Server()
    try:
        with credentials():
            figures = measure_tier(server.url("mine"), L1, rounds=2, sizes=SERVER)
        assert server.names() == []
    finally:
        server.close()
    check(figures, {"s3_put_vs_client", "s3_get_vs_client"})


def test_mooncake() -> None:
    server = MooncakeServer()
    try:
        figures = measure_tier(f"mooncake:{server.address}", L1, rounds=2, sizes=SERVER)
    finally:
        server.close()
    check(figures, {"mooncake_put_vs_own", "mooncake_get_vs_own"})


# ---------------------------------------------------------------- negative controls


class Forgetful:
    """A disk tier that breaks one promise."""

    def __init__(self, tier: DiskTier, fault: str) -> None:
        self._tier, self._fault = tier, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def store(self, keys: list[bytes], data: Any) -> list[bool]:
        kept = self._tier.store(keys, data)
        return [*kept[:-1], False] if self._fault == "store" else kept

    def load(self, keys: list[bytes], into: Any) -> list[bool]:
        found = self._tier.load(keys, into)
        if self._fault == "bytes":
            into[1][0][77] ^= 1
        return [*found[:-1], False] if self._fault == "load" else found


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[DiskTier, RawFile, Buffer]]:
    folder = tmp_path / "tier"
    folder.mkdir()
    tier, raw = DiskTier(folder, 16 << 20), RawFile(tmp_path, 8192, 4, 2)
    yield tier, raw, page_buffer(8 * 8192)
    tier.close()
    raw.close()


@pytest.mark.parametrize("fault", ["", "store", "load", "bytes"])
def test_a_tier_that_cheats_gets_no_figures(
    fault: str, parts: tuple[DiskTier, RawFile, Buffer]
) -> None:
    tier, raw, memory = parts
    mine: Any = Forgetful(tier, fault)
    if fault in ("store", "load"):
        with pytest.raises(TierDown, match="3 of 4 records"):
            measure_records(mine, raw, memory, 8192, 4, 1)
    else:
        assert measure_records(mine, raw, memory, 8192, 4, 1)["bytes_equal"] is (not fault)


def test_the_raw_file_gives_back_what_was_put(parts: tuple[DiskTier, RawFile, Buffer]) -> None:
    _, raw, memory = parts
    rows = [memory[at : at + 8192] for at in range(0, len(memory), 8192)]
    for number in range(3):
        for i, row in enumerate(rows[:4]):
            row[:] = 10 * number + i
        raw.put(rows[:4])
        raw.get(rows[4:])
        assert all(np.array_equal(a, b) for a, b in zip(rows[:4], rows[4:], strict=True))


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
        matched = rows.look_up(keys)
        assert rows.holds(matched, keys)
        rows.views(matched)[2][9] ^= 1
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


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def measure(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return {"disk_write_vs_raw": 0.9, "bytes_equal": True}

    monkeypatch.setattr(tiers, "measure_tier", measure)
    assert main(["bench", "--tier", "disk:/d", "--json", "--rounds", "7"]) == 0
    assert json.loads(capsys.readouterr().out) == {"disk_write_vs_raw": 0.9, "bytes_equal": True}
    assert asked == [("disk:/d", 3 << 30, 7)]


@pytest.mark.parametrize(
    ("flags", "says", "status"),
    [
        (["--tier", "floppy:/a"], "unknown scheme 'floppy'", 2),
        (["--tier", "disk"], "write SCHEME:WHERE", 2),
        (["--tier", "my.module:Tier"], "bench knows disk, redis", 2),
        (["--tier", "disk:/nowhere/at/all"], "/nowhere/at/all: No such file", 2),
        (["--tier", "disk:/proc"], "/proc: ", 2),
        (["--tier", "disk:{tmp}?speed=11"], "unknown option 'speed'", 2),
        (["--tier", "disk:{tmp}?threads=many"], "threads: 'many'", 2),
        (["--tier", "redis:127.0.0.1:1"], "redis:127.0.0.1:1: ", 1),
        (["--tier", "disk:{tmp}", "--socket", "/s"], "leave out --socket", 2),
        (["--tier", "disk:{tmp}", "--rounds", "1"], "use 7 or more", 2),
    ],
)
def test_bad_flags_get_one_line(
    flags: list[str], says: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *(flag.format(tmp=tmp_path) for flag in flags)]) == status
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if not line.startswith("measuring")]
    assert error.startswith("kvass: ")
    assert says in error
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vast = Sizes(32 << 20, 16, 1 << 20, 16, 1 << 60, 0)
    monkeypatch.setattr(tiers, "DISK", vast)
    assert main(["bench", "--tier", f"disk:{tmp_path}"]) == 2
    assert "bench needs" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
