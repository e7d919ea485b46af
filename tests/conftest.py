"""For every test here: chance and a busy machine fail none, so what is red once is red again.

Hypothesis has no deadlines and draws the same examples in each run
(``--hypothesis-profile=explore`` draws others). The collector looks at nothing that collecting the
tests has imported: with vLLM among it, one look took 0.25 s, as long as a call may take an engine.
Where several processes share the tests, ``side_by_side`` says how.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import side_by_side

# The processes that tests start import tests.support too: engines, a daemon's tiers, servers.
ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))

settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("same")

ENGINES = Path(__file__).parent / "engine"
ROOM = pytest.StashKey[side_by_side.Room]()
FOLDER = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "where all real engines have their pages (default: as each test file says, some on each)"
    parser.addoption("--pages", choices=["host", "gpu"], help=text)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


# ---------------------------------------------------------------- several processes


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return side_by_side.scheduler(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """In the process that hands out the tests: the others meet in one folder."""
    folder = tempfile.TemporaryDirectory(prefix="kvass-tests-")
    config.stash[FOLDER] = folder.name
    config.add_cleanup(folder.cleanup)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["room"] = node.config.stash[FOLDER]


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[ROOM] = side_by_side.Room(Path(config.workerinput["room"]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: side_by_side.rank(item.nodeid))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Outside of the time that a test may take."""
    room = item.config.stash.get(ROOM, None)
    with ExitStack() as stack:
        if room is not None:
            alone = item.get_closest_marker("alone") is not None
            stack.enter_context(room.entered(alone=alone))
        if item.path.is_relative_to(ENGINES):
            stack.enter_context(side_by_side.environment_kept())
        return (yield)
