"""The process that runs the stages: ``python -m bench.gpu_day.worker CONFIG``, a JSON object.

Each line of its standard input names a stage; each line of its output says how one ended. It dies
with its parent, and all that it started dies with it, however it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, Self

import msgspec

from bench.gpu_day.day import Day, last_words
from bench.gpu_day.scene import Scene
from bench.gpu_day.sizes import Sizes
from bench.gpu_day.stages import Stage
from kvass.errors import ConfigError
from tests.support.vllm.process import EngineDied

ROOT: Final = Path(__file__).parents[2]
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_END_S: Final = 15.0


class Worker:
    """The parent's half. ``config``: what ``main`` reads; what it prints goes to ``log``."""

    def __init__(self, config: dict[str, Any], log: IO[bytes]) -> None:
        paths = [*map(str, (ROOT / "src", ROOT)), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            process_group=0,  # no session: whoever ends this one's processes finds them
        )

    def give(self, stage: str) -> bool:
        """Begin a stage. False: this process has ended."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(f"{stage}\n".encode())
            stdin.flush()
        except BrokenPipeError:
            return False
        return self._process.poll() is None

    def ended(self, limit_s: float) -> tuple[str, str]:
        """The stage's state, and why it is so. After another one than ``ended_well`` kill this
        worker."""
        process = self._process
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], limit_s)[0]:
            return "cut", f"it took longer than {limit_s:.0f} s"
        if not (line := process.stdout.readline()).endswith(b"\n"):
            return "failed", "its process ended: see the log"
        state, why = json.loads(line)
        return state, why

    def kill(self) -> None:
        """With all processes that it started."""
        with suppress(ProcessLookupError):  # none of them is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(BrokenPipeError):  # a stage that it did not read
            assert self._process.stdin is not None
            self._process.stdin.close()

    def close(self) -> None:
        """In good order, or by force: a call ends soon after its minutes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()


class Workers:
    """One after the other, as long as each ends well. Use it as a context."""

    def __init__(self, log: IO[bytes]) -> None:
        self._log = log
        self._one: Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if self._one is not None and failed is None:
            self._one.close()
        else:
            self._kill()

    def run(self, stage: str, limit_s: float, config: dict[str, Any]) -> tuple[str, str]:
        """A stage; its state, and why it is so."""
        self._one = self._one or Worker(config, self._log)
        if not self._one.give(stage):  # it ended after its last stage: killed for memory, say
            self._kill()
            self._one = Worker(config, self._log)
            self._one.give(stage)
        state, why = self._one.ended(limit_s)
        if not ended_well(state):
            self._kill()
        return state, why

    def _kill(self) -> None:
        if self._one is not None:
            self._one.kill()
            self._one = None


def ended_well(state: str) -> bool:
    """Whether the process, and its engines, may run the next stage."""
    return state in ("done", "wrong", "skipped")


def run_stage(stage: Stage, scene: Scene, day: Day) -> tuple[str, str]:
    """Its state, and why it is so."""
    faults: list[str] = []

    def note(**figures: Any) -> None:
        faults.extend(name for name, value in figures.items() if value is False)
        day.note(stage.name, figures)

    began_s = time.monotonic()
    try:
        scene.begin(stage.runner, note)
        try:
            stage.run(scene, note)
        except EngineDied as died:
            if not scene.gives_up_v2(last_words(died)):
                raise
            stage.run(scene, note)
        ended = ("wrong", ", ".join(faults)) if faults else ("done", "")
    except ConfigError as missing:
        ended = "skipped", str(missing)
    except Exception as error:  # noqa: BLE001 - whatever a GPU brings, the other stages shall run
        traceback.print_exc()
        if isinstance(error, EngineDied):
            note(engine_died=True)
        ended = "failed", last_words(error)
    day.end(stage.name, *ended, time.monotonic() - began_s)
    return ended


def _guard() -> None:
    """Start a process that kills this one's group as soon as this one has ended."""
    alive, own = os.pipe()  # whatever else is started closes these
    if os.fork():
        os.close(alive)
        return
    os.closerange(0, 3)
    os.close(own)
    os.read(alive, 1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """See the top of this file."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _guard()
    wire = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines and libraries print
    config = json.loads(sys.argv[1])
    stages = {one.name: one for one in import_module(config["table"]).STAGES}
    day = Day(Path(config["out"]))
    terms = config["smoke"], config["forks"], config["runner"]
    sizes = msgspec.convert(config["sizes"], Sizes | None)
    with Scene(Path(config["folder"]), *terms, sizes) as scene:
        for line in sys.stdin:
            wire.write(json.dumps(run_stage(stages[line.strip()], scene, day)) + "\n")


if __name__ == "__main__":
    main()
