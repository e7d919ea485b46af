"""``make bench-peers``: the page says what was measured, and a side that fails stops no other.

LMCache is not installed here: that is the side that fails."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

from bench.peers import __main__ as command
from bench.peers import engineless, report
from bench.peers.engineless import Plan
from bench.peers.host_streams import Event, Stream, copy_runs, on_stream
from bench.peers.results import Results, Row


def row(part: str = "engine", *, more: bool = False, **samples: list[float]) -> Row:
    return Row(part, "document", "a document again", "s", more, samples=samples)


@pytest.mark.parametrize(
    ("what", "found"),
    [
        (row(kvass=[1.0, 1.1], lmcache=[3.0, 3.3]), ("**kvass** 3x", True)),
        (row(kvass=[1.0, 1.1], lmcache=[3.0, 3.3], more=True), ("LMCache 3x", False)),
        (row(kvass=[3.0, 3.3], lmcache=[1.0, 1.1]), ("LMCache 3x", False)),
        (row(kvass=[1.0], lmcache=[3.0], lmcache_1=[0.5]), ("LMCache 2x", False)),
        (row(kvass=[2.0], lmcache=[3.0], offloading=[1.0]), ("vLLM offloading 2x", False)),
        (row(kvass=[2.0], lmcache=[3.0], offloading=[4.0]), ("**kvass** 1.5x", True)),
        (row(kvass=[2.0], offloading=[4.0]), ("**kvass** 2x", True)),
        (row(kvass=[0.0], lmcache=[1.0]), ("**kvass**", True)),
        (row(kvass=[1.0, 2.0], lmcache=[1.9, 4.0]), ("no clear lead", False)),
        (row(kvass=[1.0, 9.0, 1.0, 1.0, 1.0], lmcache=[2.0] * 4), ("**kvass** 2x", True)),
        (row(kvass=[100.0], lmcache=[101.0]), ("no clear lead", False)),
        (row(kvass=[1.0]), ("", True)),
        (row(lmcache=[1.0]), ("no figure of kvass", False)),
        (row("new", kvass=[0.4, 0.9], again=[-2.0, 2.0]), ("goal met", True)),
        (row("new", kvass=[3.0], again=[-2.0, 1.0]), ("goal missed (noise: 2.0 %)", False)),
    ],
)
def test_a_lead_is_outside_of_the_spread(what: Row, found: tuple[str, bool]) -> None:
    assert report.verdict(what) == found


def test_an_unknown_part_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "copies,nothing", "--out", str(tmp_path)]) == 2
    assert "--only nothing: the parts are copies, lookups," in capsys.readouterr().err


def test_kvass_is_measured_though_its_peer_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engineless, "LARGE_L1_BYTES", 256 << 20)
    monkeypatch.setattr(engineless, "SMALL_L1_BYTES", 64 << 20)
    monkeypatch.setattr(engineless, "TOKENS", 512)
    monkeypatch.setattr(engineless, "LOOKUPS", (512, 1024))
    monkeypatch.setattr(engineless, "IDLE_S", 0.1)
    monkeypatch.setattr(engineless, "TIDY_S", 0.0)
    results = Results({}, {}, 1, "")
    plan = Plan(sys.executable, tmp_path, tmp_path, 1)
    for part in ("copies", "lookups", "requests", "kills"):
        engineless.PARTS[part](results, plan)
    for one in results.rows:
        assert one.samples["kvass"], one
        assert min(one.samples["kvass"]) >= 0
        assert "No module named" in one.trouble["lmcache"], one
        assert "kvass" not in one.trouble
    assert "No module named" in report.markdown(results)


def test_a_stream_copies_in_order_and_after_the_event_that_it_waits_for() -> None:
    memory = torch.zeros(3, 8, dtype=torch.uint8)
    memory[0] = 7
    at = [torch.tensor([row.data_ptr()]) for row in memory]
    gate, size = threading.Event(), torch.tensor([8])
    one, other = Stream(), Stream()
    copied, end = Event(enable_timing=True), Event(enable_timing=True)
    one.do(gate.wait, 60.0)
    with on_stream(one):
        copy_runs(at[0], at[1], size)
    copied.record(one)
    other.wait_event(copied)
    with on_stream(other):
        copy_runs(at[1], at[2], size)
    end.record(other)
    assert not memory[1:].any(), "both wait"
    assert not end.query()
    gate.set()
    end.synchronize()
    assert memory.eq(7).all()
    assert copied.elapsed_time(end) >= 0
