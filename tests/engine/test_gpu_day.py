"""``python -m bench.gpu_day --smoke``: all stages of a GPU day, on a CPU, with real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu_day import __main__ as gpu_day
from bench.gpu_day.stages import STAGES
from tests import side_by_side

pytestmark = pytest.mark.engine
ELSEWHERE = {"sglang": "skipped"}
"""Its servers take minutes on a CPU, and ``make test`` does not install it."""


def test_all_stages_run_on_a_cpu(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    forks = side_by_side.folder(request.config) / "vllm.sock"
    out = tmp_path / "day.json"
    flags = ["--smoke", "--minutes", "10", "--forks", str(forks), "--out", str(out)]
    status = gpu_day.main(flags)
    stages = json.loads(out.read_text())["stages"]
    expected = {one.name: "done" for one in STAGES if one.runner == "1"} | ELSEWHERE
    why = {name: (one["state"], one["why"]) for name, one in stages.items()}
    assert {name: state for name, (state, _) in why.items()} == expected, why
    assert status == 0
    figures = {name: one["figures"] for name, one in stages.items()}
    assert figures["hits"]["513_kvass_found"] == figures["two"]["two_found"] == 512
    assert figures["in_step"]["short_64_idle_in_step_steps"] == 1, "the mover of a device waited"
    assert figures["shadow"]["flip_jobs"] > 0
    assert figures["kills"]["engine_equal"] == 6
