"""``kvass bench`` measures what it says, and sees wrong bytes. Small; no figure is judged here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvass.cli import bench
from kvass.cli.bench import lookups, tiers
from kvass.cli.bench.copies import LLAMA_8B, KvCache, measure_copies
from kvass.cli.bench.lookups import BATCH, measure_lookups
from kvass.cli.bench.rig import CHUNK_TOKENS, WIDTH, EngineSessions, add, start_daemon
from kvass.cli.bench.tiers import RawFile, measure_records, measure_tier
from kvass.cli.main import main
from kvass.errors import ConfigError, TierDown
from kvass.testing.daemon import Daemon, running_daemon
from kvass.tiers.base import Buffer
from kvass.tiers.buffers import page_buffer
from kvass.tiers.disk import DiskTier

FIGURES = {
    "version": "0.1.0",
    "none": None,
    "bytes_equal": True,
    "store_vs_memcpy": 0.98765,
    "lookup_128k_us": {"p50": 200.0, "p99": 1234.5},
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path, "256MiB") as daemon:
        yield daemon
        daemon.wait_until(rows=0, leases=0, reservations=0, pins=0, sessions=1)


def test_store_and_load_bring_the_bytes_back(daemon: Daemon) -> None:
    figures = measure_copies(daemon.socket, rounds=2, chunks=1)
    assert figures.pop("bytes_equal") is True
    assert all(value > 0 for value in figures.values())
    with pytest.raises(ConfigError, match="granted 2 of 3 rows of 32MiB"):
        measure_copies(daemon.socket, rounds=1, chunks=3)


def test_negative_control_a_changed_byte_is_seen(daemon: Daemon) -> None:
    with ExitStack() as ending:
        engine = EngineSessions(daemon.socket, LLAMA_8B, ending)
        ending.callback(engine.scheduler.clear)
        cache = KvCache(engine, LLAMA_8B, chunks=1)
        ending.callback(cache.mover.close)
        digests = os.urandom(WIDTH)
        assert not cache.same_bytes()
        cache.store(digests)
        cache.load(digests)
        assert cache.same_bytes()
        cache.pages[5, cache.target[3], 1] ^= 1
        assert not cache.same_bytes()


@pytest.mark.parametrize(("tp", "name"), [(1, "128k"), (8, "128k_tp8")])
def test_round_trips(tp: int, name: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "ASKS", 100)
    figures = measure_lookups(daemon.socket, resident=BATCH, tp=tp)
    assert set(figures) == {f"lookup_{name}_us", f"release_{name}_us"}
    assert all(0 < one["p50"] <= one["p99"] for one in figures.values())


def test_one_difference_is_a_difference() -> None:
    figures: dict[str, Any] = {}
    for same in (True, False, True):
        add(figures, {"bytes_equal": same, "store_gbps": 1.5}, "mla_")
    assert figures == {"bytes_equal": False, "mla_store_gbps": 1.5}


def test_its_own_daemon_comes_and_goes() -> None:
    with start_daemon(16 << 20) as daemon:
        assert os.path.exists(daemon.socket)
        assert daemon.ready_s > 0
    assert not os.path.exists(daemon.socket)
    with pytest.raises(ConfigError, match="did not start: l1_size 1: "), start_daemon(1):
        pass


def test_the_layout_is_what_it_is_called() -> None:
    assert LLAMA_8B.shard_bytes(CHUNK_TOKENS) == 32 << 20


# ---------------------------------------------------------------- a tier


def test_every_figure_of_a_tier_is_there_and_nothing_stays(tmp_path: Path) -> None:
    sizes = (("", 256 << 10, 4), ("_small", 64 << 10, 4))
    figures = measure_tier(f"disk:{tmp_path}?threads=2", 2, sizes)
    for name in ("disk_write", "disk_read"):
        for suffix in ("", "_small"):
            for kind in ("_vs_raw", "_gbps", "_raw_gbps"):
                assert figures[f"{name}{kind}{suffix}"] > 0
    assert figures["bytes_equal"] is True
    assert figures["direct_io"] in (True, False)
    assert list(tmp_path.iterdir()) == []


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


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[DiskTier, RawFile, Buffer]]:
    (folder := tmp_path / "tier").mkdir()
    tier, raw = DiskTier(folder, 16 << 20), RawFile(tmp_path / "raw", 8192, 4, 2)
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
            measure_records(mine, raw, memory, 8192, 1)
    else:
        assert measure_records(mine, raw, memory, 8192, 1)["bytes_equal"] is (not fault)


def test_the_raw_file_gives_back_what_was_put(parts: tuple[DiskTier, RawFile, Buffer]) -> None:
    _, raw, memory = parts
    rows = [*memory.reshape(8, 8192)]
    for number in range(3):
        for i, row in enumerate(rows[:4]):
            row[:] = 10 * number + i
        raw.put(rows[:4])
        raw.get(rows[4:])
        assert all(np.array_equal(a, b) for a, b in zip(rows[:4], rows[4:], strict=True))


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(("equal", "status"), [(True, 0), (False, 1)])
def test_output_and_exit_status(
    equal: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def measure(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return FIGURES | {"bytes_equal": equal}

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "measure_tier", measure)
    assert main(["bench", "--json", "--l1-size", "4GiB"]) == status
    assert json.loads(capsys.readouterr().out) == FIGURES | {"bytes_equal": equal}
    assert main(["bench", "--rounds", "7"]) == main(["bench", "--tier", "disk:/d"]) == status
    assert asked == [(4 << 30, 9), (3 << 30, 7), ("disk:/d", 9)]
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bytes_equal", "yes" if equal else "NO"] in words
    assert ["store_vs_memcpy", "0.988"] in words
    assert ["lookup_128k_us", "p99", "1,234"] in words
    assert ["none", "-"] in words


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rounds", "3"], "use 7 or more"),
        (["--l1-size", "much"], "write it like 8GiB"),
        (["--what"], "unrecognized"),
        (["--gpu"], "unrecognized"),
        (["--tier", "floppy:/a"], "unknown scheme 'floppy'"),
        (["--tier", "disk"], "write SCHEME:WHERE"),
        (["--tier", "redis:127.0.0.1:1"], "tiers on a disk: disk:PATH"),
        (["--tier", "disk:/nowhere/at/all"], "/nowhere/at/all: No such file"),
        (["--tier", "disk:/proc"], "/proc: "),
        (["--tier", "disk:{tmp}?speed=11"], "unknown option 'speed'"),
        (["--tier", "disk:{tmp}?threads=many"], "threads: "),
    ],
)
def test_bad_flags_get_one_line(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *(flag.format(tmp=tmp_path) for flag in flags)]) == 2
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if not line.startswith("measuring")]
    assert error.startswith("kvass: ")
    assert says in error
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiers, "most_bytes", lambda sizes: 1 << 60)
    assert main(["bench", "--tier", f"disk:{tmp_path}"]) == 2
    assert "bench needs" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
