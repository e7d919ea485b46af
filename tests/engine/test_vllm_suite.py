"""The connector of vLLM passes ``ConnectorSuite``: vLLM's real scheduler, the connector's scheduler
and worker sides, real copies. Only the forward pass is a stub."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from kvass.testing import ConnectorSuite, EngineUnderTest, RunResult
from kvass.testing.connector_suite import MakeEngine
from tests.support.vllm.ranks import StubModelEngine, until
from tests.support.vllm.scheduler import CHUNK

WAIT_S = 2.0
"""How long a step waits for the daemon: longer than in an engine, because late answers are misses,
and well below the bound of a prompt in the suite."""


class Stubbed(EngineUnderTest):
    """An answer is all KV pages of the prompt. vLLM's own cache keeps none of them."""

    chunk_tokens = CHUNK

    def __init__(self, socket: str, weights: str, layout: str = "1", tenant: str = "") -> None:
        extra: dict[str, object] = {"kvass.model_id": weights, "kvass.fixed_weights": False}
        chunk = CHUNK if layout == "1" else 2 * CHUNK
        self.engine = StubModelEngine(socket, chunk=chunk, more=extra, weights=weights)
        client = self.engine.client
        client._reserve_wait_s = client.step.wait_s = client.step.left_s = WAIT_S
        self._params = {"kvass.tenant": tenant} if tenant else None
        self._names = map(str, itertools.count())

    def run(self, prompt: list[int]) -> RunResult:
        engine, world = self.engine, self.engine.world
        name = next(self._names)
        request = world.add(name, prompt, max_tokens=1, params=self._params)
        scheduled: Mapping[str, int] = {}
        pages: list[bytes] = []

        def computed() -> bool:
            nonlocal scheduled
            output, work = world.schedule()
            scheduled = output.num_scheduled_tokens
            if name in scheduled:
                engine.compute(name, scheduled[name])
                table = engine.tables(name)[0][: len(prompt) // world.hash_tokens]
                page = engine.rank.page
                pages.extend(page(0, i, id_).tobytes() for id_ in table for i in range(2))
            engine.run_ranks(output, work)
            return name in scheduled

        until(computed, "the prompt's tokens")
        assert request.is_finished()
        self._drain()
        return RunResult((engine.weights, pages), len(prompt) - scheduled[name])

    def _drain(self) -> None:
        """Let all stores end, and empty vLLM's own cache without a reset."""
        engine, world = self.engine, self.engine.world
        until(lambda: engine.step() and not world.scheduler.has_requests(), "the stores")
        world.pool.evict_blocks(set(range(1, len(world.pool.blocks))))

    def abort(self, prompt: list[int]) -> None:
        name = next(self._names)
        self.engine.world.add(name, prompt, max_tokens=4, params=self._params)
        self.engine.step()
        self.engine.world.abort(name)
        self._drain()

    def wait_connected(self) -> None:
        self.engine.wait_connected()

    def clear(self) -> None:
        assert self.engine.world.scheduler.reset_prefix_cache(reset_connector=True)

    def replace_weights(self, weights: str) -> None:
        """vLLM's cache is reset afterwards."""
        self.engine.weights = weights
        assert self.engine.world.scheduler.reset_prefix_cache()

    def close(self) -> None:
        self.engine.close()


class TestVllm(ConnectorSuite):
    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        return Stubbed
