"""For all tests: neither chance nor a busy machine fails one, so what is red once is red again.

Hypothesis has no deadlines and draws the same examples in each run
(``--hypothesis-profile=explore`` draws others). The garbage collector does not look at what was
imported: with vLLM among it, that took 0.25 s, as long as a call may take an engine.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from tests import side_by_side

# The processes that tests start import tests.support too: engines, a daemon's tiers, servers.
ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))

# The models of tests compute so fast that engines would load few hits. Tests of the rule set it.
os.environ["KVASS_SKIP_SLOW_LOADS"] = "no"

# With compiled modules a process starts in half the time, and tests start hundreds of processes.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("same")

ENGINES = Path(__file__).parent / "engine"
ROOM = pytest.StashKey[side_by_side.Room]()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "where all real engines have their pages (default: as each test file says, some on each)"
    parser.addoption("--pages", choices=["host", "gpu"], help=text)
    text = "pairs of prompts that tests/engine/test_pairs.py compares (default: %(default)s)"
    parser.addoption("--pairs", type=int, default=12, help=text)


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """An empty folder of a tmpfs, which the memory of a daemon may be in."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def pytest_collection_finish(session: pytest.Session) -> None:
    if "kvass.testing.daemon" in sys.modules:
        from tests.support.daemons import fork_daemons

        fork_daemons(side_by_side.folder(session.config))
    gc.collect()
    gc.freeze()


# ---------------------------------------------------------------- several processes


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return side_by_side.scheduler(config, log)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[ROOM] = side_by_side.Room(side_by_side.folder(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (side_by_side.rank(item.nodeid), is_alone(item)))


def is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Outside of the time that a test may take."""
    room = item.config.stash.get(ROOM, None)
    with ExitStack() as stack:
        if room is not None:
            alone, stays = is_alone(item), is_alone(nextitem)
            stack.enter_context(room.entered(alone=alone, stays=stays))
        if item.path.is_relative_to(ENGINES):
            # vLLM's scheduler has a library of torch preloaded into every later process.
            stack.enter_context(mock.patch.dict(os.environ))
        return (yield)
