"""Stages of a GPU day that behave badly: a ``--table`` for ``test_gpu_day.py``."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from bench.gpu_day.stages import Note, Stage

HERE = "tests.bench.gpu_day_stages:"


def well(scene: Any, note: Note) -> None:
    note(process=os.getpid(), nested={"b": 2.0})


def hang(scene: Any, note: Note) -> None:
    note(noted=1)
    time.sleep(600)


def fail(scene: Any, note: Note) -> None:
    note(noted=1)
    raise ValueError("a fault of the stage")


def die(scene: Any, note: Note) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrong(scene: Any, note: Note) -> None:
    note(same_tokens=False)


def stage(name: str, runs: str, minutes: float = 1.0, *needs: str) -> Stage:
    return Stage(name, "z", "a test", minutes, HERE + runs, "", needs)


STAGES = (
    stage("first", "well"),
    stage("hangs", "hang", 2 / 60),
    stage("second", "well"),
    stage("fails", "fail"),
    stage("dies", "die"),
    stage("wrong", "wrong"),
    stage("third", "well"),
    stage("long", "well", 60.0),
    stage("needy", "well", 1.0, "no_such_package"),
    stage("waits", "hang"),
)
