"""Benchmarks of real vLLM engines run, with a tiny model. No figure is judged here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import agents, blend, blend_engine, engine, nodes, short_hits, short_hits_table
from bench.peers import __main__ as peers
from bench.peers import engines
from tests.support.vllm.models import TINY

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny model; and in forks, which have no environment of their own."""
    for module in (engine, blend_engine, engines, short_hits_table):
        monkeypatch.setattr(module, "SHAPE", TINY)
    for module in (agents, engine, blend_engine, engines):
        monkeypatch.setattr(module, "ENVIRONMENT", None)


def test_engine() -> None:
    figures = engine.measure_engine(256 << 20, 1)
    assert figures["document_kvass_vs_local"] > 0
    assert figures["crowd_blocks_vs_none"] > 0


def test_blend_in_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blend.SIZES, "vocab_size", TINY.vocab)
    figures = blend_engine.measure_blend_engine(256 << 20, 1)
    assert figures["none_computed"] < figures["prefix_computed"] < figures["full_computed"]


def test_short_hits(capsys: pytest.CaptureFixture[str]) -> None:
    assert short_hits.main(["--rounds", "2", "--sizes", "32,512", "--table"]) == 0
    printed = capsys.readouterr().out
    assert "decoding: at worst " in printed
    assert "| a hit of 6,011 tokens against vLLM's own | 1.05 |" in printed


def test_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert nodes.main(["--rounds", "2", "--sizes", "64", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["64"]["two"]["hit_ms"][1] > 0
    assert nodes.markdown(figures).count("| 64 |") == 6


def test_agents(capsys: pytest.CaptureFixture[str]) -> None:
    args = "--model tiny --sessions 4 --steps 3 --tokens 256 --pause 1 --rounds 1 --json"
    assert agents.main(args.split()) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == list(agents.MODES)
    assert all(one["p99_s"] >= one["mean_s"] > 0 for one in figures.values())
    assert figures["all"]["tier"] == 0 < figures["all"]["cached"]


def test_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache may be missing: its rows say so."""
    monkeypatch.setattr(peers, "python", lambda: sys.executable)
    assert peers.main(["--short", "--only", "agent,new,down,short", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "benchmarks.md").read_text()
    assert "no figure of kvass" not in page
