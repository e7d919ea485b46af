"""An engine whose ranks reach several daemons: vLLM's scheduler, real daemons, no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from kvass.client.parallel import ParallelStrategy
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.vllm.nodes_ranks import NodesEngine
from tests.support.vllm.ranks import making
from tests.support.vllm.scheduler import CHUNK

PROMPT: Final = list(range(100))
CHUNKS: Final = len(PROMPT) // CHUNK
DENSE: Final = ParallelStrategy(tp=2)
MLA: Final = ParallelStrategy(tp=2, replicas=2)

Make = Callable[..., NodesEngine]


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list[Daemon]]:
    with ExitStack() as stack:
        made = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            made.append(stack.enter_context(running_daemon(tmp_path / name)))
        yield made


@pytest.fixture
def engine(daemons: list[Daemon]) -> Iterator[Make]:
    def make(strategy: ParallelStrategy, where: tuple[int, ...], **options: Any) -> NodesEngine:
        return NodesEngine(daemons, where, strategy, **options)

    with making(make) as made:
        yield made


@pytest.mark.parametrize("strategy", [DENSE, MLA], ids=["dense", "mla"])
def test_a_second_engine_hits_what_the_first_one_stored_on_two_nodes(
    engine: Make, daemons: list[Daemon], strategy: ParallelStrategy
) -> None:
    first = engine(strategy, (0, 1))
    first.generate("a", PROMPT)
    second = engine(strategy, (0, 1))
    _, found = second.load("b", PROMPT)
    assert found == CHUNKS * CHUNK
    assert [daemon.status()["rows"] for daemon in daemons] == [CHUNKS, CHUNKS]
