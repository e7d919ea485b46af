"""``python -m bench.gpu_day``: whatever becomes of a stage, the others run and nothing noted is
lost. ``tests/engine/test_gpu_day.py`` runs the real stages."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from bench.gpu_day import __main__ as gpu_day
from bench.gpu_day import carry
from bench.gpu_day.day import Day, page, read_day
from bench.gpu_day.decisions import decisions
from bench.gpu_day.folder import own_folder
from bench.gpu_day.sizes import (
    ENGINE_HOST,
    LARGE,
    POOLS,
    Room,
    engine_bytes,
    fitting,
    host_bytes,
    model_bytes,
    place,
)
from bench.gpu_day.stages import STAGES
from bench.gpu_day.worker import run_stage
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
        assert one.seconds <= 540, "it fits into one command"
    twice = {(one.runs, one.runner) for one in STAGES}
    assert {("bench.gpu_day.hits:hits", runner) for runner in "10"} < twice, "both model runners"


def test_a_stage_that_goes_wrong_costs_itself_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [one.name for one in gpu_day_stages.STAGES]
    names = names[: names.index("waits")]
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
    assert stages["fails"]["figures"] == {"noted": 1}
    assert stages["hangs"]["figures"]["noted"] == 1
    child = stages["hangs"]["figures"]["child"]
    assert eventually(lambda: not Path(f"/proc/{child}").exists()), "what it started ends with it"
    assert stages["fails"]["why"] == "a fault of the stage"
    assert stages["wrong"]["why"] == "same_tokens"
    assert "no_such_package not installed" in stages["needy"]["why"]
    processes = [stages[name]["figures"]["process"] for name in ("first", "second", "third")]
    assert len(set(processes)) == 3, "a new one after each that went wrong"
    said = capfd.readouterr().err
    assert "long: skipped, it may take 3600 s, and " in said
    assert not any(Path(f"/proc/{one}").exists() for one in processes)


def test_an_engine_that_dies_costs_its_stage_alone(tmp_path: Path) -> None:
    """And so does a process that dies between two stages."""
    _, stages = run(tmp_path / "day.json", "dies_later", "engine_dies", "first")
    states = {name: one["state"] for name, one in stages.items()}
    assert states == {"first": "done", "dies_later": "done", "engine_dies": "failed"}
    assert "ended; the end of its log" in stages["engine_dies"]["why"]


@pytest.mark.parametrize("first", ["refused", "v2_hangs"])
def test_where_v2_runs_no_engine_v1_runs_all(first: str, tmp_path: Path) -> None:
    """It is refused, or it hangs; and no stage comes to its end twice with one runner."""
    _, stages = run(tmp_path / "day.json", first, "then", "then_v1", f"{first}_v1")
    assert stages["then"]["state"] == "done"
    assert stages["then"]["figures"] == {"ran": "V1"}
    assert stages["then_v1"]["state"] == "skipped"
    assert stages["then_v1"]["why"] == "then had the same runner"
    figures = stages[first]["figures"]
    ended = stages[first]["state"], figures.get("ran"), "v2_refused" in figures
    assert ended == {"refused": ("done", "V1", True), "v2_hangs": ("cut", None, False)}[first]
    again = stages[f"{first}_v1"]["state"], stages[f"{first}_v1"]["why"]
    ran_already = "skipped", "refused had the same runner"
    assert again == {"refused": ran_already, "v2_hangs": ("done", "")}[first]


def test_what_v2_ran_is_run_with_v1_too(tmp_path: Path) -> None:
    out = tmp_path / "day.json"
    _, stages = run(out, "then", "then_v1")
    assert [stages[name]["figures"]["ran"] for name in ("then", "then_v1")] == ["V2", "V1"]
    run(out, "refused")
    _, stages = run(out, "then")
    assert stages["then"]["figures"]["ran"] == "V1", "an earlier call has found that"
    flags = ["--table", TABLE, "--out", str(out), "--only", "then", "--runner", "1"]
    assert gpu_day.main(flags) == 0
    again = Day(tmp_path / "day-2.json").read()["stages"]["then"]
    assert again["figures"]["ran"] == "V2", "it is asked for"


def test_a_stage_that_failed_is_no_reason_to_skip_its_twin(tmp_path: Path) -> None:
    """Also if one runner runs all: the first one may have lost its figures to anything."""
    out = tmp_path / "day.json"
    flags = ["--runner", "0", "--only", "fails", "--only", "fails_v1"]
    assert gpu_day.main(["--table", TABLE, "--out", str(out), *flags]) == 1
    assert Day(out).states() == {"fails": "failed", "fails_v1": "failed"}


def test_without_vllm_the_stages_that_need_it_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_day, "find_spec", lambda name: None if name == "vllm" else name)
    out, names = tmp_path / "day.json", [one.name for one in STAGES if "vllm" in one.needs]
    flags = [flag for name in names for flag in ("--only", name)]
    assert gpu_day.main(["--smoke", "--out", str(out), *flags]) == 1
    stages = json.loads(out.read_text())["stages"]
    assert {one["why"] for one in stages.values()} == {"vllm not installed"}
    assert {"tests", "copies", "short", "gil"} == {
        one.name for one in STAGES if "vllm" not in one.needs and one.letter in "-ab"
    }


def test_one_that_went_well_is_the_exit_status_and_a_second_run_adds_to_the_file(
    tmp_path: Path,
) -> None:
    out = tmp_path / "day.json"
    assert run(out, "first")[0] == 0
    status, stages = run(out, "second")
    assert status == 0
    assert sorted(stages) == ["first", "second"]
    assert run(out, "needy")[0] == 1, "nothing was measured"


def test_figures_of_another_card_go_into_another_file(tmp_path: Path) -> None:
    """Minutes of a GPU are not lost to a name."""
    out = tmp_path / "day.json"
    run(out, "first")
    before = out.read_text()
    flags = ["--table", TABLE, "--out", str(out), "--only", "second", "--runner", "0"]
    assert gpu_day.main(flags) == 0
    assert Day(tmp_path / "day-2.json").states() == {"second": "done"}
    assert out.read_text() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_of_a_call_that_is_ended_its_figures_stay_and_nothing_else(
    number: signal.Signals, tmp_path: Path
) -> None:
    """In the middle of a stage. Of a kill the folder stays until the next call."""
    out, within = tmp_path / "day.json", tmp_path / "within"
    within.mkdir()
    command = [sys.executable, "-m", "bench.gpu_day", "--table", TABLE, "--out", str(out)]
    command += ["--within", str(within), "--only"]
    parent = subprocess.Popen([*command, "first", "--only", "waits"], stderr=subprocess.DEVNULL)

    def noted() -> bool:
        return "child" in Day(out).read()["stages"].get("waits", {}).get("figures", {})

    assert eventually(noted, 120)
    parent.send_signal(number)
    parent.wait()
    day = Day(out).read()
    assert day["stages"]["waits"] | {"figures": 0} == {"state": "running", "figures": 0}
    worker = day["stages"]["first"]["figures"]["process"]
    started = [Path(f"/proc/{one}") for one in (worker, day["stages"]["waits"]["figures"]["child"])]
    assert eventually(lambda: not any(one.exists() for one in started)), (
        "they end with their parent"
    )
    assert "| noted | 1 |" in page([day])
    assert "running" in page([day])
    assert len([*within.iterdir()]) == (number == signal.SIGKILL)
    with own_folder(str(within)) as others:
        assert gpu_day.main([*command[3:], "needy", "--within", str(within)]) == 1
        assert [*within.iterdir()] == [Path(others)], "what was left was nobody's"
    assert not [*within.iterdir()]


def test_a_further_call_does_what_is_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """First what no call has tried, or was in the middle of."""
    stages = {one.name: one for one in gpu_day_stages.STAGES}
    names = ("fails", "hangs", "waits", "first", "then", "then_v1", "refused", "refused_v1")
    states: dict[str, Any] = {name: {"state": "done"} for name in ("first", "then")}
    states |= {"fails": {"state": "failed"}, "hangs": {"state": "cut"}}
    states |= {"waits": {"state": "running"}, "long": {"state": "skipped"}}
    states |= {"refused": {"state": "done", "figures": {"v2_refused": "no Triton"}}}
    some = [stages[name] for name in names]
    rest = [one.name for one in gpu_day.left(some, states)]
    assert rest == ["waits", "fails", "hangs"], "V1 ran what V2 would have"
    states["first"] = {"state": "done", "figures": {"runner": "V2"}}
    rest = [one.name for one in gpu_day.left(some, states)]
    assert rest == ["waits", "then_v1", "refused_v1", "fails", "hangs"]
    out = tmp_path / "day.json"
    run(out, "first")
    before = Day(out).read()["stages"]["first"]
    flags = ["--table", TABLE, "--out", str(out), "--minutes", "0.01"]
    assert gpu_day.main(flags) == 0
    assert Day(out).read()["stages"]["first"] == before
    said = capfd.readouterr().err
    plan = said[said.index("the plan of 0.01 minutes") :].splitlines()
    assert plan[1] == "  hangs            1 s  not: it may take 1 s, and 1 are left"
    assert not any(line.startswith("  first") for line in plan)


def test_a_plan_says_when_each_stage_begins() -> None:
    """In this call, or in which one after it."""
    names = ("first", "long", "second", "third", "needy", "hangs")
    stages = [one for one in gpu_day_stages.STAGES if one.name in names]
    lines = gpu_day.plan(stages, 61 / 60).splitlines()
    assert lines[0] == "the plan of 1.01667 minutes a call:"
    assert [(line[2:16].strip(), line[24:]) for line in lines[1:]] == [
        ("first", "call 1, second 0"),
        ("hangs", "call 1, second 30"),
        ("second", "call 1, second 31"),
        ("long", "not: it may take 3600 s, and 61 are left"),
        ("needy", "not: no_such_package not installed"),
        ("third", "call 2, second 0"),
    ]


def test_where_no_engine_starts_none_is_started_again(tmp_path: Path) -> None:
    """Neither with V2 nor with V1; what needs none runs."""
    _, stages = run(tmp_path / "day.json", "no_engine", "engine", "first")
    states = {name: one["state"] for name, one in stages.items()}
    assert states == {"no_engine": "failed", "engine": "skipped", "first": "done"}
    assert stages["engine"]["why"].startswith("no engine started: ")


def test_what_fails_before_an_engine_starts_says_nothing_of_engines(tmp_path: Path) -> None:
    """As a daemon that does not start, because its address is in use."""
    _, stages = run(tmp_path / "day.json", "no_daemon", "engine")
    states = {name: one["state"] for name, one in stages.items()}
    assert states == {"no_daemon": "failed", "engine": "done"}


def test_of_two_files_of_a_day_what_came_to_its_end_counts() -> None:
    first = ONE | {"stages": {"gil": stage_of(a=1), "two": stage_of("cut", b=1), "hits": {}}}
    other = ONE | {"stages": {"gil": stage_of("skipped"), "two": stage_of(b=2)}}
    for days in ([first, other], [other, first]):
        text = page(days)
        assert "| a | 1 |" in text
        assert "| b | 2 |" in text


# ---------------------------------------------------------------- pages, and what travels

ONE = {"card": "NVIDIA H200", "driver": "580", "date": "2026-12-01", "vllm": "0.33.0"}
OTHER = ONE | {"card": "NVIDIA H100", "date": "2026-12-02"}


def test_of_a_file_that_was_cut_what_came_through_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it was cut. The next run adds to it."""
    whole, cut = tmp_path / "day.json", tmp_path / "cut.json"
    day = Day(whole)
    day.about(ONE)
    for name in ("copies", "hits", "two"):
        day.begin(name)
        day.note(name, {"ratio": {"llama": 0.5, "gpt": 0.25}, "words": "a [b] {c", "list": [1, 2]})
        day.end(name, "done", seconds=1.0)
    text = whole.read_text()
    known = [0]
    for at in range(1, len(text), 5):
        cut.write_text(text[:at])
        found = read_day(cut)
        assert {**ONE, **found}.keys() == day.read().keys()
        for name, one in found["stages"].items():
            assert _within(one | {"state": "done"}, day.read()["stages"][name])
        known.append(sum(len(one.get("figures", ())) for one in found["stages"].values()))
    assert known == sorted(known), "no cut costs more than what comes after it"
    assert known[-1] == 9
    cut.write_text(text[: text.index('"two"')])
    Day(cut).begin("two")
    assert list(Day(cut).read()["stages"]) == ["copies", "hits", "two"]
    empty = tmp_path / "empty.json"
    empty.write_text("[1]")
    assert gpu_day.main(["--page", str(empty), str(cut)]) == 1
    said = capsys.readouterr()
    assert "empty.json is no file of a day" in said.err
    assert "| ratio llama | 0.5 |" in said.out


def _within(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return all(name in whole and _within(one, whole[name]) for name, one in part.items())
    return bool(part == whole or (isinstance(part, list) and part == whole[: len(part)]))


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


def day_of_stages(staged_store: float, tpot: float = 10.0, **more: Any) -> dict[str, Any]:
    """Figures as of an H200, where stages of stores are so fast."""
    ratios = {"store_vs_pinned": (0.16, staged_store), "load_vs_pinned": (0.44, 0.9)}
    short: dict[str, Any] = {"bytes_equal": True}
    for name, pair in (ratios | {"both_vs_one": (1.03, 1.8)}).items():
        for how, value in zip(("plain", "staged"), pair, strict=True):
            short[f"gpu_{how}_{name}"] = {"llama": value}
    engine: dict[str, Any] = {
        "stage_log": "they go through a stage",
        "2049_short_staged_vs_short": 0.8,
    }
    engine |= {"short_tpot_stored_ms": 10.0, "short_staged_tpot_stored_ms": tpot, **more}
    return {"short": stage_of(**short), "staged": stage_of(**engine)}


def without(stages: dict[str, Any], stage: str, figure: str) -> dict[str, Any]:
    del stages[stage]["figures"][figure]
    return stages


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (
            day_of_stages(0.95),
            "on: llama: store 0.16 -> 0.95, load 0.44 -> 0.90, both 1.03 -> 1.80",
        ),
        (day_of_stages(0.5), "a goal is not met"),
        (day_of_stages(0.95, tpot=12.0), "off: "),
        (day_of_stages(0.95, **{"513_short_staged_vs_short": 1.2}), "off: "),
        (day_of_stages(0.95, **{"513_same_tokens": False}), "off: bytes or tokens differ"),
        (day_of_stages(0.95, stage_log=""), "did not say"),
        ({**day_of_stages(0.95), "staged": {}}, "unknown: stage `staged` has no figures"),
        (
            {**day_of_stages(0.95), "staged": stage_of("cut", stage_log="a stage")},
            "unknown: stage `staged` is cut; llama: store 0.16 -> 0.95",
        ),
        (
            {**day_of_stages(0.95), "staged": stage_of("cut", **{"513_same_tokens": False})},
            "off: bytes or tokens differ",
        ),
        (
            {**day_of_stages(0.95), "staged": stage_of(stage_log="a stage")},
            "unknown: stage `staged` lacks N_short_staged_vs_short",
        ),
        (without(day_of_stages(0.95), "staged", "short_tpot_stored_ms"), "`staged` lacks short_t"),
        (without(day_of_stages(0.95), "short", "bytes_equal"), "`short` lacks bytes_equal"),
        (day_of_stages(0.95) | {"short": stage_of("running", bytes_equal=True)}, "is running"),
        ({}, "unknown: stage `short` has no figures"),
    ],
)
def test_a_page_says_what_the_figures_decide(stages: dict[str, Any], says: str) -> None:
    answer = decisions(stages)["`kvass.gpu_stages` on by default"]
    assert says in answer
    assert answer.replace("|", "/") in page([ONE | {"stages": stages}])


def test_small_hits_are_decided_by_the_shortest_and_the_longest() -> None:
    figures: dict[str, Any] = {
        f"small_{size}_{beside}_{name}_vs_computed": ratio
        for size in (32, 128, 512, 2048)
        for beside in ("idle", "decoding")
        for name, ratio in (("plain", 1.2), ("in_step", 0.9))
    }
    question = "small hits inside the step on a GPU"
    assert decisions({"in_step": stage_of(**figures)})[question].startswith("on: 32 idle: 1.20")
    slower = figures | {"small_512_decoding_in_step_vs_computed": 1.01}
    assert decisions({"in_step": stage_of(**slower)})[question].startswith("off: ")
    differs = figures | {"small_128_same_tokens": False}
    assert decisions({"in_step": stage_of("wrong", **differs)})[question] == "off: tokens differ"
    ignored = figures | {"small_128_idle_in_step_vs_computed": 2.0}
    assert decisions({"in_step": stage_of(**ignored)})[question].startswith("on: ")


@pytest.mark.parametrize("state", ["cut", "done"])
def test_small_hits_are_not_decided_by_the_shortest_alone(state: str) -> None:
    figures: dict[str, Any] = {
        f"small_32_{beside}_{name}_vs_computed": ratio
        for beside in ("idle", "decoding")
        for name, ratio in (("plain", 1.2), ("in_step", 0.9))
    }
    answer = decisions({"in_step": stage_of(state, **figures)})
    why = {"cut": "is cut", "done": "lacks small_512_idle_plain_vs_computed"}[state]
    assert answer["small hits inside the step on a GPU"] == f"unknown: stage `in_step` {why}"


def test_a_stage_that_was_cut_decides_nothing() -> None:
    figures = {"gil_wait_ms": 1.0, "gil_idle_4_vs_1": 1.0, "gil_busy_4_vs_1": 1.1}
    answers = {
        state: decisions({"gil": stage_of(state, **figures)})["fewer calls for a load"]
        for state in ("done", "failed")
    }
    assert answers["done"].startswith("longer first batches")
    assert answers["failed"] == "unknown: stage `gil` is failed"


def test_what_to_carry_is_listed_and_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, fits = carry.what_to_carry(tmp_path)
    assert fits, "the tree alone"
    for need in ("msgspec", "hypothesis", "Python >=3.11", "GPU memory", "/dev/shm", "C compiler"):
        assert need in text
    (tmp_path / "vllm.whl").write_bytes(b"")
    os.truncate(tmp_path / "vllm.whl", carry.MOST_BYTES)
    text, fits = carry.what_to_carry(tmp_path)
    assert not fits
    assert "  64.0 MiB  " in text
    assert "TOO MUCH" in text


def test_the_commands_for_a_wheel_run_as_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shell, with the tree on both sides. ``zip`` and ``pip`` say what they were given."""
    here, there, bin_ = tmp_path / "here", tmp_path / "there", tmp_path / "bin"
    for folder in (here, there / "wheels", bin_):
        folder.mkdir(parents=True)
    for name in ("zip", "pip"):
        (bin_ / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        (bin_ / name).chmod(0o700)
    monkeypatch.setattr(carry, "ROOT", there)
    monkeypatch.setattr(carry, "packages", list)
    monkeypatch.setattr(carry, "_needs", list)
    monkeypatch.setattr(carry, "MOST_BYTES", 2 << 20)
    text, _ = carry.what_to_carry(there / "wheels")
    wheel = tmp_path / "vllm-1-py3-none-any.whl"
    wheel.write_bytes(bytes(range(256)) * (9 << 10))  # parts of 1 MiB
    commands = [line for line in text.splitlines() if "$WHEEL" in line and line.startswith("  ")]
    joined = there / wheel.name

    def told(command: str, folder: Path) -> list[str]:
        command = command.replace("/var/tmp", str(there))
        environment = {"PATH": f"{bin_}:{os.environ['PATH']}", "WHEEL": str(wheel)}
        run = subprocess.run(
            ["bash", "-ec", command], cwd=folder, env=environment, check=True, stdout=-1, text=True
        )
        return run.stdout.splitlines()

    cut, split, join, install = commands
    assert told(cut, here) == ["-qd", str(wheel), *carry.NOT_NEEDED.replace("'", "").split()]
    assert told(split, here) == []
    for part in sorted(here.iterdir()):
        part.rename(there / "wheels" / part.name)
        assert told(join, there) == []
        (there / "wheels" / part.name).unlink()
    assert joined.read_bytes() == wheel.read_bytes()
    assert told(install, there) == ["install", "--no-index", "--no-deps", str(joined)]


def test_what_travelled_has_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(carry, "ROOT", tmp_path)
    assert [one.name for one in carry._tree()] == ["file"]


def test_what_vllm_lacks_of_its_own_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wheel is installed without them, and then no engine starts."""
    monkeypatch.setattr(carry, "find_spec", lambda name: name)
    monkeypatch.setattr(carry, "_installed", lambda name: name != "xgrammar")
    assert [one for one in carry.lacking() if "vLLM's " in one and "own" not in one] == [
        "vLLM's xgrammar"
    ]


GIB = 1 << 30
FULL = Room(gpu=140 * GIB, host=120 * GIB, shm=60 * GIB, disk=40 * GIB)


@pytest.mark.parametrize(
    ("room", "large", "most", "l1", "tokens"),
    [
        (FULL, True, 4, 16, 4096),
        (replace(FULL, gpu=None), True, 4, 16, 4096),
        (replace(FULL, gpu=30 * GIB), True, 2, 16, 4096),
        (replace(FULL, gpu=24 * GIB), False, 3, 16, 4096),
        (replace(FULL, gpu=4 * GIB), False, 0, 16, 1024),
        (replace(FULL, host=32 * GIB), True, 4, 4, 4096),
        (replace(FULL, host=12 * GIB), True, 2, 1, 4096),
    ],
)
def test_a_machine_with_less_does_less(
    room: Room, large: bool, most: int, l1: int, tokens: int
) -> None:
    """And never more than it has."""
    sizes = fitting(room)
    found = sizes.shape == LARGE, sizes.most, sizes.host_bytes, sizes.tokens
    assert found == (large, most, l1 * GIB, tokens)
    cache = sizes.args["kv_cache_memory_bytes"]
    assert most * engine_bytes(sizes.shape, cache) <= (room.gpu or 140 * GIB)
    assert POOLS * sizes.host_bytes + most * ENGINE_HOST <= room.host


def test_without_a_place_for_models_no_engine_runs() -> None:
    """It is known before they are made."""
    assert fitting(replace(FULL, disk=0)).most == 4, "in memory"
    beside = replace(FULL, shm=36 * GIB)
    assert place(beside, fitting(beside), "/tmp") == "/tmp", "vLLM's own offloading takes 32"
    assert fitting(replace(FULL, shm=0)).most == 4, "on the disk"
    few = fitting(replace(FULL, shm=0, disk=4 * GIB))
    assert few.most == 4
    assert few.shape != LARGE
    none = replace(FULL, shm=0, disk=1 * GIB)
    assert fitting(none).most == 0
    assert place(none, fitting(none), "/tmp") == "/tmp"


def test_models_go_into_memory_if_they_fit() -> None:
    tiny = replace(FULL, shm=64 << 20)
    assert place(FULL, fitting(FULL), "/tmp") == "/dev/shm"
    assert place(tiny, fitting(tiny), "/tmp") == "/tmp", "as in a container by default"
    assert place(FULL, None, "/tmp") == "/dev/shm"


@pytest.mark.parametrize("host", [32, 65, 71, 72, 73])
def test_models_in_memory_are_host_memory(host: int) -> None:
    """A day is not larger than what they leave of it."""
    room = replace(FULL, host=host * GIB)
    sizes = fitting(room)
    needed = POOLS * sizes.host_bytes + sizes.most * ENGINE_HOST
    models = model_bytes(sizes) if place(room, sizes, "/tmp") == "/dev/shm" else 0
    assert needed + models <= room.host
    assert (models > 0) == (host >= 72), "64 GiB for the day, and 7.4 for models"


def test_what_an_earlier_call_chose_is_kept_while_it_fits() -> None:
    less = replace(FULL, gpu=40 * GIB, host=50 * GIB)
    chosen = fitting(less)
    assert (chosen.most, chosen.host_bytes) == (2, 8 * GIB)
    assert fitting(FULL, chosen.said) == chosen, "more is free now"
    assert fitting(less, fitting(FULL).said) == chosen, "less is free now"
    assert fitting(FULL, "tiny") == fitting(FULL)
    few = fitting(replace(FULL, gpu=4 * GIB))
    assert fitting(FULL, few.said) == few, "also the tokens of its copies"


def test_a_second_call_measures_while_free_memory_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "day.json"
    monkeypatch.setattr(gpu_day, "SETTLE_S", 0.0)
    for host, name in ((60, "first"), (120, "second"), (36, "third")):
        room = replace(FULL, host=host * GIB, shm=0)
        monkeypatch.setattr(gpu_day, "found_room", lambda room=room: room)
        assert gpu_day.main(["--table", TABLE, "--out", str(out), "--only", name]) == 0
    assert sorted(Day(out).states()) == ["first", "second"]
    assert sorted(Day(tmp_path / "day-2.json").states()) == ["third"], "of other sizes"


def test_what_no_size_changes_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory moves between calls. What is of other engines, another card or unfinished is."""
    card, out = {"card": "NVIDIA H100"}, tmp_path / "day.json"
    monkeypatch.setattr(gpu_day, "facts", lambda _: dict(card))
    args = argparse.Namespace(out=out, smoke=False, runner="")

    def call(gpu: int, *done: str) -> tuple[str, list[str]]:
        """The name of its file, and what it left of the day's first stages."""
        day, _ = gpu_day._day(args, replace(FULL, gpu=gpu * GIB))
        gpu_day.take_over(day, out, STAGES)
        for name in done:
            day.begin(name)
            day.end(name, "done")
        names = [one.name for one in gpu_day.left(STAGES, day.read()["stages"])]
        return day.path.name, names[: names.index("decode")]

    known = ("tests", "copies", "gil", "hits")
    assert call(78, *known) == ("day.json", ["short"])
    assert call(52) == ("day-2.json", ["short", "hits"])
    assert call(52, "short") == ("day-2.json", ["hits"])
    assert call(78) == ("day.json", []), "also from a later file"
    assert call(5) == ("day-3.json", ["copies", "short", "hits"]), "copies of fewer tokens"
    card["card"] = "NVIDIA H200"
    assert call(78) == ("day-4.json", ["tests", "copies", "short", "gil", "hits"])


def test_memory_of_a_call_that_was_just_killed_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "day.json"
    Day(out).about({"sizes": fitting(FULL).said})
    rooms = [replace(FULL, gpu=20 * GIB), FULL, FULL]
    monkeypatch.setattr(gpu_day, "found_room", lambda: rooms.pop(0))
    assert gpu_day._room(out) == FULL
    assert len(rooms) == 1


@pytest.mark.parametrize(
    ("printed", "status", "state"),
    [
        ("tests/a.py::test_b PASSED [100%]", 0, "done"),
        ("tests/a.py::test_b FAILED [100%]", 1, "wrong"),
        ("tests/a.py::test_b SKIPPED (no GPU)", 0, "failed"),
        ("ImportError: no hypothesis", 4, "failed"),
    ],
)
def test_tests_that_did_not_run_are_no_success(
    printed: str, status: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{printed}'\nexit {status}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    day = Day(tmp_path / "day.json")
    day.begin("tests")
    scene: Any = SimpleNamespace(smoke=False, begin=lambda *_: None)
    found, why = run_stage(STAGES[0], scene, day)
    assert found == state
    assert state != "failed" or why == f"no test ran: {printed}"


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_s_pages_of_files_are_free(version: int, tmp_path: Path) -> None:
    """What engines read of models, and what a killed call left of them."""
    folder, prefix = (tmp_path / "memory", "total_") if version == 1 else (tmp_path, "")
    folder.mkdir(exist_ok=True)
    limit, used = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("memory.max", "memory.current"),
    }[version]
    (folder / limit).write_text(f"{100 << 20}\n")
    (folder / used).write_text(f"{90 << 20}\n")
    files = f"{prefix}inactive_file {40 << 20}\n{prefix}active_file {20 << 20}\n"
    (folder / "memory.stat").write_text(f"{prefix}inactive_anon {25 << 20}\n{files}")
    assert host_bytes(tmp_path) == 70 << 20
    (folder / limit).write_text("max\n")
    assert host_bytes(tmp_path) > 70 << 20
