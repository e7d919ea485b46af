"""Stages of a GPU day that behave badly: a ``--table`` for ``test_gpu_day.py``."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.gpu_day.stages import Note, Stage
from tests.support.vllm.process import EngineProcess

HERE = "tests.bench.gpu_day_stages:"


def well(scene: Any, note: Note) -> None:
    note(process=os.getpid(), nested={"b": 2.0})


def hang(scene: Any, note: Note) -> None:
    child = subprocess.Popen(["sleep", "600"])
    note(noted=1, child=child.pid)
    time.sleep(600)


def fail(scene: Any, note: Note) -> None:
    note(noted=1)
    raise ValueError("a fault of the stage")


def die(scene: Any, note: Note) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_later(scene: Any, note: Note) -> None:
    """When it has said that it is done: it reads no further stage."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def engine_dies(scene: Any, note: Note) -> None:
    note(noted=1)
    dead = EngineProcess(Path("no model"), scene.folder / "dead.log", python="/bin/false")
    scene.ready(dead)


def v1_only(scene: Any, note: Note) -> None:
    """As vLLM without Triton: an engine of V2 does not start."""
    if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1":
        engine_dies(scene, note)
    note(ran="V1")


def says_runner(scene: Any, note: Note) -> None:
    note(ran=f"V{1 + int(os.environ['VLLM_USE_V2_MODEL_RUNNER'])}")


def v2_hangs(scene: Any, note: Note) -> None:
    """Before its first engine is up."""
    if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1":
        hang(scene, note)
    note(ran="V1")


def wrong(scene: Any, note: Note) -> None:
    note(same_tokens=False)


def stage(name: str, runs: str, seconds: float = 30.0, *needs: str) -> Stage:
    return Stage(name, "z", "a test", seconds, HERE + runs, "", needs)


STAGES = (
    stage("first", "well"),
    stage("hangs", "hang", 1.0),
    stage("second", "well"),
    stage("fails", "fail"),
    stage("dies", "die"),
    stage("wrong", "wrong"),
    stage("third", "well"),
    stage("long", "well", 3600.0),
    stage("needy", "well", 30.0, "no_such_package"),
    stage("waits", "hang"),
    stage("dies_later", "dies_later"),
    stage("engine_dies", "engine_dies"),
    stage("no_daemon", "fail", 30.0, "vllm"),
    stage("no_engine", "engine_dies", 30.0, "vllm"),
    stage("engine", "well", 30.0, "vllm"),
    stage("refused", "v1_only"),
    stage("v2_hangs", "v2_hangs", 1.0, "vllm"),
    stage("then", "says_runner"),
    stage("then_v1", "says_runner")._replace(runner="0"),
    stage("fails_v1", "fail")._replace(runner="0"),
    stage("refused_v1", "v1_only")._replace(runner="0"),
    stage("v2_hangs_v1", "v2_hangs", 30.0, "vllm")._replace(runner="0"),
)
