"""``python -m bench.gpu_day``: whatever becomes of a stage, the others run and nothing noted is
lost. ``tests/engine/test_gpu_day.py`` runs the real stages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_day import __main__ as gpu_day
from bench.gpu_day.day import Day, page
from bench.gpu_day.stages import STAGES
from tests.bench import gpu_day_stages
from tests.support.waiting import eventually

TABLE = "tests.bench.gpu_day_stages"


def run(out: Path, *only: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the stages of the file."""
    flags = [flag for name in only for flag in ("--only", name)]
    status = gpu_day.main(["--table", TABLE, "--out", str(out), "--minutes", "10", *flags])
    found: dict[str, Any] = json.loads(out.read_text())["stages"]
    return status, found


def test_the_table_has_all_that_only_a_gpu_can_tell() -> None:
    assert {one.letter for one in STAGES} == {*"-abcdefgh"}
    assert [one.name for one in STAGES][:2] == ["tests", "copies"], "in order of worth"
    assert len({one.name for one in STAGES}) == len(STAGES)
    for one in STAGES:
        module, _, name = one.runs.partition(":")
        assert callable(getattr(import_module(module), name))
        assert one.minutes <= 9, "it fits into one command"
    twice = {(one.runs, one.runner) for one in STAGES}
    assert {("bench.gpu_day.hits:hits", runner) for runner in "10"} < twice, "both model runners"


def test_a_stage_that_goes_wrong_costs_itself_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [one.name for one in gpu_day_stages.STAGES if one.name != "waits"]
    status, stages = run(tmp_path / "day.json", *names)
    assert {name: one["state"] for name, one in stages.items()} == {
        "first": "done",
        "hangs": "cut",
        "second": "done",
        "fails": "failed",
        "dies": "failed",
        "wrong": "wrong",
        "third": "done",
        "long": "skipped",
        "needy": "skipped",
    }
    assert status == 1
    assert stages["hangs"]["figures"] == stages["fails"]["figures"] == {"noted": 1}
    assert stages["fails"]["why"] == "a fault of the stage"
    assert stages["wrong"]["why"] == "same_tokens"
    assert "no_such_package not installed" in stages["needy"]["why"]
    processes = [stages[name]["figures"]["process"] for name in ("first", "second", "third")]
    assert len(set(processes)) == 3, "a new one after each that went wrong"
    said = capfd.readouterr().err
    assert "long: skipped, it may take 60 minutes, and " in said
    assert not any(Path(f"/proc/{one}").exists() for one in processes)


def test_one_that_went_well_is_the_exit_status_and_a_second_run_adds_to_the_file(
    tmp_path: Path,
) -> None:
    out = tmp_path / "day.json"
    assert run(out, "first")[0] == 0
    status, stages = run(out, "second")
    assert status == 0
    assert sorted(stages) == ["first", "second"]
    assert run(out, "needy")[0] == 1, "nothing was measured"
    for flags in (["--runner", "0"], ["--smoke"]):
        assert gpu_day.main(["--table", TABLE, "--out", str(out), *flags]) == 2, "another column"


def test_what_was_noted_survives_the_machine(tmp_path: Path) -> None:
    """All processes are killed in the middle of a stage."""
    out = tmp_path / "day.json"
    command = [sys.executable, "-m", "bench.gpu_day", "--table", TABLE, "--out", str(out)]
    command += ["--within", str(tmp_path)]
    parent = subprocess.Popen([*command, "--only", "first", "--only", "waits"])

    def noted() -> bool:
        return bool(Day(out).read()["stages"].get("waits", {}).get("figures"))

    assert eventually(noted)
    parent.kill()
    parent.wait()
    day = Day(out).read()
    assert day["stages"]["waits"] | {"figures": 0} == {"state": "running", "figures": 0}
    worker = day["stages"]["first"]["figures"]["process"]
    assert eventually(lambda: not Path(f"/proc/{worker}").exists()), "it ends with its parent"
    assert "| noted | 1 |" in page([day])
    assert "running" in page([day])


# ---------------------------------------------------------------- pages, and what travels

ONE = {"card": "NVIDIA H200", "driver": "580", "date": "2026-12-01", "vllm": "0.33.0"}
OTHER = ONE | {"card": "NVIDIA H100", "date": "2026-12-02"}


def stage_of(state: str = "done", **figures: Any) -> dict[str, Any]:
    return {"state": state, "why": "", "seconds": 3.0, "figures": figures}


def test_a_page_has_a_column_for_each_day_and_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    days = [
        ONE | {"stages": {"copies": stage_of(ratio={"llama": 0.8149}, bytes_equal=True)}},
        OTHER | {"stages": {"copies": stage_of("wrong", ratio={"llama": 0.5}, bytes_equal=False)}},
        ONE | {"stages": {"hits": stage_of(found=2048)}},
    ]
    files = [tmp_path / f"{number}.json" for number in range(3)]
    for file, day in zip(files, days, strict=True):
        file.write_text(json.dumps(day))
    assert gpu_day.main(["--page", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| driver | 580 | 580 |" in lines
    assert "| figure | NVIDIA H200, 2026-12-01 | NVIDIA H100, 2026-12-02 |" in lines
    assert "| ratio llama | 0.815 | 0.5 |" in lines
    assert "| bytes_equal | yes | **NO** |" in lines
    assert "| found | 2048 |  |" in lines, "two files of one day and card are one column"
    assert lines.index("## `copies`: copies of each geometry (a)") < lines.index(
        "## `hits`: hits, idle and 16 at once (b)"
    )


def test_what_to_carry_is_listed_and_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, fits = gpu_day.what_to_carry(tmp_path)
    assert fits, "the tree alone"
    assert "msgspec" in text
    (tmp_path / "vllm.whl").write_bytes(b"")
    os.truncate(tmp_path / "vllm.whl", gpu_day.MOST_BYTES)
    text, fits = gpu_day.what_to_carry(tmp_path)
    assert not fits
    assert "  64.0 MiB  " in text
    assert "TOO MUCH" in text
