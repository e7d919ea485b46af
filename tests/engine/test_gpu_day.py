"""``python -m bench.gpu_day --smoke``: all stages of a GPU day, on a CPU, with real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu_day import __main__ as gpu_day
from bench.gpu_day.decisions import decisions
from bench.gpu_day.sizes import SMOKE
from bench.gpu_day.stages import STAGES
from tests import side_by_side

pytestmark = pytest.mark.engine
ELSEWHERE = {"sglang": "skipped", "engines": "skipped"}
"""Servers of one take minutes on a CPU, and ``make test`` does not install it; models of the other
need a GPU."""


def test_all_stages_run_on_a_cpu(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    forks = side_by_side.folder(request.config) / "vllm.sock"
    out = tmp_path / "day.json"
    flags = ["--smoke", "--minutes", "14", "--forks", str(forks), "--out", str(out)]
    status = gpu_day.main(flags)
    stages = json.loads(out.read_text())["stages"]
    expected = {one.name: "done" for one in STAGES if one.runner == "1"} | ELSEWHERE
    why = {name: (one["state"], one["why"]) for name, one in stages.items()}
    assert {name: state for name, (state, _) in why.items()} == expected, why
    assert status == 0
    figures = {name: one["figures"] for name, one in stages.items()}
    hits = figures["hits"]
    assert {hits[f"513_{kind}_found"] for kind in SMOKE.kinds} == {512}, "all kinds start here"
    assert "513_blocks_vs_native" in hits
    assert ("v2_refused" in hits) == (hits["runner"] == "V1"), "V2 is tried, and V1 follows"
    assert figures["in_step"]["small_512_idle_in_step_steps"] == 1, "the mover of a device waited"
    assert figures["in_step"]["small_512_idle_plain_vs_computed"] > 0
    assert "stores of 32 KiB pieces" in figures["staged"]["stage_log"]
    assert figures["twins"]["states_loaded"] > 0
    assert figures["shadow"]["flip_jobs"] > 0
    assert figures["kills"]["engine_equal"] == 6
    assert figures["two"]["two_found"] == 512
    undecided = [why for why in decisions(stages).values() if why.startswith("unknown")]
    assert not undecided, "no rule lacks a figure"
