"""``Connector``, the connector that loads prefixes: its hooks call the planner and the copier.

Law of this file: no exception of kvass reaches vLLM, except a ``ConfigError`` for unusable options,
and one in taking back a step whose load failed: an engine that went on would give wrong tokens.

vLLM makes one connector in the scheduler's process and one in each worker's. The scheduler's
connector has a ``Planner``, a worker's has a ``Copier``. An inert connector has neither and answers
every hook as if nothing were ever cached. ``entry.py`` has the class that vLLM loads.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvass.connectors.vllm import (
    adapt,
    bad_blocks,
    borrowed,
    configuration,
    content,
    events,
    lora,
    rest,
    rpcs,
    tiles,
)
from kvass.connectors.vllm.adapt import StepMetadata, StepReport
from kvass.connectors.vllm.configuration import VllmSetup
from kvass.connectors.vllm.hints import read_hints
from kvass.connectors.vllm.kv_caches import read_memory
from kvass.connectors.vllm.logs import log_as_vllm
from kvass.connectors.vllm.operations import vllm_operations
from kvass.connectors.vllm.stats import PromMetrics, Stats
from kvass.engine.boundary import Boundary, log, log_off
from kvass.engine.copier import Copier
from kvass.engine.memory import MakeMover, open_mover
from kvass.engine.observers import Observer
from kvass.engine.planner import Planner
from kvass.engine.row_events import EventMaker
from kvass.engine.setup import Inert, log_naming
from kvass.errors import ConfigError, UsageError
from kvass.layout.spans import Table

P = ParamSpec("P")
H = TypeVar("H")
R = TypeVar("R")

_open_mover = partial(open_mover, find=vllm_operations)


class Connector(adapt.KVConnectorBase_V1, adapt.SupportsHMA):
    """vLLM's connector without blend and shadow mode. Raises :class:`kvass.errors.ConfigError` at
    start for an option that cannot be used."""

    _cache_hit_source = adapt.HIT_SOURCE
    _metadata = StepMetadata
    _shadows = False
    """Whether this class keeps the promise of shadow mode."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        log_as_vllm()
        self.boundary = self._boundary = Boundary()
        self._setup: VllmSetup | None = None
        self._planner: Planner | None = None
        self._copier: Copier | None = None
        self._rest: rest.Rest | None = None
        self._event_maker: EventMaker | None = None
        self._watched = False
        self._exception_before: BaseException | None = None
        self._adapters = vllm_config.lora_config is not None
        is_scheduler = role == adapt.KVConnectorRole.SCHEDULER
        # Of the workers only the first one logs.
        logs = is_scheduler or self._boundary.run(0, configuration.worker_rank, vllm_config) == 0
        if is_scheduler:
            self._boundary.run(None, configuration.log_sources, vllm_config)
        setup = self._read(vllm_config, kv_cache_config)
        if isinstance(setup, Inert):
            if logs:
                log_off(setup.reason, is_scheduler)
            return
        if setup.shadow and not self._shadows:
            raise ConfigError(
                f"kvass.shadow does not work with {type(self).__name__}, which loads: subclass "
                "ShadowConnector"
            )
        self._setup = setup
        self._texts = content.hashed_texts(vllm_config)
        if is_scheduler:
            if not setup.shadow:
                configuration.recompute_failed_loads(vllm_config)
            self._rest = self._boundary.run(None, rest.begin, setup.instance, self._boundary)
            self._watched = self._boundary.run(False, self._watch, setup)
            self._event_maker = events.event_maker(vllm_config, kv_cache_config, setup)
        else:
            self._copier = self._boundary.run(None, self._make_copier, setup, vllm_config)
            rest.workers[setup.instance] = weakref.WeakMethod(self._await_copies)
        if logs and not setup.named:
            log_naming(setup.weights, is_scheduler)

    def _read(self, vllm_config: Any, kv_cache_config: Any) -> VllmSetup | Inert:
        try:
            return configuration.read_setup(vllm_config, kv_cache_config)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - a defect of kvass must not end the engine
            self._boundary.failed("read_setup", error)
            return Inert(f"reading the engine's configuration failed: {error}")

    def _watch(self, setup: VllmSetup) -> bool:
        """Report every call that may replace weights to the planner. Returns whether nothing but
        these calls can replace them."""

        def on_change(what: str, foreign: bool) -> None:
            self._run(self._planner, None, Planner.weights_may_change, what, foreign)

        if (core := borrowed.engine_core()) is None:
            return False
        rpcs.watch(core.model_executor, on_change)
        return rpcs.only_vllm_reaches_weights(core, setup.identity.get("plugins", ""))

    def _make_copier(
        self,
        setup: VllmSetup,
        vllm_config: Any,
        make_mover: MakeMover | None = None,
    ) -> Copier:
        rank = configuration.worker_rank(vllm_config)
        held = lora.held_adapters(rank, self._boundary) if self._adapters else None
        if self._adapters and held is None:
            log.warning("LoRA adapters run uncached: what this worker holds cannot be read")
        make_mover = make_mover or partial(_open_mover, stages=setup.gpu_stages)
        return Copier(setup, rank, self._boundary, make_mover, held)

    def _run(
        self,
        target: H | None,
        miss: R,
        call: Callable[Concatenate[H, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a method of the planner or the copier. Returns ``miss`` if ``target`` is None or the
        method raises.

        It does what ``Boundary.run`` does with one Python frame less. A decode step makes about a
        dozen of these calls.
        """
        if target is None:
            return miss
        try:
            return call(target, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a defect of kvass is a miss for the engine
            self._boundary.failed(getattr(call, "__name__", repr(call)), error)
            return miss

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The KV cache layout that the options ask for. vLLM warns if it cannot use that layout."""
        return configuration.wanted_layout(vllm_config)

    # ------------------------------------------------------------ statistics

    def get_kv_connector_stats(self) -> Stats | None:
        """The counts since the last call, or None if there are none. Called after each step, once
        ``update_connector_output`` was."""
        self._run(self._planner, None, Planner.step_ended)
        counter = self._planner or self._copier
        counts = {} if counter is None else counter.traffic.take()
        return Stats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """The ``Stats`` for counts that another process sent as a dict."""
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """The object that adds kvass's counters to vLLM's ``/metrics``."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ------------------------------------------------------------ scheduler side

    @property
    def requires_kv_delivery(self) -> bool:
        """False: vLLM need not wait for stores. A dropped store only causes a later miss."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Make the planner. vLLM calls this once the scheduler's block pool exists, and before
        anything that concerns a request."""
        super().bind_kv_cache_manager(kv_cache_manager)

        def before_reset() -> None:
            self._run(self._planner, None, self._free_blocks)

        def after_reset() -> None:
            self._run(self._planner, None, Planner.was_emptied)

        def planner(setup: VllmSetup) -> Planner:
            pool = adapt.VllmBlockPool(kv_cache_manager.block_pool, before_reset, after_reset)
            return Planner(setup, pool, self._event_maker, self._observers, watched=self._watched)

        if self._setup is not None:
            self._planner = self._boundary.run(None, planner, self._setup)
            if (scheduler := self._boundary.run(None, borrowed.scheduler)) is not None:
                self._boundary.run(None, self._take_back_failed_steps, scheduler)
        if self._rest is not None:
            self._rest.planner = self._planner

    def _take_back_failed_steps(self, scheduler: Any) -> None:
        """Load inside steps, if ``scheduler`` can forget what a step computed with a failed load.
        Where nothing is loaded inside steps, vLLM handles other connectors' failed loads as it
        does without kvass: ``bad_blocks.py`` knows one layer group only."""

        def take_back(failed: set[int]) -> None:
            # Not behind the boundary: if it raises, the engine ends, and else would answer from
            # blocks that nobody filled.
            preempted = bad_blocks.take_back(scheduler, failed)
            self._boundary.count(
                "steps_taken_back",
                "a load inside a step failed: vLLM computes %d requests again, and its own prefix "
                "cache is empty",
                preempted,
            )
            self._run(self._planner, None, Planner.took_back)

        if self._planner is None or self._planner.in_step.why_never:
            return
        if borrowed.replace_handle_invalid_blocks(scheduler, take_back):
            self._planner.in_step.enable()

    def _observers(self, planner: Planner) -> tuple[Observer, ...]:
        """What observes the engine's requests beside the planner's own observers."""
        return ()

    def _free_blocks(self, planner: Planner) -> None:
        """Free all held blocks before a reset, if that is all that it needs."""
        left_s = 0.0
        if self._rest is not None:
            left_s = self._boundary.run(0.0, self._rest.finish)
        planner.stores.abandon_pending()
        if self._rest is not None and planner.stores.only_copies():
            report = self._rest.await_copies(left_s)
            if report is not None:
                self.update_connector_output(adapt.reported(report))

    def on_new_request(self, request: Any) -> None:
        """Begin to track a request that was added to the scheduler."""
        if self._setup is not None:
            tracked = adapt.VllmRequest(request, self._setup, self._texts)
            for key in tracked.hints.bad:
                self._boundary.count("bad_hint", "%s in kv_transfer_params: ignored", key)
            for action in tracked.hints.unknown:
                self._boundary.count("unknown_action", "%s in kv_hints: ignored", action)
            self._track(tracked)

    def _track(self, request: adapt.VllmRequest) -> None:
        self._run(self._planner, None, Planner.track, request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The number of tokens to load after ``num_computed_tokens``, and whether the load is
        asynchronous, which it is unless it fits into the step. If the number is None, vLLM calls
        again later."""
        name = request.request_id
        tokens = self._run(self._planner, 0, Planner.match, name, num_computed_tokens)
        if tokens and (inside := self._run(self._planner, 0, Planner.loads_in_step, name)):
            return inside, False
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record that vLLM allocated ``blocks``, and plan the load of ``num_external_tokens``
        tokens into them."""
        table = self._boundary.run((), adapt.block_table, blocks) if num_external_tokens else ()
        self._allocated(request.request_id, table, num_external_tokens)

    def _allocated(self, name: str, table: Table, tokens: int) -> None:
        self._run(self._planner, None, Planner.allocated, name, table, tokens)
        if tokens:  # vLLM waits for a load now, even if planning it failed
            self._run(self._planner, None, Planner.ensure_load, name, table)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The step's loads and stores, which vLLM sends to the workers."""
        work = self._metadata()
        self._plan(scheduler_output, work)
        if not self._run(self._planner, False, Planner.hand_over, work):
            self._run(self._planner, None, Planner.revoke, work)
        return work

    def _plan(self, scheduler_output: Any, work: StepMetadata) -> None:
        self._run(self._planner, None, plan, scheduler_output, work)

    def update_connector_output(self, connector_output: Any) -> None:
        report: StepReport | None = connector_output.kv_connector_worker_meta
        failed = connector_output.failed_recving or ()
        ended = connector_output.finished_recving or ()
        if report is not None:
            for take_in in Planner.TAKE_IN:
                self._run(self._planner, None, take_in, report)
        if report is not None or failed or ended:
            steps = report.steps if report is not None else {}
            self._run(self._planner, None, Planner.reported, steps, failed, ended)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """``request_finished_all_groups`` for a model with one KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. Returns False: vLLM may free its blocks at once, because the planner
        holds the blocks that are being stored. The dict is a part of the answer to the client."""
        report = None
        if read_hints(request.kv_transfer_params).report:
            nothing = 0, 0, ""
            name = request.request_id
            hit, kept, why = self._run(self._planner, nothing, Planner.outcome, name)
            report = {"kvass": {"hit_tokens": hit, "kept_tokens": kept, "missed_because": why}}
        self._run(self._planner, None, Planner.forget, request.request_id, block_ids)
        if self._rest is not None:
            self._rest.request_ended()
        return False, report

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for stores would free blocks, so that vLLM need not preempt."""
        return self._run(self._planner, False, Planner.frees_blocks)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep running steps until the workers report their stores."""
        return self._run(self._planner, False, Planner.storing)

    def take_events(self) -> list[Any]:
        """The KV events for rows since the last call. vLLM publishes them with its own."""
        if self._planner is None or self._planner.events is None:
            return []
        return self._run(self._planner, [], Planner.take_events)

    def reset_cache(self) -> bool | None:
        """Clear this engine's namespace, because the weights may be about to change. False if kvass
        failed; None in a worker or an inert connector."""
        if self._planner is None:
            return None
        pausing = self._boundary.run(False, borrowed.is_pausing)
        return self._run(self._planner, False, Planner.clear, pausing)

    # ------------------------------------------------------------ worker side

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Attach the copier to the worker's KV caches. Until all workers have done so, every lookup
        is a miss."""
        if self._setup is not None:
            self._run(self._copier, None, self._attach, self._setup, kv_caches)

    def _attach(self, copier: Copier, setup: VllmSetup, kv_caches: Mapping[str, Any]) -> None:
        copier.close()  # vLLM may register again, with other memory
        if not tiles.may_load(self._vllm_config.model_config.dtype):
            return
        config = self._kv_cache_config
        copier.attach(read_memory(config, kv_caches, setup.chunk_tokens, setup.groups))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Begin the stores of the last step if vLLM did not call ``wait_for_save`` in it.

        This is the first hook of a step. It saves nothing for preempted requests, because blocks
        that are being copied are held.
        """
        self._run(self._copier, None, Copier.catch_up)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin the step's loads. Both model runners call this after they have zeroed new blocks
        and before the forward pass. On a GPU a load does not wait for kernels that are launched
        later."""
        super().bind_connector_metadata(connector_metadata)
        self._exception_before = sys.exc_info()[1]
        self._run(self._copier, None, Copier.load, connector_metadata)

    def has_connector_metadata(self) -> bool:
        """False: attention layers need not call ``wait_for_layer_load`` and ``save_kv_layer``.
        No load goes on in the forward pass, and whole chunks are stored after it. Only attention
        layers call this."""
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to do: ``bind_connector_metadata`` has begun the loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: the load of a request has ended before the forward pass begins."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: ``wait_for_save`` begins the stores."""

    def wait_for_save(self) -> None:
        """Begin the step's stores. vLLM calls this also if the forward pass raised. Then nothing is
        stored, because the blocks may hold anything."""
        self._run(
            self._copier, None, Copier.store, self._get_connector_metadata(), self._computed()
        )

    def _computed(self) -> bool:
        """Whether the step's forward pass has not raised. An exception that was being handled
        before the step does not count."""
        return sys.exc_info()[1] is self._exception_before

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The requests whose load has ended, and those of them whose load failed."""
        none: tuple[set[str], set[str]] = (set(), set())
        finished, failed = self._run(self._copier, none, Copier.results, self._computed())
        return adapt.KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that a load inside this step did not fill."""
        return self._run(self._copier, set[int](), Copier.take_bad_blocks)

    def build_connector_worker_meta(self) -> StepReport | None:
        """This rank's report: the steps whose stores have ended, the adapters that are new, and
        what was compared or found wrong. None if there is nothing to report."""
        if (report := self._run(self._copier, None, Copier.take_report)) is None:
            return None
        return StepReport(**vars(report))

    def _await_copies(self, most_s: float) -> StepReport | None:
        """Wait until this rank's copies have ended, for at most ``most_s``; its report."""
        self._run(self._copier, None, Copier.settle, most_s)
        return self.build_connector_worker_meta()

    def unregister_kv_caches(self) -> None:
        """Wait for the copies, before the engine's memory is taken away for a sleep. vLLM before
        0.33 does not call this, and has waited for them already. After the sleep the pages are at
        the same addresses."""
        self._run(self._copier, None, Copier.wait)

    def shutdown(self) -> None:
        """End the copies, then the connection to the daemon."""
        if self._setup is not None:
            self._setup.weights.cancel()
        if self._rest is not None:
            self._rest.close()
        self._run(self._planner, None, Planner.close)
        self._run(self._copier, None, Copier.close)


def plan(planner: Planner, scheduler_output: Any, work: StepMetadata) -> None:
    """Plan the loads and stores of vLLM's step and add them to ``work``."""
    planner.plan(adapt.VllmStep(scheduler_output), work)
