"""Copies of an engine whose threads are bound to CPUs run on the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import cores
from kvass.transfer.base import Job
from kvass.transfer.cores import spare_cpus, threads_on
from kvass.transfer.host import HostMover

ALLOWED = sorted(os.sched_getaffinity(0))
two_cpus = pytest.mark.skipif(len(ALLOWED) < 2, reason="one CPU: nothing can be left free")
BOUND = """
import json, os
import {library}
from tests.transfer.test_cores import where_a_load_is_copied, where_two_movers_copy
engine = sorted(os.sched_getaffinity(0))
print(json.dumps([engine, where_a_load_is_copied()[0], where_two_movers_copy()]))
"""


def where_a_load_is_copied() -> tuple[list[int], list[str]]:
    """The CPUs that the copy thread may use, and the names of all copy threads."""
    with _load() as cpus:
        names = [thread.name for thread in threading.enumerate()]
    return cpus, sorted(name for name in names if name.startswith("kvass-copy"))


def where_two_movers_copy() -> list[int]:
    """The CPUs of the second one, while the first one has threads."""
    with _load(), _load() as cpus:
        return cpus


@contextmanager
def _load() -> Iterator[list[int]]:
    """A mover after its first load; the CPUs that its copy thread may use."""
    planes = GroupPlanes(0, (Plane(0, 4096, 4096),), blocks=4, chunk_blocks=1)
    mover, seen = HostMover([np.zeros(4 * 4096, np.uint8)], [planes]), list[list[int]]()
    plan = plan_copy(planes, np.array([[1], [2]]), np.array([0, 4096]))
    arena = np.ones(2 * 4096, np.uint8)
    look = lambda _: seen.append(sorted(os.sched_getaffinity(0)))  # noqa: E731
    mover.submit(Job("load", (plan,), arena, on_done=look))
    assert mover.drain(60)
    yield seen[0]
    mover.close()


def said(library: str, **more_env: str) -> list[list[int]]:
    """The CPUs of a process that imports ``library``, and of its copies."""
    env = os.environ | more_env
    env.pop("LD_PRELOAD", None)
    command = [sys.executable, "-c", BOUND.format(library=library)]
    ended = subprocess.run(
        command, env=env, capture_output=True, text=True, check=True, timeout=120
    )
    engine, copies, second = json.loads(ended.stdout)
    assert second == copies, "the threads of one mover are no engine for the next"
    return [engine, copies]


@two_cpus
def test_copies_leave_the_cpu_that_openmp_bound_the_engine_to() -> None:
    """As vLLM starts its workers on a CPU: torch's OpenMP binds the thread that imports it."""
    first, *others = ALLOWED
    bound = {"OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "true", "OMP_PLACES": f"{{{first}}}"}
    assert said("torch", **bound) == [[first], others]


@two_cpus
def test_copies_of_an_engine_that_binds_nothing_run_anywhere() -> None:
    """The control."""
    assert said("numpy") == [ALLOWED, ALLOWED]


def test_an_unbound_thread_is_left_where_it_is() -> None:
    assert spare_cpus() == set()


@pytest.mark.parametrize(
    ("own", "parent", "threads", "expected"),
    [
        ({0}, {*range(8)}, [{0}, {1}, {2}, {*range(8)}], {3, 4, 5, 6, 7}),
        ({0}, {0}, [{0}], set()),  # the user gave one CPU
        ({0, 1}, {0, 1}, [{0, 1}], set()),
        ({0}, {0, 1}, [{0}, {1}], set()),  # all are taken
        ({5}, {0, 1}, [{5}], set()),  # the parent says nothing about us
    ],
)
def test_what_is_spare(
    own: set[int],
    parent: set[int],
    threads: list[set[int]],
    expected: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks = {0: own, os.getppid(): parent} | {100 + n: cpus for n, cpus in enumerate(threads)}
    monkeypatch.setattr(os, "listdir", lambda _: [str(100 + n) for n in range(len(threads))])
    monkeypatch.setattr(os, "sched_getaffinity", masks.__getitem__)
    assert spare_cpus() == expected


@pytest.mark.parametrize(("spare", "threads"), [(0, 2), (1, 2), (3, 3), (64, 8)])
def test_threads_are_bounded(spare: int, threads: int) -> None:
    assert threads_on({*range(spare)}) == threads


@two_cpus
def test_each_spare_cpu_gets_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there with the first load, and all end with the mover."""
    monkeypatch.setattr(cores, "spare_cpus", lambda: {*range(8)} & {*ALLOWED})
    monkeypatch.setattr(cores, "threads_on", lambda _: 8)
    _, names = where_a_load_is_copied()
    assert names == ["kvass-copy", *(f"kvass-copy-{number}" for number in range(2, 9))]
    assert not [t for t in threading.enumerate() if t.name.startswith("kvass-copy")]


def test_loads_are_copied_where_the_kernel_does_not_tell_of_the_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy thread would end, and every load and store would wait for it forever."""
    real, parent = os.sched_getaffinity, os.getppid()

    def affinity(pid: int) -> set[int]:
        if pid == parent:
            raise ProcessLookupError
        return real(pid)

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    assert spare_cpus() == set()
    assert where_a_load_is_copied()[0] == ALLOWED
