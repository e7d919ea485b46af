"""``BlendScheduler``, a subclass of vLLM's scheduler that computes blended requests.

A file of vLLM's version (see ``adapt.py``). The option ``--scheduler-cls`` selects the class. It
overrides internals of vLLM's scheduler, so it works only with the versions in
``blend_setup.BLENDS``. Without ``kvass.blend`` it behaves like vLLM's scheduler.

When a blended request is admitted it gets its blocks up to the end of the last segment. It waits
until the segments are in these blocks. Then vLLM computes the tokens that blend does not take from
segments. They form runs of consecutive tokens, and a step computes tokens of one run at most.
Before a step, this class raises the request's ``num_computed_tokens`` to the start of the next run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvass.connectors.vllm import borrowed
from kvass.connectors.vllm.blend_connector import BlendConnector
from kvass.connectors.vllm.blend_planner import BlendPlanner
from kvass.connectors.vllm.connector import Connector
from kvass.errors import ConfigError


class BlendScheduler(Scheduler):
    """vLLM's scheduler with blended requests. Raises ``ConfigError`` if kvass is not the engine's
    only KV connector."""

    blends = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.connector, Connector):
            raise ConfigError("BlendScheduler needs kvass as the engine's only KV connector")
        self._boundary = self.connector.boundary
        blends = isinstance(self.connector, BlendConnector)
        self._blender = self.connector.blender if blends else None
        self._unplanned = WeakSet[Request]()
        """Requests for which the planner raised. Their remaining tokens are all computed."""
        if self._blender is not None:
            borrowed.replace_cache_blocks(self.kv_cache_manager.coordinator, self._cache_exact)

    def _call_planner(
        self, call: Callable[..., int], request: Request, tokens: int, *more: object
    ) -> int | None:
        """The planner's result for ``request``, or None if the planner raised now or before."""
        if request in self._unplanned:
            return None
        answer = self._boundary.run(None, call, self._blender, request.request_id, tokens, *more)
        if answer is None:
            self._unplanned.add(request)
        return answer

    def _cache_exact(
        self, cache_blocks: Callable[[Request, int], None], request: Request, tokens: int
    ) -> None:
        """Cache the blocks of those of the first ``tokens`` tokens that have exact KV.

        It replaces vLLM's ``cache_blocks``, which also announces the blocks. Blocks with
        approximate KV must not be announced, because a router assumes that a block's KV follows
        from its tokens.
        """
        cache_blocks(request, self._call_planner(BlendPlanner.cacheable, request, tokens) or 0)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """vLLM's output for a step. Blended requests skip the tokens that they need not compute."""
        if self._blender is not None:
            for request in self.running:
                computed = request.num_computed_tokens
                begin = self._call_planner(BlendPlanner.next_token, request, computed)
                if begin is not None:
                    _add_cached_tokens(request, begin - computed)
                    request.num_computed_tokens = begin
        return super().schedule(throttle_prefills)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """The number of tokens of a request that a step computes: at most the rest of its run."""
        tokens: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        if self._blender is None:
            return tokens
        limit = self._call_planner(BlendPlanner.limit, request, num_computed_tokens, tokens)
        return tokens if limit is None else limit

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        """Set the request's computed tokens after its load has ended. vLLM assumes that all tokens
        up to the end of the last segment are computed, but the runs among them are not."""
        if self._blender is not None:
            failed, loaded = self.failed_recving_kv_req_ids, request.num_computed_tokens
            was_failed = request.request_id in failed
            begin = self._call_planner(BlendPlanner.loaded, request, loaded, was_failed)
            if begin is None:  # the planner raised: vLLM computes the whole prompt
                request.num_computed_tokens = 0
                request.skip_reading_prefix_cache = True
                failed.add(request.request_id)
            elif begin != loaded:
                _add_cached_tokens(request, begin - loaded)
                request.num_computed_tokens = begin
                if begin == 0:  # else vLLM treats the request as new and looks for cached blocks
                    request.skip_reading_prefix_cache = True
        super()._update_waiting_for_remote_kv(request)


def _add_cached_tokens(request: Request, tokens: int) -> None:
    """Add ``tokens``, which may be negative, to vLLM's count of externally cached tokens."""
    if tokens and (stats := request.prefill_stats) is not None and not request.num_preemptions:
        local, external = stats.num_local_cached_tokens, stats.num_external_cached_tokens
        stats.set(stats.num_prompt_tokens, local, external + tokens)
