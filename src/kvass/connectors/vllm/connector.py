"""The class that vLLM loads. Law of this file: it delegates, and nothing that raises gets past it.

One object per role: in the scheduler's process it plans, in each worker's it copies. An inert
connector has neither side and answers every hook as if nothing were ever cached.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from kvass.client.scheduler import SchedulerClient
from kvass.connectors.vllm import adapt, engine
from kvass.connectors.vllm.metadata import StepReport, StepWork
from kvass.connectors.vllm.scheduler import SchedulerSide
from kvass.connectors.vllm.worker import WorkerSide
from kvass.engine.boundary import Boundary, log
from kvass.errors import UsageError


class KvassConnector(adapt.KVConnectorBase_V1, adapt.SupportsHMA):
    """Loads KV pages that any engine on this machine computed, and stores those this one computes.

    Raises :class:`kvass.errors.ConfigError` at start for an option that cannot be used.
    """

    _cache_hit_source = adapt.HIT_SOURCE

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._boundary = Boundary()
        self._planner: SchedulerSide | None = None
        self._copier: WorkerSide | None = None
        self._weights: Future[str] | None = None
        plans = role == adapt.KVConnectorRole.SCHEDULER
        says = plans or self._boundary.run(0, engine.worker_rank, vllm_config) == 0
        setup = self._read(vllm_config, kv_cache_config)
        if isinstance(setup, engine.Inert):
            if says:
                _off(plans, setup.reason)
            return
        self._weights = setup.weights
        if plans:
            engine.recompute_failed_loads(vllm_config)
            readers, spare = setup.strategy.readers, setup.spare
            client = SchedulerClient(
                setup.socket, setup.register(), readers=readers, spare=spare, incomplete=True
            )
            setup.when_named(client.complete)
            self._planner = SchedulerSide(setup, client)
        else:
            self._copier = self._boundary.run(None, self._copies, setup, vllm_config)
        if says and not setup.named:
            _tell(plans, setup.weights)

    def _read(self, vllm_config: Any, kv_cache_config: Any) -> engine.Setup | engine.Inert:
        try:
            return engine.read_setup(vllm_config, kv_cache_config)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - the connector boundary: no engine dies of us
            self._boundary.failed("read_setup", error)
            return engine.Inert(f"reading the engine's configuration failed: {error}")

    def _copies(self, setup: engine.Setup, vllm_config: Any) -> WorkerSide:
        return WorkerSide(setup, engine.worker_rank(vllm_config), self._boundary)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The layout of the KV cache that the options ask for; vLLM warns if it cannot have it."""
        return engine.wanted_layout(vllm_config)

    # ------------------------------------------------------------ scheduler side

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is a later miss, nothing more."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Called with the scheduler's block pool, once it exists."""
        if self._planner is not None:
            self._boundary.run(None, self._planner.bind, gpu_block_pool, self._boundary)

    def on_new_request(self, request: Any) -> None:
        """A request was added."""
        if self._planner is not None:
            self._boundary.run(None, self._planner.track, request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to load beyond the local hit (None: ask again); if any, asynchronously."""
        if self._planner is None:
            return 0, False
        tokens = self._boundary.run(0, self._planner.match, request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks; ``num_external_tokens`` of them are to be loaded."""
        if self._planner is None:
            return
        name = request.request_id
        self._boundary.run(None, self._planner.allocated, name, blocks, num_external_tokens)
        if num_external_tokens:  # vLLM waits for it now, whether planning it succeeded or not
            self._boundary.run(None, self._planner.ensure_load, name)

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        """The step's loads and stores, for the workers."""
        if self._planner is None:
            return StepWork()
        work = self._boundary.run(StepWork(), self._planner.take_loads)
        self._boundary.run(None, self._planner.plan_stores, scheduler_output, work)
        if not self._boundary.run(False, self._planner.hand_over, work):
            self._boundary.run(None, self._planner.revoke, work)
        return work

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers reported."""
        if self._planner is not None:
            report = connector_output.kv_connector_worker_meta
            failed = connector_output.failed_recving or ()
            self._boundary.run(None, self._planner.settled, report, failed)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once: those being stored are held by the pool."""
        if self._planner is not None:
            self._boundary.run(None, self._planner.forget, request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``, whatever the number of groups."""
        return self.request_finished(request, [])

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for a store would free blocks, so that nobody need be preempted."""
        return self._planner is not None and self._boundary.run(False, self._planner.frees_blocks)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping, to hear of stores in progress."""
        return self._planner is not None and self._boundary.run(False, self._planner.storing)

    def reset_cache(self) -> bool | None:
        """Forget this namespace (the weights are about to change); False: a defect of ours."""
        if self._planner is None:
            return None
        return self._boundary.run(False, self._planner.clear)

    # ------------------------------------------------------------ worker side

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The worker's KV caches exist; without them every lookup stays a miss."""
        if self._copier is not None:
            self._boundary.run(None, self._copier.attach, self._kv_cache_config, kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """First hook of a step. Blocks that are being copied are held, so none is overwritten."""
        if self._copier is not None:
            self._boundary.run(None, self._copier.catch_up)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        if self._copier is not None:
            self._boundary.run(None, self._copier.load, self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: every load is asynchronous, and no scheduled request waits for one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: whole chunks are stored after the forward pass."""

    def wait_for_save(self) -> None:
        """Begin the step's stores; they end in the background, from blocks that are held.

        vLLM comes here on the way out of a forward pass that raised, too, and then the blocks hold
        anything.
        """
        if self._copier is not None:
            work = self._get_connector_metadata()
            self._boundary.run(None, self._copier.store, work, not _raising())

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Loads that ended. Stores are reported by step (``build_connector_worker_meta``)."""
        none: tuple[set[str], set[str]] = (set(), set())
        finished, failed = none
        if self._copier is not None:
            finished, failed = self._boundary.run(none, self._copier.results, not _raising())
        return adapt.KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> StepReport | None:
        """Steps whose stores are settled."""
        return self._boundary.run(None, self._copier.report) if self._copier is not None else None

    def shutdown(self) -> None:
        """End copies and sessions, in this order."""
        if self._weights is not None:
            self._weights.cancel()
        for side in (self._planner, self._copier):
            if side is not None:
                self._boundary.run(None, side.close)


def _off(plans: bool, reason: object) -> None:
    """One line for the engine, or for a worker that knows more than its scheduler: of layers of
    several kinds that sees the first."""
    if plans:
        log.error("kvass is off, the engine runs uncached: %s", reason)
    else:
        log.warning("kvass is off in this worker: %s", reason)


def _tell(plans: bool, weights: Future[str]) -> None:
    """Say when the weights' name is known, or why it will not be."""
    began_s = time.monotonic()

    def named(name: Future[str]) -> None:
        if name.cancelled():
            return
        if (error := name.exception()) is not None:
            _off(plans, error)
        elif plans:
            seconds = time.monotonic() - began_s
            log.warning("the weight files are read after %.0f s: caching begins", seconds)

    if plans:
        log.warning("the weight files are being read to name them by content; uncached until then")
    weights.add_done_callback(named)


def _raising() -> bool:
    """Whether this hook is called on the way out of something that raised."""
    return sys.exc_info()[0] is not None
