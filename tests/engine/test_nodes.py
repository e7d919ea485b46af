"""One real engine over two nodes: two process trees, each with a daemon of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.conftest import ARGS
from tests.support.vllm.judge import Judge
from tests.support.vllm.nodes import NodesEngine

pytestmark = pytest.mark.engine


class Nodes(NamedTuple):
    """Engines over the same two daemons, by node."""

    daemons: list[Daemon]
    a: NodesEngine


@pytest.fixture(scope="module")
def nodes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    with ExitStack() as ending:
        daemons = []
        for name in ("0", "1"):
            (folder / name).mkdir()
            daemons.append(ending.enter_context(running_daemon(folder / name)))
        sockets = [Path(daemon.socket) for daemon in daemons]
        engine = NodesEngine(model, folder / "a.log", sockets, args=ARGS, patient=True)
        ending.callback(engine.kill)
        engine.wait_ready()
        yield Nodes(daemons, engine)


def test_an_engine_over_two_nodes_runs_uncached_and_says_so_once(
    nodes: Nodes, judge: Judge
) -> None:
    tokens = [*range(10, 600)]
    for _ in range(2):
        answer = nodes.a.one(tokens)
        assert answer.cached == 0
        judge.check(tokens, answer)
        assert nodes.a.reset()
    said = [line for n in (0, 1) for line in nodes.a.log(n).splitlines() if "kvass is off" in line]
    reason = "an engine whose ranks are on several machines is not supported without "
    reason += "kvass.several_machines"
    assert sorted(line.partition("kvass is off")[2] for line in said) == [
        f" in this worker: {reason}",  # its first one
        f", the engine runs uncached: {reason}",
    ]
    assert [daemon.status()["rows"] for daemon in nodes.daemons] == [0, 0]
