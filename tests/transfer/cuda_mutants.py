"""Breaks of the GPU mover, made by hand, in a copy of the package; the fake GPU must notice each.

A break that nothing notices is a hole in the checks, and one whose text is no longer there says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BREAKS = r"""
cuda.py: copies do not wait for the engine's stream
-            fault = self._runtime.wait(lane.stream, task.order)
+            fault = None
cuda.py: loads do not wait for the engine's stream
-        if not task.ordered:
+        if not task.ordered and lane.kind == 'store':
cuda.py: stores do not wait for the engine's stream
-        if not task.ordered:
+        if not task.ordered and lane.kind == 'load':
cuda.py: a job waits for the first job's place in the engine's stream
-        if not task.ordered:
+        if not task.ordered and lane.moved_bytes == 0:
cuda.py: the place in the engine's stream is that of the first copy, not of submit
-            fault = self._runtime.wait(lane.stream, task.order)
+            late = self._runtime.order()
+            if isinstance(late, Fault):
+                return self._failed(task, late)
+            fault = self._runtime.wait(lane.stream, late)
+            self._runtime.forget(late)
cuda.py: copies that may block do not wait
-        if batch.way == "pageable":  # this call may block, with the driver's locks
+        if batch.way == "pageable" and not (
+            setattr(task, 'ordered', True)
+        ) and False:  # this call may block, with the driver's locks
cuda.py: settled when given, not when over
-        if task.flying or task.queued:
+        if task.queued:
lanes.py: settled when its first batch is over
-        task.flying -= 1
+        task.flying = 0
cuda.py: the mark of a batch lies before it
-        fault = self._runtime.copy(lane.stream, batch)
+        early = self._runtime.mark(lane.stream)
+        fault = self._runtime.copy(lane.stream, batch)
+        lane.take_off(None if isinstance(early, Fault) else early, task, batch)
+        if True:
+            return True if fault is None else self._failed(task, fault)
cuda.py: a batch is taken for over without a look at its event
-            if over is not True:
+            if isinstance(over, Fault):
cuda.py: a batch that failed is taken for not given
-        fault = self._runtime.copy(lane.stream, batch)
+        fault = self._runtime.copy(lane.stream, batch)
+        if fault is not None:
+            return self._failed(task, fault)
cuda.py: a batch that failed is taken for done
-        return True if fault is None else self._failed(task, fault)
+        return True
cuda.py: of a late job what runs is forgotten
-            task.end("late")
+            task.end("late")
+            task.flying = 0
cuda.py: being in time is judged before the copy
-            task.outcome = "done" if self._clock() < task.job.deadline_s else "late"
+            task.outcome = "done"
cuda.py: closing cancels what runs
-            task.end("cancelled")
+            task.end("cancelled")
+            task.flying = 0
cuda.py: closing does not wait for what runs
-                if self._closed and not self._unsettled:
+                if self._closed:
cuda.py: closing unregisters first
-            if self._turn():
+            if self._closed:
+                self._pins.close()
+            if self._turn():
cuda.py: a batch without an event counts as over
-            self._end_all(event)
+            return self._failed(task, event)
cuda.py: a batch of whose event nothing can be had counts as over
-            if isinstance(over, Fault):
-                self._end_all(over)
+            over = True if isinstance(over, Fault) and not over.dead else over
+            if isinstance(over, Fault):
+                self._end_all(over)
cuda.py: a batch of whose event nothing can be had counts as lost
-                self._end_all(over)
+                self._end_all(Fault(over.text, dead=True))
cuda.py: a stream that says nothing counts as empty
-                if isinstance(idle, Fault):
-                    return False
cuda.py: after our own failure nobody waits for what was begun
-        self._dead = self._dead or fault.dead or not self._stopped()
+        self._dead = self._dead or fault.dead
cuda.py: of a dead device's copies it is said that they ended
-            outcome: Outcome = "lost" if self._dead else "failed"
+            outcome: Outcome = "failed"
cuda.py: a dead device's jobs stay in the queue
-                lane.queue.clear()
+                pass
cuda.py: a dead device's batches stay in flight
-            lane.flying.clear()
pins.py: an arena ends without being unregistered
-        self._arenas.append(Pinned(self._runtime, root, self._window))
-        return self._arenas[-1]
+        return Pinned(self._runtime, root, self._window)
pins.py: an arena is unregistered by whoever lets go of it
-        self.arena = weakref.ref(arena)
+        self.arena = weakref.ref(arena, lambda _: self.registered and self.let_go())
pins.py: an arena is unmapped before it is unregistered
-            gone.let_go()
+            gone._mapping = None
+            gone.let_go()
pins.py: an arena that ended stays mapped
-            self._arenas.remove(gone)
+            self._arenas.remove(gone)
+            self._runtime.__dict__.setdefault('all', []).append(gone)
cuda.py: a job does not keep its arena
-                task.next = next(task.more, None)
+                task.next = next(task.more, None)
+                if task.next is None:
+                    object.__setattr__(task.job, 'arena', task.job.arena.copy())
pins.py: an arena is taken for another one
-            if pinned.arena() is root:
+            if pinned.arena() is not None:
pins.py: an arena lives as long as the mover
-        self._arenas.append(Pinned(self._runtime, root, self._window))
+        self._arenas.append(Pinned(self._runtime, root, self._window))
+        self.__dict__.setdefault('all', []).append(root)
descriptors.py: runs may cross windows
-            yield _cut(_merge(runs), window)
+            yield _merge(runs)
pins.py: what could not be registered goes the fast way
-        return np.isin(windows, list(self.registered))
+        return np.isin(windows, [*self.registered, *self._refused])
descriptors.py: neighbours on one side are taken for one run
-    joins = (runs.device[:-1] + runs.count[:-1] == runs.device[1:]) & (
+    joins = (runs.device[:-1] > 0) & (
pins.py: memory that the daemon has not populated is pinned
-        if end > populated or self._mapping is None:
+        if begin > populated or self._mapping is None:
descriptors.py: what is not pinned yet is taken for pinned
-        fast = pinned.want(runs.host // pinned.window, job.populated if below else 0)
+        fast = pinned.want(runs.host // pinned.window, job.populated if below else 0)
+        fast = fast | (job.populated < job.arena.nbytes)
pins.py: one window that is pinned stands for all
-        return np.isin(windows, list(self.registered))
+        return np.full(len(windows), np.isin(windows, list(self.registered)).any())
cuda.py: events leak
-            self._runtime.forget(event)
cuda.py: a kernel's table is used anew while it runs
-        fault = self._runtime.copy(lane.stream, batch)
+        fault = self._runtime.copy(lane.stream, batch)
+        batch.keep.clear()
cuda.py: a kernel's table is never let go of
-            batch.keep.clear()
cuda_copies.py: a kernel's table is one for all
-            number = self.free.popleft()
+            number = self.free[0]
lanes.py: any number of descriptors flies
-        return self._bytes < self._most_bytes and runs <= self._most_runs
+        return True
lanes.py: a full batch never goes
-        return self._bytes < self._most_bytes and runs <= self._most_runs
+        return self._bytes < self._most_bytes and 2 * runs < self._most_runs
cuda.py: the engine's thread registers memory
-            self._lanes[job.kind].push(job, self._clock(), order)
+            import numpy as np
+
+            self._pins.of(job.arena).want(np.array([0]), job.populated)
+            self._lanes[job.kind].push(job, self._clock(), order)
cuda.py: the engine's thread asks whether the copy is over
-            self._lanes[job.kind].push(job, self._clock(), order)
+            isinstance(order, Fault) or self._runtime.done(order)
+            self._lanes[job.kind].push(job, self._clock(), order)
"""
"""Of each: its file in ``kvass/transfer`` and its name; the lines that go, and those that come."""


class StaleMutantError(Exception):
    """The mover changed: this break does not apply any more, write it anew."""


@dataclass(frozen=True)
class Mutant:
    """``old`` is in ``kvass/transfer/<file>`` exactly once, and becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


def _read(text: str) -> Mutant:
    (head, *lines) = text.splitlines(keepends=True)
    file, _, name = head.strip().partition(": ")
    old, new = ("".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    return Mutant(name, file, old, new)


UNBROKEN = Mutant("unbroken", "cuda.py", "", "")
MUTANTS = [_read(text) for text in re.findall(r"^\w.*\n(?:[-+].*\n)+", BREAKS, re.MULTILINE)]


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
