"""Processes for what takes long, forked from one that has imported what all of it needs."""

from __future__ import annotations

import os
import warnings
from multiprocessing import get_context
from multiprocessing.pool import Pool
from typing import Final

PRELOADED: Final = [
    *("hypothesis", "numpy", "pytest", "kvass.client.parallel", "kvass.wire.framing"),
    *("asyncio", "numpy.random", "pdb", "tests.conftest", "tests.support.mutants", "unittest.mock"),
]
"""These import nothing of ``kvass.core``, which a mutant changes before it is imported."""


def cores() -> int:
    """This process's share of the machine's."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


def pool(tasks_per_process: int | None = None) -> Pool:
    """A process for each of our cores, with nothing in it of this one's."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context.Pool(cores(), _warnings_as_in_pytest, maxtasksperchild=tasks_per_process)


def _warnings_as_in_pytest() -> None:
    """Warnings of our code are errors (``filterwarnings`` of ``pyproject.toml``)."""
    warnings.filterwarnings("error", module=r"kvass|tests\.support")
