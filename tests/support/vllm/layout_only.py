"""``HybridEngine`` over an engine that vLLM itself has set up, but whose model never computes.

It proves that our layout is vLLM's, also where this machine lacks the kernels of the model.
"""

from __future__ import annotations

from typing import Any

from tests.support.vllm import instruments
from tests.support.vllm.hybrid import HybridEngine, HybridRank
from tests.support.vllm.ranks import Ranks, synchronize, until
from tests.support.vllm.scheduler import SchedulerHarness


class _Rank(HybridRank):
    """The worker of a running engine, in this process."""

    def __init__(self, connector: Any) -> None:
        self.gate = None
        self.speculative = False
        self.connector = connector
        self._regions = instruments.regions(connector)

    def page(self, group: int, layer: int, block: int) -> Any:
        """See ``HybridRank.page``."""
        synchronize(self.connector)
        plane = self.copier._planes[group].planes[layer]
        at = plane.base + block * plane.block_stride
        return self._regions[plane.region][at : at + plane.run]


class LayoutEngine(HybridEngine):
    """``HybridEngine`` over the ``EngineCore`` of an engine with one rank."""

    def __init__(self, core: Any, connector: Any) -> None:
        self.world = SchedulerHarness.over(core.scheduler, core.request_block_hasher)
        setup = self.world.connector._planner._setup
        rank = _Rank(connector)
        self.shapes = [
            (one.kind, one.block_tokens, one.window_tokens, len(planes.planes))
            for one, planes in zip(setup.groups, rank.copier._planes, strict=True)
        ]
        self.ranks = Ranks([rank])
        self.loads: list[Any] = []
        self.found: dict[str, int] = {}
        self.daemon = None
        self.wrong = ""
        """The first wrong page that a request began with."""

    def verify(self, request: Any, tokens: int) -> None:
        """``HybridEngine.verify``, but a failure is kept in ``wrong`` and the engine continues."""
        try:
            super().verify(request, tokens)
        except AssertionError as error:
            self.wrong = self.wrong or str(error)

    def run(self, name: str, tokens: list[int]) -> int:
        """Run one request and its stores to the end; returns the tokens that it began with."""
        request = self.world.add(name, tokens, max_tokens=2)
        until(lambda: self.step() and request.is_finished(), "the request's end")
        until(lambda: self.step() and not self.world.scheduler.has_requests(), "its stores")
        return self.found[name]
