"""Breaks of the GPU mover, made by hand, in a copy of the package; the fake GPU must notice each.

Law of this file: as in ``tests/simulation/mutants.py``: a break that nothing notices is a hole in
the checks, and one whose text is no longer there says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class StaleMutantError(Exception):
    """The mover changed: this break does not apply any more, write it anew."""


@dataclass(frozen=True)
class Mutant:
    """``old`` is in ``kvass/transfer/<file>`` exactly once, and becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


UNBROKEN = Mutant("unbroken", "cuda.py", "", "")

MUTANTS = [
    Mutant(
        "copies do not wait for the engine's stream",
        "cuda.py",
        "            fault = self._runtime.wait(lane.stream, task.order)\n",
        "            fault = None\n",
    ),
    Mutant(
        "loads do not wait for the engine's stream",
        "cuda.py",
        "        if not task.ordered:\n            fault",
        "        if not task.ordered and lane.kind == 'store':\n            fault",
    ),
    Mutant(
        "stores do not wait for the engine's stream",
        "cuda.py",
        "        if not task.ordered:\n            fault",
        "        if not task.ordered and lane.kind == 'load':\n            fault",
    ),
    Mutant(
        "a job waits for the first job's place in the engine's stream",
        "cuda.py",
        "        if not task.ordered:\n",
        "        if not task.ordered and lane.moved_bytes == 0:\n",
    ),
    Mutant(
        "the place in the engine's stream is that of the first copy, not of submit",
        "cuda.py",
        "            fault = self._runtime.wait(lane.stream, task.order)\n",
        "            late = self._runtime.order()\n"
        "            if isinstance(late, Fault):\n"
        "                return self._failed(task, late)\n"
        "            fault = self._runtime.wait(lane.stream, late)\n"
        "            self._runtime.forget(late)\n",
    ),
    Mutant(
        "copies that may block do not wait",
        "cuda.py",
        '        if batch.way == "pageable":',
        '        if batch.way == "pageable" and not (\n'
        "            setattr(task, 'ordered', True)\n"
        "        ) and False:",
    ),
    Mutant(
        "settled when given, not when over",
        "cuda.py",
        "        if task.flying or not task.given:\n",
        "        if not task.given:\n",
    ),
    Mutant(
        "settled when its first batch is over",
        "lanes.py",
        "        task.flying -= 1\n",
        "        task.flying = 0\n",
    ),
    Mutant(
        "the mark of a batch lies before it",
        "cuda.py",
        "        fault = self._runtime.copy(lane.stream, batch)\n"
        "        return self._fly(lane, lane.stream, task, batch, fault)\n",
        "        class Early:\n"
        "            def __getattr__(self, name: str) -> object:\n"
        "                return getattr(runtime, name)\n"
        "        runtime, early = self._runtime, self._runtime.mark(lane.stream)\n"
        "        fault = runtime.copy(lane.stream, batch)\n"
        "        self._runtime = Early()\n"
        "        self._runtime.mark = lambda stream: early\n"
        "        try:\n"
        "            return self._fly(lane, lane.stream, task, batch, fault)\n"
        "        finally:\n"
        "            self._runtime = runtime\n",
    ),
    Mutant(
        "a batch is taken for over without a look at its event",
        "cuda.py",
        "            if not over:\n                break\n",
        "",
    ),
    Mutant(
        "a batch that failed is taken for not given",
        "cuda.py",
        "        fault = self._runtime.copy(lane.stream, batch)\n",
        "        fault = self._runtime.copy(lane.stream, batch)\n"
        "        if fault is not None:\n"
        "            return self._failed(task, fault)\n",
    ),
    Mutant(
        "a batch that failed is taken for done",
        "cuda.py",
        "        return True if fault is None else self._failed(task, fault)\n",
        "        return True\n",
    ),
    Mutant(
        "of a late job what runs is forgotten",
        "cuda.py",
        '            task.end("late")\n',
        '            task.end("late")\n            task.flying = 0\n',
    ),
    Mutant(
        "being in time is judged before the copy",
        "cuda.py",
        '            task.outcome = "done" if self._clock() < task.job.deadline_s else "late"\n',
        '            task.outcome = "done"\n',
    ),
    Mutant(
        "closing cancels what runs",
        "cuda.py",
        '            task.end("cancelled")\n',
        '            task.end("cancelled")\n            task.flying = 0\n',
    ),
    Mutant(
        "closing does not wait for what runs",
        "cuda.py",
        "            while self._unsettled:\n                self._turn_or_die()\n",
        "            self._turn_or_die()\n",
    ),
    Mutant(
        "closing unregisters first",
        "cuda.py",
        "            while self._unsettled:\n",
        "            self._pins.let_go()\n            while self._unsettled:\n",
    ),
    Mutant(
        "a batch without an event counts as over",
        "cuda.py",
        "        if event is None:\n            return self._idle(lane)\n",
        "        if event is None:\n            return True\n",
    ),
    Mutant(
        "a batch of whose event nothing can be had counts as over",
        "cuda.py",
        '            task.end("failed", over.text)\n            return self._idle(lane)\n',
        '            task.end("failed", over.text)\n            return True\n',
    ),
    Mutant(
        "a batch of whose event nothing can be had counts as lost",
        "cuda.py",
        '            task.end("failed", over.text)\n            return self._idle(lane)\n',
        "            return Fault(over.text, dead=True)\n",
    ),
    Mutant(
        "a stream that says nothing counts as empty",
        "cuda.py",
        "dead=True) if idle.dead or silent else False\n",
        "dead=True) if idle.dead or silent else True\n",
    ),
    Mutant(
        "after our own failure nobody waits for what was begun",
        "cuda.py",
        "        idle = self._idle(lane)\n        if isinstance(idle, Fault):\n",
        "        idle = self._idle(lane) or True\n        if isinstance(idle, Fault):\n",
    ),
    Mutant(
        "of a dead device's copies it is said that they ended",
        "cuda.py",
        '                task.end("lost", fault.text)\n',
        '                task.end("failed", fault.text)\n',
    ),
    Mutant(
        "an arena ends without being unregistered",
        "pins.py",
        "            end = weakref.finalize(root, self._end, pinned)\n",
        "            end = weakref.finalize(root, list)\n",
    ),
    Mutant(
        "an arena is unregistered by whoever lets go of it",
        "pins.py",
        "        self._ended.append(pinned)\n",
        "        while not pinned.let_go():\n            pass\n",
    ),
    Mutant(
        "an arena is unmapped before it is unregistered",
        "pins.py",
        "        self._ended.append(pinned)\n",
        "        pinned._mapping = None\n        self._ended.append(pinned)\n",
    ),
    Mutant(
        "an arena that ended stays mapped",
        "pins.py",
        "        self._mapping = None\n",
        "        self._runtime.__dict__.setdefault('all', []).append(self._mapping)\n",
    ),
    Mutant(
        "a job does not keep its arena",
        "cuda.py",
        "                    task.more = None\n",
        "                    task.more = None\n"
        "                    object.__setattr__(task.job, 'arena', task.job.arena.copy())\n",
    ),
    Mutant(
        "an arena is known by its address",
        "pins.py",
        "        known = self._known.get(id(root))\n",
        "        known = next(iter(self._known.values()), None)\n",
    ),
    Mutant(
        "an arena lives as long as the mover",
        "pins.py",
        "            known = self._known[id(root)] = (pinned, end)\n",
        "            known = self._known[id(root)] = (pinned, end)\n"
        "            self.__dict__.setdefault('all', []).append(root)\n",
    ),
    Mutant(
        "runs may cross windows",
        "descriptors.py",
        "            yield _cut(_merge(Runs(*columns)), window)\n",
        "            yield _merge(Runs(*columns))\n",
    ),
    Mutant(
        "what could not be registered goes the fast way",
        "descriptors.py",
        "    if pinned is not None:\n",
        "    if False:\n",
    ),
    Mutant(
        "neighbours on one side are taken for one run",
        "descriptors.py",
        "    joins = (runs.device[:-1] + runs.count[:-1] == runs.device[1:]) & (\n",
        "    joins = (runs.device[:-1] > 0) & (\n",
    ),
    Mutant(
        "memory that the daemon has not populated is pinned",
        "pins.py",
        "        if end > populated or",
        "        if begin > populated or",
    ),
    Mutant(
        "what is not pinned yet is taken for pinned",
        "batching.py",
        "        which = None if pinned_all else pinned.are(windows)\n",
        "        which = None\n",
    ),
    Mutant(
        "one window that is pinned stands for all",
        "pins.py",
        "            all_are = all_are and one in self.registered\n",
        "            all_are = one in self.registered\n",
    ),
    Mutant(
        "events leak",
        "cuda.py",
        "            self._runtime.forget(event)\n",
        "            pass\n",
    ),
    Mutant(
        "a kernel's table is used anew while it runs",
        "cuda.py",
        "        return self._fly(lane, lane.stream, task, batch, fault)\n",
        "        batch.keep.clear()\n"
        "        return self._fly(lane, lane.stream, task, batch, fault)\n",
    ),
    Mutant(
        "a kernel's table is never let go of",
        "cuda.py",
        "        batch.keep.clear()\n",
        "",
    ),
    Mutant(
        "a kernel's table is one for all",
        "kernel_tables.py",
        "            number = self._free.popleft()\n",
        "            number = self._free[0]\n",
    ),
    Mutant(
        "any number of descriptors flies",
        "lanes.py",
        "        return not self.mute and self._runs + len(batch.bytes) <= self._most_runs\n",
        "        return True\n",
    ),
    Mutant(
        "a batch above the bound never goes",
        "lanes.py",
        "        if not self.flying:\n            self.mute = False\n            return True\n",
        "",
    ),
    Mutant(
        "on a dead device's lane there is never room again",
        "cuda.py",
        "                _, task, batch = lane.land()\n",
        "                _, task, batch = lane.flying.popleft()\n"
        "                task.flying -= 1\n",
    ),
    Mutant(
        "the engine's thread registers memory",
        "cuda.py",
        "        lane = self._lanes[job.kind]\n        with",
        "        lane = self._lanes[job.kind]\n"
        "        self._pins.of(job.arena).want([0], job.populated)\n"
        "        with",
    ),
    Mutant(
        "the engine's thread asks whether the copy is over",
        "cuda.py",
        "        task = Task(job, self._clock(), order)\n",
        "        task = Task(job, self._clock(), order)\n"
        "        isinstance(order, Fault) or self._runtime.done(order)\n",
    ),
]


def broken_copy(mutant: Mutant, into: Path) -> Path:
    """A copy of the package with the break in it; what to put first on ``PYTHONPATH``."""
    package = into / "kvass"
    shutil.copytree(ROOT / "src" / "kvass", package, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not UNBROKEN:
        path = package / "transfer" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            found = text.count(mutant.old)
            raise StaleMutantError(f"{mutant.name}: found {found} times in {mutant.file}")
        path.write_text(text.replace(mutant.old, mutant.new))
    return into


_SEEDS = """
import logging, sys
from tests.transfer.gpu_world import run_seed
logging.disable()
for seed in range({seeds}):
    if told := run_seed(seed):
        sys.exit(told)
"""


def notice(path: Path, seeds: int = 400) -> str:
    """The first seed that fails in the package at ``path``, and how; empty if none does."""
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _SEEDS.format(seeds=seeds)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = (done.stdout + done.stderr).strip()
    assert done.returncode == 0 or said.startswith("seed "), said
    return said
