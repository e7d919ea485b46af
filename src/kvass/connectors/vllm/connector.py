"""``KvassConnector``, the class that vLLM loads: its hooks call the planner and the copier.

No exception of kvass reaches vLLM, except for options that cannot be used.

There is one object per role: in the scheduler's process it plans, in each worker's it copies. An
inert connector has neither half and answers every hook as if nothing were ever cached.
With ``kvass.blend`` the object is a ``BlendConnector``; without it nothing of blend is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvass.connectors.vllm import adapt, configuration, events, lora, rpcs, tiles
from kvass.connectors.vllm.adapt import StepMetadata, StepReport
from kvass.connectors.vllm.configuration import VllmSetup
from kvass.connectors.vllm.kv_caches import read_memory
from kvass.connectors.vllm.logs import log_as_vllm
from kvass.connectors.vllm.stats import PromMetrics, Stats
from kvass.engine.boundary import Boundary, log, log_off
from kvass.engine.copier import Copier
from kvass.engine.memory import KVMemory
from kvass.engine.planner import Planner
from kvass.engine.setup import Inert, log_naming
from kvass.errors import UsageError
from kvass.layout.spans import Table
from kvass.transfer.base import Mover

P = ParamSpec("P")
H = TypeVar("H")
R = TypeVar("R")


class KvassConnector(adapt.KVConnectorBase_V1, adapt.SupportsHMA):
    """Loads KV pages that any engine on this machine computed, and stores those this one computes.

    Raises :class:`kvass.errors.ConfigError` at start for an option that cannot be used.
    """

    _cache_hit_source = adapt.HIT_SOURCE
    _metadata = StepMetadata

    def __new__(cls, vllm_config: Any, role: Any, kv_cache_config: Any) -> KvassConnector:
        """With ``kvass.blend`` it is a ``BlendConnector``. Other subclasses stay what they are."""
        kind: type[KvassConnector] = cls
        if cls is KvassConnector and configuration.wants_blend(vllm_config):
            from kvass.connectors.vllm.blend_connector import BlendConnector

            kind = BlendConnector
        connector: KvassConnector = super().__new__(kind)
        return connector

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        log_as_vllm()
        self.boundary = self._boundary = Boundary()
        self._setup: VllmSetup | None = None
        self._planner: Planner | None = None
        self._copier: Copier | None = None
        self._handled: BaseException | None = None
        self._adapters = vllm_config.lora_config is not None
        plans = role == adapt.KVConnectorRole.SCHEDULER
        logs = plans or self._boundary.run(0, configuration.worker_rank, vllm_config) == 0
        setup = self._read(vllm_config, kv_cache_config)
        if isinstance(setup, Inert):
            if logs:
                log_off(setup.reason, plans)
            return
        self._setup = setup
        self._texts = adapt.hashed_texts(vllm_config)
        if plans:
            configuration.recompute_failed_loads(vllm_config)
            watched = self._boundary.run(False, self._watch, setup)
            maker = events.maker(vllm_config, kv_cache_config, setup)
            self._planner = Planner(setup, maker, watched=watched)
        else:
            self._copier = self._boundary.run(None, self._make_copier, setup, vllm_config)
        if logs and not setup.named:
            log_naming(setup.weights, plans)

    def _read(self, vllm_config: Any, kv_cache_config: Any) -> VllmSetup | Inert:
        try:
            return configuration.read_setup(vllm_config, kv_cache_config)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - a defect of kvass must not end the engine
            self._boundary.failed("read_setup", error)
            return Inert(f"reading the engine's configuration failed: {error}")

    def _watch(self, setup: VllmSetup) -> bool:
        """Hear of every call that may replace weights; whether they are replaced by these alone."""

        def noted(what: str, foreign: bool) -> None:
            self._run(self._planner, None, Planner.weights_may_change, what, foreign)

        if (core := rpcs.engine_core()) is None:
            return False
        rpcs.watch(core.model_executor, noted)
        return rpcs.owned(core, setup.identity.get("plugins", ""))

    def _make_copier(
        self,
        setup: VllmSetup,
        vllm_config: Any,
        make_mover: Callable[[KVMemory], Mover] | None = None,
    ) -> Copier:
        rank = configuration.worker_rank(vllm_config)
        held = lora.held_adapters(rank, self._boundary) if self._adapters else None
        if self._adapters and held is None:
            log.warning("LoRA adapters run uncached: what this worker holds cannot be read")
        return Copier(setup, rank, self._boundary, make_mover, held)

    def _run(
        self,
        half: H | None,
        miss: R,
        call: Callable[Concatenate[H, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """A method of the planner or the copier; ``miss`` if there is none, or it raises. As
        ``Boundary.run``, with a Python frame less: a step of an answer has a dozen of these."""
        if half is None:
            return miss
        try:
            return call(half, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a defect of kvass is a miss for the engine
            self._boundary.failed(getattr(call, "__name__", repr(call)), error)
            return miss

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The layout of the KV cache that the options ask for; vLLM warns if it cannot have it."""
        return configuration.wanted_layout(vllm_config)

    # ------------------------------------------------------------ statistics

    def get_kv_connector_stats(self) -> Stats | None:
        """What this half did since the last call; None: nothing. vLLM asks after each step."""
        half = self._planner or self._copier
        counts = {} if half is None else half.traffic.take()
        return Stats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """The object around what another process counted."""
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """kvass's part of vLLM's ``/metrics``."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ------------------------------------------------------------ scheduler side

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is a later miss, nothing more."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Called with the scheduler's block pool, once it exists."""

        def before_reset() -> None:
            self._run(self._planner, None, Planner.abandon_pending)

        def after_reset() -> None:
            self._run(self._planner, None, Planner.was_emptied)

        def bind(planner: Planner) -> None:
            planner.bind(adapt.VllmBlockPool(gpu_block_pool, before_reset, after_reset))

        self._run(self._planner, None, bind)

    def on_new_request(self, request: Any) -> None:
        """A request was added."""
        if self._setup is not None:
            self._track(adapt.VllmRequest(request, self._setup, self._texts))

    def _track(self, request: adapt.VllmRequest) -> None:
        self._run(self._planner, None, Planner.track, request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to load beyond the local hit (None: ask again); if any, asynchronously."""
        name = request.request_id
        tokens = self._run(self._planner, 0, Planner.match, name, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks; ``num_external_tokens`` of them are to be loaded."""
        table = self._boundary.run((), adapt.block_table, blocks) if num_external_tokens else ()
        self._allocated(request.request_id, table, num_external_tokens)

    def _allocated(self, name: str, table: Table, tokens: int) -> None:
        self._run(self._planner, None, Planner.allocated, name, table, tokens)
        if tokens:  # vLLM waits for it now, whether planning it succeeded or not
            self._run(self._planner, None, Planner.ensure_load, name)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The step's loads and stores, for the workers."""
        work = self._metadata()
        self._run(self._planner, None, plan, scheduler_output, work)
        if not self._run(self._planner, False, Planner.hand_over, work):
            self._run(self._planner, None, Planner.revoke, work)
        return work

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers reported."""
        report: StepReport | None = connector_output.kv_connector_worker_meta
        failed = connector_output.failed_recving or ()
        ended = connector_output.finished_recving or ()
        if report is not None and report.adapters:
            self._run(self._planner, None, Planner.adapters_held, report.adapters)
        if report is not None or failed or ended:
            steps = report.steps if report is not None else {}
            self._run(self._planner, None, Planner.reported, steps, failed, ended)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished_all_groups``, of a model with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once: those being stored are held."""
        self._run(self._planner, None, Planner.forget, request.request_id, block_ids)
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for a store would free blocks, so that nobody need be preempted."""
        return self._run(self._planner, False, Planner.frees_blocks)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping, to hear of stores in progress."""
        return self._run(self._planner, False, Planner.storing)

    def take_events(self) -> list[Any]:
        """What became of this engine's rows: vLLM publishes it with its own KV events."""
        if self._planner is None or self._planner.events is None:
            return []
        return self._run(self._planner, [], Planner.take_events)

    def reset_cache(self) -> bool | None:
        """Forget this namespace (the weights are about to change); False: a defect of kvass."""
        if self._planner is None:
            return None
        pausing = self._boundary.run(False, rpcs.pausing)
        return self._run(self._planner, False, Planner.clear, pausing)

    # ------------------------------------------------------------ worker side

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The worker's KV caches exist; without them every lookup stays a miss."""
        if self._setup is not None:
            self._run(self._copier, None, self._attach, self._setup, kv_caches)

    def _attach(self, copier: Copier, setup: VllmSetup, kv_caches: Mapping[str, Any]) -> None:
        copier.close()  # vLLM may register a second time, with other memory
        if not tiles.may_load(self._vllm_config.model_config.dtype):
            return
        config = self._kv_cache_config
        copier.attach(read_memory(config, kv_caches, setup.chunk_tokens, setup.groups))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """First hook of a step. Blocks that are being copied are held, so none is overwritten."""
        self._run(self._copier, None, Copier.catch_up)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin the step's loads. Both runners call this after they zeroed new blocks and before
        the forward pass. On a GPU a load does not wait for what is launched after it."""
        super().bind_connector_metadata(connector_metadata)
        self._handled = sys.exc_info()[1]
        self._run(self._copier, None, Copier.load, connector_metadata)

    def has_connector_metadata(self) -> bool:
        """Only attention layers ask: whether they are to call the two hooks below for themselves.
        Every load is asynchronous and whole chunks are stored after the forward pass."""
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to do: loads have begun. vLLM calls this after the forward pass was launched."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: no scheduled request waits for a load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do."""

    def wait_for_save(self) -> None:
        """Begin the step's stores. vLLM calls this also while an exception leaves the forward pass:
        then the blocks may hold anything."""
        self._run(
            self._copier, None, Copier.store, self._get_connector_metadata(), self._computed()
        )

    def _computed(self) -> bool:
        """Whether the step's forward pass did not raise. Its caller may be handling an exception of
        before."""
        return sys.exc_info()[1] is self._handled

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Loads that ended."""
        none: tuple[set[str], set[str]] = (set(), set())
        finished, failed = self._run(self._copier, none, Copier.results, self._computed())
        return adapt.KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> StepReport | None:
        """Steps whose stores have ended, and adapters that this rank holds since."""
        steps = self._run(self._copier, [], Copier.report)
        held = self._run(self._copier, {}, Copier.adapter_news) if self._adapters else {}
        return StepReport(dict.fromkeys(steps, 1), held) if steps or held else None

    def shutdown(self) -> None:
        """End copies and sessions, in this order."""
        if self._setup is not None:
            self._setup.weights.cancel()
        self._run(self._planner, None, Planner.close)
        self._run(self._copier, None, Copier.close)


def plan(planner: Planner, scheduler_output: Any, work: StepMetadata) -> None:
    planner.plan(adapt.VllmStep(scheduler_output), work)
