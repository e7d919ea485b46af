"""``kvass bench`` measures what it says, and sees wrong bytes. Small; no figure is judged here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvass.cli import bench
from kvass.cli.bench import lookups
from kvass.cli.bench.copies import LLAMA_8B, KvCache, measure_copies
from kvass.cli.bench.lookups import BATCH, measure_lookups
from kvass.cli.bench.rig import CHUNK_TOKENS, WIDTH, EngineSessions, start_daemon
from kvass.cli.main import main
from kvass.errors import ConfigError
from kvass.testing.daemon import Daemon, running_daemon

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


def test_its_own_daemon_goes_or_says_why_it_did_not_come() -> None:
    with start_daemon(16 << 20) as daemon:
        assert os.path.exists(daemon.socket)
    assert not os.path.exists(daemon.socket)
    with pytest.raises(ConfigError, match="did not start: --l1-size 1: "), start_daemon(1):
        pass


def test_the_layout_is_what_it_is_called() -> None:
    assert LLAMA_8B.shard_bytes(CHUNK_TOKENS) == 32 << 20


# ---------------------------------------------------------------- the command


def test_every_figure_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under these names: others compare them."""
    monkeypatch.setattr(bench, "measure_copies", partial(measure_copies, chunks=1))
    monkeypatch.setattr(bench, "measure_lookups", partial(measure_lookups, resident=BATCH))
    monkeypatch.setattr(bench, "MIN_ROUNDS", 1)
    monkeypatch.setattr(lookups, "ASKS", 10)
    assert main(["bench", "--json", "--rounds", "1", "--l1-size", "256MiB"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {
        *("version", "cores", "rounds", "ready_s", "bytes_equal"),
        *("store_vs_memcpy", "load_vs_memcpy", "store_gbps", "load_gbps", "memcpy_gbps"),
        *("lookup_128k_us", "release_128k_us"),
    }


@pytest.mark.parametrize(("equal", "status"), [(True, 0), (False, 1)])
def test_output_and_exit_status(
    equal: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def measure(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return FIGURES | {"bytes_equal": equal}

    monkeypatch.setattr(bench, "measure", measure)
    assert main(["bench", "--json", "--l1-size", "4GiB"]) == status
    assert json.loads(capsys.readouterr().out) == FIGURES | {"bytes_equal": equal}
    assert main(["bench", "--rounds", "7"]) == status
    assert asked == [(4 << 30, 9), (3 << 30, 7)]
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
    ],
)
def test_bad_flags_get_one_line(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("kvass: ")
    assert says in error
