"""``BlendConnector``, the connector that also loads segments: vLLM gets it with ``kvass.blend``.

A file of vLLM's version (see ``adapt.py``). It is imported only if blend is on. The base class
``Connector`` handles requests without segments. Each hook here adds what segments need. The
scheduler's connector has a ``BlendPlanner``, a worker's has a ``Placer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvass.connectors.vllm import adapt
from kvass.connectors.vllm.adapt import StepMetadata
from kvass.connectors.vllm.blend_pages import Placement, Placer
from kvass.connectors.vllm.blend_planner import BlendPlanner
from kvass.connectors.vllm.connector import Connector
from kvass.engine.observers import Observer
from kvass.engine.planner import Planner
from kvass.layout.spans import Table


@dataclass
class BlendMetadata(StepMetadata):
    """A step's loads and stores with its segments. ``placements``: the segments to place once they
    are loaded. ``replaced``: the requests whose K and V are replaced in this step
    (``blend_oracle.py``)."""

    placements: list[Placement] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)


class BlendConnector(Connector):
    """vLLM's connector with blend. Raises :class:`kvass.errors.ConfigError` at start for an engine
    that blend does not support."""

    _metadata = BlendMetadata

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.blender: BlendPlanner | None = None
        self._placer: Placer | None = None

    # ------------------------------------------------------------ scheduler side

    def _observers(self, planner: Planner) -> tuple[Observer, ...]:
        assert self._setup is not None
        assert self._setup.blend is not None
        self.blender = BlendPlanner(self._setup, planner, self._setup.blend)
        return (self.blender.index,)

    def _track(self, request: adapt.VllmRequest) -> None:
        super()._track(request)
        self._run(self.blender, None, BlendPlanner.track, request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The base class's result. With segments, the load reaches to the end of the last one."""
        name = request.request_id
        tokens = self._run(self.blender, 0, BlendPlanner.match, name, num_computed_tokens)
        return tokens, bool(tokens)

    def _allocated(self, name: str, table: Table, tokens: int) -> None:
        left = self._run(self.blender, tokens, BlendPlanner.allocated, name, table, tokens)
        super()._allocated(name, table, left)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The base class's metadata with the segments to place."""
        work = super().build_connector_meta(scheduler_output)
        assert isinstance(work, BlendMetadata)
        work.placements = self._run(self.blender, [], BlendPlanner.take_placements)
        scheduled = scheduler_output.num_scheduled_tokens
        work.replaced = self._run(self.blender, [], BlendPlanner.replaced, scheduled)
        return work

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request, as in the base class."""
        answer = super().request_finished_all_groups(request, block_ids)
        self._run(self.blender, None, BlendPlanner.forget, request.request_id)
        return answer

    # ------------------------------------------------------------ worker side

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Measure the layout of the pages and the rotation of K, then attach the copier."""
        if self._setup is not None and self._copier is not None:
            block = self._setup.hash_tokens
            self._placer = Placer(self._vllm_config, kv_caches, block, self._boundary)
        super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin the step's loads, and prepare the placer for the step."""
        super().bind_connector_metadata(connector_metadata)
        if self._placer is not None:
            self._placer.expect(connector_metadata.placements)
            self._boundary.run(None, self._placer.oracle.begin, connector_metadata.replaced)

    def has_connector_metadata(self) -> bool:
        """Whether attention layers must call ``wait_for_layer_load``."""
        return self._placer is not None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """With ``kvass.blend_oracle``, replace this layer's K and V before attention."""
        if self._placer is not None:
            self._boundary.run(None, self._placer.oracle.replace, layer_name)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The requests whose loads have ended. If all loads of a request have ended, its segments
        are placed first."""
        results = super().get_transfer_results(finished_req_ids)
        if self._placer is None:
            return results
        finished, failed = self._placer.place_loaded(
            results.finished_recving, results.failed_recving
        )
        self._placer.oracle.forget(finished_req_ids)
        return adapt.KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)
