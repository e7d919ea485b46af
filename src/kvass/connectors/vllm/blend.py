"""``BlendScheduler``, vLLM's scheduler with blended requests (``--scheduler-cls``).

A file of vLLM's version (see ``adapt.py``). It overrides internals of vLLM's scheduler, so it works
with the versions in ``blend_setup.BLENDS`` only. Without ``kvass.blend`` it is vLLM's scheduler.

A blended request has its blocks up to the last segment when it is admitted, and waits there until
the segments are in place. Then it is computed run by run, a step for each: before a step its
``num_computed_tokens`` jumps over what need not be computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvass.connectors.vllm.blend_connector import BlendConnector
from kvass.connectors.vllm.blend_planner import BlendPlanner
from kvass.connectors.vllm.connector import KvassConnector
from kvass.errors import ConfigError


class BlendScheduler(Scheduler):
    """Raises ``ConfigError`` for an engine whose connector is not kvass alone."""

    blends = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.connector, KvassConnector):
            raise ConfigError("BlendScheduler needs kvass as the engine's only KV connector")
        self._boundary = self.connector.boundary
        blends = isinstance(self.connector, BlendConnector)
        self._blender = self.connector.blender if blends else None
        self._lost = WeakSet[Request]()
        """Planning them raised: they are computed on from where they are, without a jump."""
        if self._blender is not None:
            coordinator = self.kv_cache_manager.coordinator
            vars(coordinator)["cache_blocks"] = partial(self._cache, coordinator.cache_blocks)

    def _ask(
        self, call: Callable[..., int], request: Request, tokens: int, *more: object
    ) -> int | None:
        """The planner's answer. None: the request is lost."""
        if request in self._lost:
            return None
        answer = self._boundary.run(None, call, self._blender, request.request_id, tokens, *more)
        if answer is None:
            self._lost.add(request)
        return answer

    def _cache(self, cache: Callable[[Request, int], None], request: Request, tokens: int) -> None:
        """A request has ``tokens`` computed tokens: vLLM caches, and announces, those that are
        exact. Routers know blocks by their tokens."""
        cache(request, self._ask(BlendPlanner.cacheable, request, tokens) or 0)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """A step, in which blended requests go on behind what they need not compute."""
        if self._blender is not None:
            for request in self.running:
                computed = request.num_computed_tokens
                begin = self._ask(BlendPlanner.next_token, request, computed)
                if begin is not None:
                    _spare(request, begin - computed)
                    request.num_computed_tokens = begin
        return super().schedule(throttle_prefills)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """How many tokens a step computes of a request: no more than its run has."""
        tokens: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        if self._blender is None:
            return tokens
        limit = self._ask(BlendPlanner.limit, request, num_computed_tokens, tokens)
        return tokens if limit is None else limit

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        """A load ended: vLLM takes all up to the last segment for computed; it is not."""
        if self._blender is not None:
            failed, loaded = self.failed_recving_kv_req_ids, request.num_computed_tokens
            was_failed = request.request_id in failed
            begin = self._ask(BlendPlanner.loaded, request, loaded, was_failed)
            if begin is None:  # nobody knows what was loaded: vLLM computes it, and asks no more
                request.num_computed_tokens = 0
                request.skip_reading_prefix_cache = True
                failed.add(request.request_id)
            elif begin != loaded:
                _spare(request, begin - loaded)
                request.num_computed_tokens = begin
                if begin == 0:  # vLLM would take it for a new one and look for cached blocks
                    request.skip_reading_prefix_cache = True
        super()._update_waiting_for_remote_kv(request)


def _spare(request: Request, tokens: int) -> None:
    """``tokens`` of a prompt, or fewer if it is negative, come from the cache."""
    if tokens and (stats := request.prefill_stats) is not None and not request.num_preemptions:
        local, external = stats.num_local_cached_tokens, stats.num_external_cached_tokens
        stats.set(stats.num_prompt_tokens, local, external + tokens)
