"""``kvass bench`` measures what it says, and sees wrong bytes. Small; no figure is judged here."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvass.cli import bench
from kvass.cli.bench import lookups
from kvass.cli.bench.copies import LLAMA_8B, KvCache, measure_copies
from kvass.cli.bench.figures import add
from kvass.cli.bench.lookups import BATCH, KEYS, SmallRows, measure_lookups
from kvass.cli.bench.machine import start_daemon
from kvass.cli.bench.sessions import CHUNK_TOKENS, WIDTH, EngineSessions
from kvass.cli.main import main
from kvass.errors import ConfigError
from kvass.testing.daemon import running_daemon
from kvass.types import PAGE

FIGURES = {
    "version": "0.1.0",
    "cores": 2,
    "rounds": 9,
    "first_touch_gbps": 1.7,
    "ready_s": None,
    "bytes_equal": True,
    "store_vs_memcpy": 0.98765,
    "lookup_128k_us": {"p50": 200.0, "p99": 1234.5},
}


def test_store_and_load_bring_the_bytes_back(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "256MiB") as daemon:
        figures = measure_copies(daemon.socket, 256 << 20, rounds=2, chunks=1)
        daemon.wait_until(rows=0, leases=0, reservations=0, pins=0, sessions=1)
    assert figures["bytes_equal"] is True
    assert figures["store_vs_memcpy"] > 0
    assert figures["load_vs_memcpy"] > 0


def test_negative_control_a_changed_byte_is_seen(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "256MiB") as daemon, ExitStack() as ending:
        cache = KvCache(EngineSessions(daemon.socket, LLAMA_8B, ending), LLAMA_8B, chunks=1)
        ending.callback(cache.mover.close)
        digests = os.urandom(WIDTH)
        assert not cache.same_bytes()
        cache.store(digests)
        cache.load(digests)
        assert cache.same_bytes()
        cache.pages[5, cache.target[3], 1] ^= 1
        assert not cache.same_bytes()


def test_an_arena_too_small_is_told(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "64MiB") as daemon,
        pytest.raises(ConfigError, match="--l1-size 128MiB"),
    ):
        measure_copies(daemon.socket, 64 << 20, rounds=1, chunks=1)


@pytest.mark.parametrize(("tp", "name"), [(1, "128k"), (8, "128k_tp8")])
def test_round_trips(tp: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "ASKS", 100)
    with running_daemon(tmp_path, "256MiB") as daemon:
        figures = measure_lookups(daemon.socket, resident=BATCH, tp=tp)
        assert figures.pop("bytes_equal") is True
        assert set(figures) == {f"lookup_{name}_us", f"release_{name}_us"}
        assert all(0 < one["p50"] <= one["p99"] for one in figures.values())
        daemon.wait_until(rows=0, leases=0, reservations=0, pins=0, sessions=1)


def test_negative_control_a_shard_of_another_row_is_seen(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "256MiB") as daemon, ExitStack() as ending:
        engine = SmallRows(daemon.socket, ending, tp=2)
        keys = engine.fill(BATCH)
        match = engine.look_up(b"".join(keys[:KEYS]))
        assert engine.holds(match.slots[0], b"".join(keys[:KEYS]))
        assert not engine.holds(match.slots[0], b"".join(keys[1 : KEYS + 1]))
        engine.words[match.slots[0].offsets(1, PAGE)[KEYS // 2] // 8] ^= np.uint64(1)
        assert not engine.holds(match.slots[0], b"".join(keys[:KEYS]))


def test_one_difference_is_a_difference() -> None:
    figures: dict[str, Any] = {}
    for same in (True, False, True):
        add(figures, {"bytes_equal": same, "store_gbps": 1.5}, "mla_")
    assert figures == {"bytes_equal": False, "mla_store_gbps": 1.5}


def test_its_own_daemon_comes_and_goes() -> None:
    with start_daemon(None, 16 << 20) as daemon:
        assert daemon.wait_populated() == 16 << 20
        assert daemon.ready_s is not None
        path = daemon.socket
    assert not os.path.exists(path)
    with pytest.raises(ConfigError, match="did not start"), start_daemon(None, 1):
        pass


def test_the_layout_is_what_it_is_called() -> None:
    assert LLAMA_8B.shard_bytes(CHUNK_TOKENS) == 32 << 20


@pytest.mark.parametrize(("equal", "status"), [(True, 0), (False, 1)])
def test_output_and_exit_status(
    equal: bool,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []

    def measure(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return FIGURES | {"bytes_equal": equal}

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.delenv("KVASS_SOCKET", raising=False)
    assert main(["bench", "--json", "--l1-size", "4GiB"]) == status
    assert json.loads(capsys.readouterr().out) == FIGURES | {"bytes_equal": equal}
    assert main(["bench", "--socket", "/run/kvass.sock", "--rounds", "7"]) == status
    assert asked == [(None, 4 << 30, 9), ("/run/kvass.sock", 3 << 30, 7)]
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bytes_equal", "yes" if equal else "NO"] in words
    assert ["store_vs_memcpy", "0.988"] in words
    assert ["lookup_128k_us", "p99", "1,234"] in words
    assert ["ready_s", "-"] in words


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rounds", "3"], "use 7 or more"),
        (["--l1-size", "much"], "write it like 8GiB"),
        (["--what"], "unrecognized"),
        (["--gpu"], "unrecognized"),
    ],
)
def test_bad_flags_get_one_line(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
