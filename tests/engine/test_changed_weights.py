"""A served engine whose weights are replaced by a call: it finds what it stored after a reset, and
never what old weights computed. The judge is an engine without kvass that is told the same.

Code in the engine's own process, which needs no call, is in ``test_engines_come_and_go.py``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvass.testing.daemon import Daemon
from tests.engine.conftest import ARGS
from tests.support.vllm.models import TINY, write_model
from tests.support.vllm.process import ServedEngine

pytestmark = pytest.mark.engine

Make = Callable[[int], list[int]]
WHOLE: Final = 512
"""Tokens of a prompt of 520 that are in whole blocks."""
UNI: Final[dict[str, Any]] = {**ARGS, "distributed_executor_backend": "uni"}
"""Core and worker in one process, as an engine of one GPU has them."""


class Both:
    """The same calls to an engine with kvass and to one without; answers must be equal."""

    def __init__(self, ours: ServedEngine, plain: ServedEngine, folders: list[Path]) -> None:
        self.ours, self._plain, self._folders = ours, plain, folders

    def run(self, tokens: list[int]) -> tuple[list[int], int]:
        """The answer, and how many tokens kvass loaded for it."""
        (answer, found), (same, local) = self.ours.run(tokens), self._plain.run(tokens)
        assert answer == same
        return answer, found - local

    def tell(self, op: str) -> None:
        """One call to each. An update takes the weights of the other folder."""
        fields = {}
        if op == "update":
            self._folders.reverse()
            fields["folder"] = str(self._folders[0])
        self.ours.served(op, **fields)
        self._plain.served(op, **fields)

    def store(self, tokens: list[int]) -> list[int]:
        """Run ``tokens`` until kvass has them, and vLLM's own cache does not; the answer."""
        for _ in range(20):
            answer, loaded = self.run(tokens)
            self.tell("reset")
            if loaded == WHOLE:
                return answer
        raise AssertionError("never found after a reset")


@pytest.fixture(scope="module")
def both(daemon: Daemon, model: Path, folder: Path) -> Iterator[Both]:
    other = folder / "other weights"
    shutil.copytree(model, other)
    write_model(other, TINY, seed=1)
    options = {"kvass.fixed_weights": False, "kvass.tag": "changes"}  # the first is the default
    log, plain_log = folder / "served.log", folder / "plain-served.log"
    ours = ServedEngine(model, log, socket=Path(daemon.socket), options=options, args=UNI)
    plain = ServedEngine(model, plain_log, args=UNI)
    yield Both(ours, plain, [model, other])
    ours.kill()
    plain.kill()


def test_a_reset_or_a_pause_alone_costs_nothing(both: Both, prompt: Make) -> None:
    tokens = prompt(520)
    both.store(tokens)
    for ops in (("reset",), ("pause", "resume"), ("reset",)):
        assert both.run(tokens)[1] == WHOLE
        for op in ops:
            both.tell(op)


@pytest.mark.parametrize(
    "order",
    [
        "update, reset",
        pytest.param("reset, update", marks=pytest.mark.slow),
        pytest.param("pause, update", marks=pytest.mark.slow),
        "update",
    ],
)
def test_nothing_of_old_weights_is_found(both: Both, prompt: Make, order: str) -> None:
    tokens, other = prompt(520), prompt(300)
    old = both.store(tokens)
    both.run(other)
    for op in order.split(", "):
        both.tell(op)
    if "pause" in order:
        both.tell("resume")
    new, loaded = both.run(tokens)
    assert loaded == 0
    assert new != old or order == "update", "there the blocks of before are vLLM's own"
    assert both.run([*other, *tokens])[1] == 0
    both.tell("reset")
    kept = 0 if order == "update" else 800  # what was computed with blocks of before is not stored
    assert both.run([*other, *tokens])[1] in (0, kept)
    both.store(tokens)
    assert both.run(tokens)[1] == WHOLE


def test_after_a_function_ran_in_a_worker_every_reset_counts(both: Both, prompt: Make) -> None:
    """The last one: what it left behind there is not known."""
    tokens = prompt(520)
    old = both.store(tokens)
    for engine in (both.ours, both._plain):
        engine.served("update_by_function", by=1)
    both.tell("reset")
    new, loaded = both.run(tokens)
    assert loaded == 0
    assert new != old
    both.tell("reset")
    assert both.run(tokens) == (new, 0)
