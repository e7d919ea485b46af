"""``kvass bench`` measures what it says, sees wrong bytes and says what fell. Small; no figure of
this machine is judged here."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvass.cli import bench
from kvass.cli.bench import baseline, copies, disk, lookups, rig
from kvass.cli.bench.copies import KvCache, PromptShape, measure_copies
from kvass.cli.bench.disk import Tiered
from kvass.cli.bench.lookups import BATCH, fill, measure_lookups
from kvass.cli.bench.rig import EngineConnections
from kvass.cli.main import main
from kvass.errors import TierDown, Unavailable
from kvass.simulate.models import MODELS, Layers, layout
from kvass.testing.daemon import Daemon, running_daemon

SMALL = ("--token-bytes", "1024", "--rounds", "1")
GPT_OSS = PromptShape(layout(MODELS["gpt-oss-20b"], 16), 32)
FIGURES = {
    "version": "0.1.0",
    "none": None,
    "bytes_equal": True,
    "store_vs_memcpy": 0.98765,
    "lookup_128k_us": {"p50": 200.0, "p99": 1234.5},
}
COPIED = {
    *("store_vs_memcpy", "load_vs_memcpy", "store_gbps", "load_gbps", "memcpy_gbps"),
    *("store_copies_vs_pages", "load_copies_vs_pages", "store_us", "load_us"),
}
FOUND = {"lookup_128k_us", "release_128k_us", "lookup_128k_vs_dict"}
SET = {"model", "chunk_tokens", "engines", "tier"}
TIER = {
    *("direct_io", "tier_store_vs_raw", "tier_load_vs_raw"),
    *("tier_store_gbps", "tier_load_gbps", "raw_write_gbps", "raw_read_gbps"),
    *("compressed_part", "compress_gbps", "decompress_gbps"),
}


@pytest.fixture(scope="module")
def one_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("daemon"), "64MiB") as daemon:
        yield daemon


@pytest.fixture
def daemon(one_daemon: Daemon) -> Iterator[Daemon]:
    yield one_daemon
    one_daemon.wait_until(rows=0, leases=0, reservations=0, pins=0, sessions=1)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MIN_ROUNDS", 1)
    monkeypatch.setattr(copies, "PROMPT_BYTES", 1 << 20)
    monkeypatch.setattr(bench, "RESIDENT", BATCH)
    monkeypatch.setattr(disk, "WARM_UP", 1)
    monkeypatch.setattr(lookups, "ASKS", 10)


@pytest.mark.parametrize(("engines", "private"), [(1, False), (3, True)])
def test_store_and_load_bring_the_bytes_back(engines: int, private: bool, daemon: Daemon) -> None:
    prompt = GPT_OSS._replace(chunks=6)
    figures = measure_copies(daemon.socket, 2, prompt, engines=engines, private=private)
    assert figures.pop("bytes_equal") is True
    assert set(figures) == COPIED


@contextmanager
def stored_prompt(daemon: Daemon, prompt: PromptShape) -> Iterator[KvCache]:
    with ExitStack() as ending:
        engine = EngineConnections(daemon.socket, prompt.groups, ending, chunk_tokens=32)
        ending.callback(engine.clear)
        cache = KvCache(prompt, engine, ending)
        cache.renew()
        cache.store()
        yield cache


@pytest.mark.parametrize("model", ["gpt-oss-20b", "deepseek-v3"])
def test_a_model_is_loaded_as_far_as_a_hit_needs(model: str, daemon: Daemon) -> None:
    prompt = PromptShape(layout(MODELS[model], 16), 32, 6)
    with stored_prompt(daemon, prompt) as cache:
        cache.load()
        assert cache.right()
        assert not cache.right(), "they are made wrong again"
    windows = sum(group.kind == "sliding_window" for group in prompt.groups)
    assert cache.loaded == 6 * (len(prompt.groups) - windows) + 4 * windows
    assert cache.loaded_bytes < prompt.bytes if windows else cache.loaded_bytes == prompt.bytes


def test_negative_control_a_changed_byte_is_seen(daemon: Daemon) -> None:
    prompt = GPT_OSS._replace(chunks=2)
    with stored_prompt(daemon, prompt) as cache:
        for group in cache.groups:
            cache.load()
            group.pages[5, group.target[3], 1] ^= 1
            assert not cache.right()


@pytest.mark.parametrize(("tp", "name"), [(1, "128k"), (8, "128k_tp8")])
def test_round_trips(tp: int, name: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "ASKS", 100)
    figures = measure_lookups(daemon.socket, resident=BATCH, tp=tp)
    assert figures.pop(f"lookup_{name}_vs_dict") > 0
    assert set(figures) == {f"lookup_{name}_us", f"release_{name}_us"}
    assert all(0 < one["p50"] <= one["p99"] for one in figures.values())


# ---------------------------------------------------------------- a daemon that others use


def test_a_daemon_in_use_loses_a_sixteenth_at_most(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """L1 is full of others' rows. The bench gives back what it takes, and no tier gets its rows."""
    (tmp_path / "tier").mkdir()
    tier = [f"disk:{tmp_path}/tier?capacity=128MiB"]
    with running_daemon(tmp_path, "64MiB", tier=tier) as daemon, ExitStack() as ending:
        theirs = EngineConnections(daemon.socket, layout((Layers(1, 1024),), 16), ending)
        for _ in range(4):  # a quarter of L1 at a time
            fill(theirs, 64)
        rig.wait_for(lambda: stored(daemon) == 256, "the flush")
        used = daemon.status()["l1_used_bytes"]
        flags = ("--socket", daemon.socket, "--json", "--engines", "2")
        assert main(["bench", *flags, *SMALL, "--rounds", "9"]) == 0
        figures = json.loads(capsys.readouterr().out)
        status = daemon.wait_until(instances=1, l1_cleared_bytes=0)
        assert looked_up(status) == 0, "bench's lookups are in the hit rate"
        theirs.ask(os.urandom(rig.WIDTH))
        assert looked_up(daemon.status()) == 2 * rig.CHUNK_TOKENS, "an engine's are"
    assert set(figures) == {"version", "cores", "rounds", "bytes_equal"} | SET | COPIED | FOUND
    evicted = status["counters"]["bytes_evicted_handed_over"]
    assert 0 < evicted <= 64 << 20 >> 4
    assert status["l1_used_bytes"] == used - evicted
    assert status["tiers"][0]["stored_rows"] == 256


def looked_up(status: dict[str, Any]) -> int:
    """The tokens of all lookups that count for a model, and those that count for a tenant."""
    who = ("namespaces", "forgotten", "tenants")
    return sum(int(one["lookup_tokens"]) for name in who for one in status[name])


def stored(daemon: Daemon) -> int:
    """Rows that the daemon's tier got."""
    return int(daemon.status()["tiers"][0].get("stored_rows", 0))


# ---------------------------------------------------------------- a tier


@pytest.mark.usefixtures("few")
def test_a_tier_against_a_raw_file(tmp_path: Path, capsys: Any) -> None:
    flags = ["--tier", f"disk:{tmp_path}", "--json", "--l1-size", "64MiB", *SMALL]
    assert main(["bench", *flags]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bytes_equal"] is True
    assert figures["tier"] == "disk"
    assert set(figures) >= TIER
    assert list(tmp_path.iterdir()) == []


def test_rows_that_did_not_come_from_the_tier_are_told(tmp_path: Path) -> None:
    """Rows that L1 still has would be promoted in no time."""
    (tmp_path / "tier").mkdir()
    tier = [f"disk:{tmp_path}/tier?capacity=64MiB"]
    with running_daemon(tmp_path, "64MiB", tier=tier) as daemon, ExitStack() as ending:
        prompt = GPT_OSS._replace(chunks=2)
        engine = EngineConnections(daemon.socket, prompt.groups, ending, chunk_tokens=32)
        mine = Tiered(prompt, engine, ending)
        assert mine.flush() > 0
        assert stored(daemon) == 4
        with pytest.raises(Unavailable, match="loaded 0 of 4 rows"):
            mine.promote()
        assert mine.same


def test_a_tier_that_stores_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    tier = [f"disk:{tmp_path}/tier?capacity=1MiB"]
    with running_daemon(tmp_path, "64MiB", tier=tier) as daemon, ExitStack() as ending:
        prompt = PromptShape(layout((Layers(1, 1 << 14),), 16), 256)  # a row of 4 MiB
        engine = EngineConnections(daemon.socket, prompt.groups, ending)
        with pytest.raises(TierDown, match="rows were not stored"):
            Tiered(prompt, engine, ending).flush()


# ---------------------------------------------------------------- the command


@pytest.mark.usefixtures("few")
def test_every_figure_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Under these names: others compare them."""
    assert main(["bench", "--json", "--l1-size", "64MiB", *SMALL]) == 0
    ours = {"version", "cores", "rounds", "ready_s", "bytes_equal"}
    assert set(json.loads(capsys.readouterr().out)) == ours | SET | COPIED | FOUND


@pytest.mark.parametrize(("equal", "status"), [(True, 0), (False, 1)])
def test_output_and_exit_status(
    equal: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def measure(args: Namespace) -> dict[str, Any]:
        asked.append((args.l1_size, args.rounds))
        return FIGURES | {"bytes_equal": equal}

    monkeypatch.setattr(bench, "measure", measure)
    assert main(["bench", "--json", "--l1-size", "4GiB"]) == status
    assert json.loads(capsys.readouterr().out) == FIGURES | {"bytes_equal": equal}
    assert main(["bench", "--rounds", "7"]) == status
    assert asked == [(4 << 30, 40), (3 << 30, 7)]
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
        (["--model", "gpt-2"], "it is one of llama-3-8b, "),
        (["--chunk-tokens", "100"], "use a multiple of 16"),
        (["--engines", "0"], "no number between"),
        (["--engines", "65"], "use 64 at most"),
        (["--l1-size", "16MiB"], "takes 32MiB, and an engine may use 4MiB of this L1"),
        (["--socket", "{tmp}/none", "--l1-size", "1GiB"], "has its own"),
        (["--socket", "{tmp}/none", "--tier", "disk:{tmp}"], "leave out --socket"),
        (["--tier", "redis:127.0.0.1"], "measures disks"),
        (["--tier", "disk:{tmp}?what=1"], "what"),
        (["--tier", "disk:{tmp}/none"], "{tmp}/none: No such file"),
        (["--check", "{tmp}/none"], "{tmp}/none: No such file"),
        (["--check", "{tmp}/text"], "no baseline of kvass bench: JSON is malformed"),
        (["--check", "{tmp}/json"], "no baseline of kvass bench: "),
        (["--check", "{tmp}/other"], "its model is gpt-oss-20b, and here it is llama-3-8b"),
        (["--check", "a", "--write-baseline", "b"], "one at a time"),
        (["--write-baseline", "{tmp}/none/file"], "there is no such folder"),
    ],
)
def test_bad_input_gets_one_line(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "json").write_text('{"ratios": {}}')
    theirs = {"kvass_bench": 1, "settings": {"model": "gpt-oss-20b"}, "ratios": {}}
    (tmp_path / "other").write_text(json.dumps(theirs))
    assert main(["bench", *(flag.format(tmp=tmp_path) for flag in flags)]) == 2
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if not line.startswith("measuring")]
    assert error.startswith("kvass: ")
    assert says.format(tmp=tmp_path) in error


def test_no_daemon_at_the_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--socket", f"{tmp_path}/none"]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/none" in error
    assert "start kvass serve" in error


# ---------------------------------------------------------------- a baseline


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What ``store_vs_memcpy`` will be in the next runs."""
    values: list[float] = []

    def measure(_: Namespace) -> dict[str, Any]:
        return FIGURES | {"store_vs_memcpy": values.pop(0), "load_vs_memcpy": 1.0}

    monkeypatch.setattr(bench, "measure", measure)
    return values


def test_a_baseline_allows_what_was_measured(runs: list[float], tmp_path: Path) -> None:
    runs += [0.95, 0.77, 0.3, 0.82, 0.86]
    assert main(["bench", "--write-baseline", f"{tmp_path}/file"]) == 0
    written = json.loads((tmp_path / "file").read_text())
    assert written["ratios"] == {
        "store_vs_memcpy": {"ratio": 0.82, "least": 0.62},  # 0.3 alone does not count
        "load_vs_memcpy": {"ratio": 1.0, "least": 0.85},
    }


@pytest.mark.parametrize(
    ("measured", "fell"),
    [
        ([0.63], ""),
        ([0.5, 0.63, 0.8], ""),
        ([0.5, 0.8, 0.615], "store_vs_memcpy fell by 25%: it is 0.615, was 0.820 and may be 0.620"),
    ],
)
def test_a_ratio_that_falls_is_measured_again_and_told(
    measured: list[float],
    fell: str,
    runs: list[float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "file"
    settings: dict[str, str | int] = {
        "model": "llama-3-8b",
        "chunk_tokens": 256,
        "engines": 1,
        "tier": "none",
    }
    before = [{"store_vs_memcpy": each} for each in (0.95, 0.77, 0.3, 0.82, 0.86)]
    baseline.write(path, settings, before)
    runs += measured
    assert main(["bench", "--check", str(path)]) == bool(fell)
    assert not runs, "all runs were measured"
    assert capsys.readouterr().out.splitlines()[-1] == (fell or "no ratio fell")
    runs += measured
    assert main(["bench", "--json", "--check", str(path)]) == bool(fell)
    assert json.loads(capsys.readouterr().out)["fallen"] == ([fell] if fell else [])
