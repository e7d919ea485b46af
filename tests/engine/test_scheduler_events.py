"""KV events: a router's index, built by vLLM's publisher and a ZMQ subscriber, and the daemon.

vLLM's real schedulers, real ranks' copies and a real daemon; no model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.router import Subscriber
from kvass.connectors.vllm.events import VllmEvents
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.vllm.ranks import StubModelEngine, until
from tests.support.vllm.scheduler import BLOCK, CHUNK

ROW = 2 * 2 * 4096
"""Bytes of a row: two blocks of two layers."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """With room for 32 rows."""
    with running_daemon(tmp_path, l1_size=str(64 * ROW)) as one:
        yield one


class Engine(StubModelEngine):
    """An engine, and a router that listens to it."""

    def __init__(self, daemon: Daemon, name: str, **events: Any) -> None:
        self.endpoints = [f"ipc://{Path(daemon.socket).parent}/{name}-{n}" for n in (1, 2)]
        settings = {"endpoint": self.endpoints[0], "replay_endpoint": self.endpoints[1]}
        super().__init__(daemon.socket, daemon, kv_events={**settings, **events})
        self.wait_connected()
        self.router = Subscriber(*self.endpoints)

    def settle(self, condition: Callable[[], bool], what: str) -> None:
        """Step as an engine that has something to do, until the router's index is right."""
        until(lambda: self.step() and not self.router.poll() and condition(), what)

    def rows(self) -> int:
        """Rows of kvass that the router knows of."""
        held = self.router.index.held.values()
        blocks = sum(medium == "CPU" for media in held for medium, _ in media)
        assert blocks % 2 == 0
        return blocks // 2

    def close(self) -> None:
        self.router.close()
        super().close()


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(name: str = "a", **events: Any) -> Engine:
        made.append(Engine(daemon, name, **events))
        return made[-1]

    yield make
    for one in made:
        one.close()


def prompt(number: int, tokens: int = 100) -> list[int]:
    """All prompts whose numbers are equal modulo 3 share two chunks."""
    shared = random.Random(number % 3).choices(range(1000), k=2 * CHUNK)
    return (shared + random.Random(1000 + number).choices(range(1000), k=tokens))[:tokens]


def agrees(one: Engine, daemon: Daemon, prompts: list[list[int]]) -> bool:
    """Whether the router's index has as many rows as the daemon, and the same prefixes."""
    client, pool = one.client, one.world
    if one.rows() != daemon.status()["rows"]:
        return False
    for number, tokens in enumerate(prompts):
        hashes = pool._hasher(pool_request(tokens))[CHUNK // BLOCK - 1 :: CHUNK // BLOCK]
        found = client.match(f"look {number}", b"".join(hashes), 32, 0)
        client.settle(f"look {number}")
        if one.router.index.cached(tokens, ["CPU"]) != (found.chunks if found else 0) * CHUNK:
            return False
    return True


def pool_request(tokens: list[int]) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request("look", tokens, SamplingParams(max_tokens=1), None)


def churn(one: Engine, numbers: range) -> list[list[int]]:
    prompts = [prompt(number) for number in numbers]
    for number, tokens in zip(numbers, prompts, strict=True):
        one.generate(f"{number}", tokens)
    return prompts


def test_the_index_agrees_with_the_daemon_after_churn(daemon: Daemon, engine: Any) -> None:
    a = engine()
    prompts = churn(a, range(40))
    a.settle(lambda: agrees(a, daemon, prompts), "the index is right")
    status = daemon.status()
    assert status["counters"]["evicted_capacity"] > 10
    assert status["rows"] > 10
    assert a.router.gaps == 0


def test_a_removal_that_is_not_told_is_seen(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    real, dropped = VllmEvents.removed, []

    def one_less(self: VllmEvents, group: int, rows: list[bytes]) -> Any:
        if not dropped:
            dropped.append(rows.pop())
        return real(self, group, rows)

    monkeypatch.setattr(VllmEvents, "removed", one_less)
    a = engine()
    prompts = churn(a, range(40))
    with pytest.raises(AssertionError, match="in vain"):
        a.settle(lambda: agrees(a, daemon, prompts), "the index is right")
    assert dropped


def test_after_a_restart_of_the_daemon_nothing_of_before_is_left(
    daemon: Daemon, engine: Any
) -> None:
    a = engine()
    before = churn(a, range(4))
    a.settle(lambda: agrees(a, daemon, before), "the index is right")
    assert a.rows() > 4
    daemon.restart()
    a.wait_connected()
    a.settle(lambda: a.rows() == 0, "the rows were withdrawn")
    after = churn(a, range(10, 14))
    a.settle(lambda: agrees(a, daemon, before + after), "the index is right")
