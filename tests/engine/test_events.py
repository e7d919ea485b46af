"""KV events of a real engine: what a router learns of its rows in kvass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from examples.router import Router, Subscriber
from kvass import Client
from kvass.messages import Clear
from kvass.testing.daemon import Daemon
from tests.engine.conftest import BLOCK, event_endpoints, store
from tests.support.vllm.process import EngineProcess
from tests.support.waiting import eventually

pytestmark = pytest.mark.engine


def test_a_router_follows_a_real_engine(
    a: EngineProcess, daemon: Daemon, prompt: Callable[[int], list[int]]
) -> None:
    tokens = prompt(800)
    a.one(tokens)
    router = Subscriber(*event_endpoints(daemon).values())

    def cached(medium: str, tokens: list[int] = tokens) -> int:
        router.poll()
        return router.index.cached(tokens, [medium])

    assert eventually(lambda: cached("CPU") == 768)
    assert cached("GPU") == 800 // BLOCK * BLOCK
    assert Router([router.index]).choose(tokens[:300]) == (0, 288)
    assert a.reset()  # vLLM says that all is cleared, and a load tells again what kvass has
    other = prompt(300)
    a.one(other)
    assert eventually(lambda: cached("CPU", other) == 256)
    assert cached("GPU") == cached("CPU") == 0
    assert a.one(tokens).external == 768
    assert eventually(lambda: cached("CPU") == 768)
    with Client(daemon.socket) as client:
        client.call(Clear(everything=True))
    store(a, prompt(300))
    assert eventually(lambda: cached("CPU") == 0)
    assert router.gaps == 0
    router.close()
