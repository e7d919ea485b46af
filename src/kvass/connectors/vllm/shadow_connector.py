"""``ShadowConnector``, the connector that gives vLLM no hits: vLLM gets it with ``kvass.shadow``.

A file of vLLM's version (see ``adapt.py``). It is imported only in shadow mode. The base class
stores. ``engine/shadow.py`` looks up and plans what a worker's ``engine/comparer.py`` loads into
scratch memory and compares.

Law of this file: vLLM computes every token that it would compute without kvass.
"""

from __future__ import annotations

from typing import Any

from kvass.connectors.vllm import adapt
from kvass.connectors.vllm.adapt import StepMetadata, StepReport
from kvass.connectors.vllm.connector import Connector
from kvass.engine.boundary import log
from kvass.engine.observers import Observer
from kvass.engine.planner import Planner
from kvass.engine.shadow import Shadow
from kvass.engine.step_work import StepWork
from kvass.layout.spans import Table


class ShadowConnector(Connector):
    _shadows = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.shadow: Shadow | None = None

    def _observers(self, planner: Planner) -> tuple[Observer, ...]:
        assert self._setup is not None
        self.shadow = Shadow(self._setup, planner)
        log.warning(
            "shadow mode: kvass loads and compares %g %% of its hits, and vLLM computes every "
            "token itself",
            100 * self._setup.shadow,
        )
        return (self.shadow.lookups,)

    def _track(self, request: adapt.VllmRequest) -> None:
        super()._track(request)
        self._run(self.shadow, None, Shadow.track, request.name)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look up the request. The answer is always that nothing is to be loaded."""
        self._run(self.shadow, None, Shadow.match, request.request_id, num_computed_tokens)
        return 0, False

    def _allocated(self, name: str, table: Table, tokens: int) -> None:
        self._run(self.shadow, None, Shadow.allocated, name)

    def _plan(self, scheduler_output: Any, work: StepMetadata) -> None:
        super()._plan(scheduler_output, work)
        self._run(self.shadow, None, plan, scheduler_output, work)

    def update_connector_output(self, connector_output: Any) -> None:
        """Pass the workers' reports to the planner, and the results of comparisons to shadow
        mode."""
        super().update_connector_output(connector_output)
        report: StepReport | None = connector_output.kv_connector_worker_meta
        # Also without results: the engine makes no more steps once its last store is reported.
        self._run(self.shadow, None, Shadow.compared, () if report is None else report.compared)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request, as in the base class."""
        self._run(self.shadow, None, Shadow.forget, request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def shutdown(self) -> None:
        """Log the figures, and end as the base class."""
        self._run(self.shadow, None, Shadow.close)
        super().shutdown()


def plan(shadow: Shadow, scheduler_output: Any, work: StepWork) -> None:
    """Add the checks of vLLM's step to ``work``."""
    shadow.plan(adapt.VllmStep(scheduler_output), work)
