"""vLLM's real Scheduler or AsyncScheduler with our connector, without model and worker.

Schedulers, block pools and requests are vLLM's own. The test provides the model's output and the
workers' reports, step by step.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvass.client.parallel import ParallelStrategy
from kvass.connectors.vllm.contract import release
from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.lora_ranks import LoraRanks
from tests.support.vllm.models import Shape, build

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

CLIENT = "kvass.engine.clients.SchedulerClient"
CHUNK_BLOCKS = "kvass.connectors.vllm.configuration.chunk_blocks"
BLOCK = 16
CHUNK = 32
"""Tokens of a chunk: two blocks, so that a local hit can end inside a chunk."""
ALONE = ParallelStrategy()
FIXED = {"kvass.fixed_weights": True}
"""Lets tests reset vLLM's own cache, so that the next hit comes from kvass."""


def tiny_model() -> Path:
    """A folder with a model's configuration; its weights are never read."""
    shape = Shape(64, hidden=64, intermediate=32, layers=4, heads=8, kv_heads=1, head_dim=32)
    return build(Path(tempfile.gettempdir()) / f"kvass-models-{os.getuid()}", shape)


def make_configs(
    options: dict[str, object] | None = None,
    *,
    blocks: int = 64,
    batched: int = 512,
    drafts: int = 0,
    drafter: str = "ngram",
    strategy: ParallelStrategy = ALONE,
    dcp: int = 1,
    model: Path | None = None,
    length: int = 1024,
    kv_events: Mapping[str, Any] | None = None,
    lora: bool = False,
    **transfer: Any,
) -> tuple[Any, Any]:
    """vLLM's own and its KV cache configuration: one group of ``BLOCK`` tokens with two layers,
    and one more in each later pipeline stage.

    ``strategy`` names the rank whose configuration it is (a scheduler gets that of rank 0, as in
    vLLM). ``dcp`` is the decode context parallel size. ``drafts``: how many tokens ``drafter``, a
    speculative method, proposes; an "eagle" has no layers of its own here. ``model``: a folder with
    weights; without it they are dummies. ``length``: of a request, at most. ``kv_events``: fields
    of ``KVEventsConfig``. ``lora``: the engine serves LoRA adapters.
    """
    drafting = _drafter(drafter, drafts)
    config = _engine_config(options, batched, drafting, strategy, dcp, model, length, transfer)
    config.cache_config.num_gpu_blocks = blocks
    if lora:
        from vllm.config.lora import LoRAConfig

        config.lora_config = LoRAConfig()
    if kv_events is not None:
        from vllm.config import KVEventsConfig

        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, **kv_events)
    return config, _cache_config(blocks, strategy, dcp)


OTHER = {
    "kv_connector": "OtherConnector",
    "kv_connector_module_path": "tests.support.vllm.other_connector",
    "kv_role": "kv_both",
}


def make_multi_configs(
    options: Mapping[str, object] | None = None, *, others: int = 0, **more: Any
) -> tuple[Any, Any]:
    """Configurations in which our connector is the first of a ``MultiConnector``; ``others`` more
    load prompts of their own. ``more``: as for ``make_configs``."""
    return make_configs(**multi_connector(options or {}, others), **more)


def multi_connector(options: Mapping[str, object], others: int) -> dict[str, Any]:
    """The options of ``make_configs`` for a ``MultiConnector`` as in ``make_multi_configs``."""
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": [_connector(options), *[OTHER] * others]},
    }


def _connector(options: Mapping[str, object]) -> dict[str, object]:
    return {
        "kv_connector": "KvassConnector",
        "kv_connector_module_path": "kvass.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvass.chunk_tokens": CHUNK, **options},
    }


def _engine_config(
    options: dict[str, object] | None,
    batched: int,
    speculative: dict[str, Any],
    strategy: ParallelStrategy,
    dcp: int,
    folder: Path | None,
    length: int,
    transfer: dict[str, Any],
) -> Any:
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )

    connector = _connector({**FIXED, **(options or {})})
    load = LoadConfig(load_format="auto" if folder else "dummy")
    folder = folder or tiny_model()
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=length)
    parallel = ParallelConfig(
        tensor_parallel_size=strategy.tp,
        pipeline_parallel_size=strategy.pp,
        decode_context_parallel_size=dcp,
        rank=max(strategy.rank, 0),
    )
    if "model" in speculative:
        speculative |= {"target_model_config": model, "target_parallel_config": parallel}
    return VllmConfig(
        model_config=model,
        load_config=load,
        device_config=DeviceConfig("cpu"),
        parallel_config=parallel,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=batched,
            max_model_len=length,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(**(connector | transfer)),
        speculative_config=SpeculativeConfig(**speculative) if speculative else None,
    )


def _drafter(method: str, drafts: int) -> dict[str, Any]:
    """Arguments of vLLM's ``SpeculativeConfig``; none without drafts."""
    if not drafts:
        return {}
    chosen = {"prompt_lookup_max": 2} if method == "ngram" else {"model": str(tiny_model())}
    return {"method": method, "num_speculative_tokens": drafts, **chosen}


def _cache_config(blocks: int, strategy: ParallelStrategy, dcp: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    page, stage = spec.page_size_bytes, max(strategy.rank, 0) // strategy.tp
    first = stage * (stage + 3) // 2  # each stage has a layer more than the one before it
    layers = [f"layer.{number}" for number in range(first, first + 2 + stage)]
    caches = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=len(layers) * blocks * page,
                layers=layers,
                layer_stride=blocks * page,
                block_stride=page,
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )
    tell(caches, hash_block_size=BLOCK * dcp, kv_tp_replicas=strategy.replicas)
    return caches


def tell(caches: Any, **fields: object) -> None:
    """Set what this version of vLLM tells in its ``KVCacheConfig``."""
    for name, value in fields.items():
        if hasattr(caches, name):
            setattr(caches, name, value)
        elif name == "kv_tp_replicas" and value != 1:
            pytest.skip("this vLLM does not tell which ranks hold equal KV")


def before(version: str) -> bool:
    """Whether the vLLM that is tested is older."""
    from vllm import __version__

    return release(__version__) < release(version)


def read_setup(config: Any, caches: Any) -> Any:
    """The ``VllmSetup`` of an engine that is served."""
    from kvass.connectors.vllm.configuration import VllmSetup, read_setup

    found = read_setup(config, caches)
    assert isinstance(found, VllmSetup), found
    return found


def inert_reason(config: Any, caches: Any) -> str:
    """Why an engine is not served."""
    from kvass.connectors.vllm.configuration import read_setup
    from kvass.engine.setup import Inert

    found = read_setup(config, caches)
    assert isinstance(found, Inert)
    return found.reason


def rig(*, tails: bool = False, **options: Any) -> tuple[FakeClient, SchedulerHarness]:
    """A harness with a client of its own; ``options`` as for ``SchedulerHarness``."""
    client = FakeClient(tails=tails)
    return client, SchedulerHarness(client, **options)


class SchedulerHarness:
    """One scheduler, its requests, and the workers' part of every step."""

    def __init__(
        self, client: object, *, asynchronous: bool = False, configs: Any = None, **options: Any
    ) -> None:
        """``client`` replaces the connector's ``SchedulerClient``; None keeps the real one.
        ``options`` are those of ``make_configs``."""
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        config, caches = configs or make_configs(**options)
        init_none_hash(sha256)
        block, width = resolve_kv_cache_block_sizes(caches, config)
        self.hash_tokens = width
        self._hasher: Callable[[Any], list[Any]] = get_request_block_hasher(width, sha256)
        kind: Any = AsyncScheduler if asynchronous else Scheduler
        if config.scheduler_config.scheduler_cls is not None:
            kind = config.scheduler_config.get_scheduler_cls()
        with ExitStack() as fakes:
            if client is not None:
                fakes.enter_context(mock.patch(CLIENT, return_value=client))
            if isinstance(client, FakeClient) and not client.tails:
                fakes.enter_context(mock.patch(CHUNK_BLOCKS, return_value=0))
            self.scheduler: Any = kind(
                vllm_config=config,
                kv_cache_config=caches,
                block_size=block,
                hash_block_size=width,
                structured_output_manager=StructuredOutputManager(config),
                log_stats=True,
            )
        self.connector: Any = self.scheduler.connector
        self.pool: Any = self.scheduler.kv_cache_manager.block_pool
        self.open_steps: list[int] = []
        self.tolerant = False
        """Whether the connector may have caught a defect, for tests that plant one."""
        children = getattr(self.connector, "_connectors", None)
        self._multi = children is not None
        ours = (at for at, one in enumerate(children or ()) if hasattr(one, "_planner"))
        self._ours = next(ours, 0)
        self._sampling: dict[int, set[str]] = {}
        parallel = config.parallel_config
        self.lora = LoraRanks(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)

    @classmethod
    def over(cls, scheduler: Any, hasher: Callable[[Any], list[Any]]) -> SchedulerHarness:
        """A harness over the scheduler and the block hasher of an engine."""
        world = cls.__new__(cls)
        world._hasher, world.scheduler = hasher, scheduler
        world.connector, world.pool = scheduler.connector, scheduler.kv_cache_manager.block_pool
        world.open_steps, world.tolerant, world._multi, world._sampling = [], False, False, {}
        world.lora = LoraRanks()
        return world

    def add(
        self,
        name: str,
        tokens: Iterable[int],
        *,
        max_tokens: int = 4,
        salt: str | None = None,
        reads: bool = True,
        lora: Path | None = None,
        lora_id: int = 1,
        in_place: bool = False,
        params: dict[str, Any] | None = None,
        priority: int = 0,
        session: str | None = None,
        **more: Any,
    ) -> Any:
        """Add a greedy request; ``lora`` is the folder of its adapter, ``lora_id`` its id,
        ``in_place`` whether to load it again; ``params`` are vLLM's ``kv_transfer_params``.
        ``more``: other arguments of vLLM's ``Request``."""
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                temperature=0,
                ignore_eos=True,
                skip_reading_prefix_cache=not reads,
                extra_args=params and {"kv_transfer_params": params},
            ),
            pooling_params=None,
            lora_request=LoRARequest(lora.name, lora_id, str(lora), load_inplace=in_place)
            if lora is not None
            else None,
            cache_salt=salt,
            priority=priority,
            session_id=session,
            block_hasher=self._hasher,
            **more,
        )
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> tuple[Any, Any]:
        """One ``schedule()``: vLLM's output and our metadata."""
        output = self.scheduler.schedule()
        work = output.kv_connector_metadata
        if self._multi:
            work = work.metadata[self._ours]
        if getattr(work, "step", 0):  # a connector that is off has no such work
            self.open_steps.append(work.step)
        caught = getattr(self.connector, "_boundary", None)
        assert self.tolerant or caught is None or not caught.counters, caught.counters
        requests = self.scheduler.requests
        self._sampling[id(output)] = {
            name for name in output.num_scheduled_tokens if not requests[name].is_prefill_chunk
        }
        return output, work

    def finish(
        self,
        output: Any,
        *,
        tokens: Sequence[int] | Mapping[str, Sequence[int]] = (7,),
        reported: Iterable[int] | Mapping[int, int] = (),
        received: Iterable[str] = (),
        failed: Iterable[str] = (),
        adapters: Mapping[int, Any] | None = None,
        compared: Sequence[Any] = (),
        wrong: Sequence[str] = (),
        copied: Mapping[int, Any] | None = None,
        late: Iterable[str] = (),
    ) -> None:
        """Give the scheduler the model's answer to ``output`` (``tokens`` for each request that
        samples, or by request) and the workers' reports: steps whose stores are settled (by one
        rank, or by so many), loads that ended or failed, adapters (None: those of ``lora``), what
        shadow mode ``compared``, which copies are ``wrong``, and what ranks ``copied``.
        Loads inside the step ended well, but those of requests that were ``late``."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from kvass.connectors.vllm.adapt import StepReport

        work = output.kv_connector_metadata
        if self._multi:
            from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as multi

            of_others = [self.report_of(one) for one in work.metadata]
            work = work.metadata[self._ours]
        if adapters is None:
            adapters = self.lora.compute(self.loras(output), getattr(work, "number", 0))
        names, sampling = list(output.num_scheduled_tokens), self._sampling.pop(id(output))
        answers = tokens if isinstance(tokens, Mapping) else dict.fromkeys(names, tokens)
        steps = dict(reported) if isinstance(reported, Mapping) else dict.fromkeys(reported, 1)
        self.open_steps = [step for step in self.open_steps if step not in steps]
        ended = set(received) | set(failed)
        loads = [load for load in getattr(work, "loads", ()) if load.in_step]
        inside = {load.request: load.request not in late for load in loads}
        invalid = {block for load in loads if load.request in late for block in load.in_step}
        failed_step = 0 if all(inside.values()) else work.number
        self.tolerant |= bool(invalid)  # it counts the steps that it takes back
        report: Any = None
        if steps or adapters or compared or wrong or copied or inside:
            report = StepReport(
                steps,
                dict(adapters),
                list(compared),
                list(wrong),
                dict(copied or {}),
                inside,
                failed_step,
            )
        if self._multi:
            of_others[self._ours] = report
        if self._multi and any(of_others):
            report = multi.MultiKVConnectorWorkerMetadata(metadata=tuple(of_others))
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[
                    list(answers[name]) if name in sampling else [] for name in names
                ],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=KVConnectorOutput(
                    finished_recving=ended or None,
                    failed_recving=set(failed),
                    invalid_block_ids=invalid,
                    kv_connector_worker_meta=report,
                ),
            ),
        )

    def report_of(self, metadata: Any) -> Any:
        """What the worker of another connector of a ``MultiConnector`` reports of ``metadata``."""
        return None

    def loras(self, output: Any) -> list[Any]:
        """The adapters with which ``output`` computes."""
        requests = (self.scheduler.requests.get(name) for name in output.num_scheduled_tokens)
        return [one.lora_request for one in requests if one is not None and one.lora_request]

    def draft(self, name: str, tokens: Sequence[int]) -> None:
        """The drafter proposes ``tokens`` for the next step."""
        from vllm.v1.outputs import DraftTokenIds

        self.scheduler.update_draft_token_ids(DraftTokenIds([name], [list(tokens)]))

    def step(self, **answer: Any) -> Any:
        """``schedule`` and ``finish``; all open stores are settled. Returns our metadata."""
        output, work = self.schedule()
        self.finish(output, reported=list(self.open_steps), **answer)
        return work

    def run(self, client: FakeClient | None = None, limit: int = 100) -> None:
        """Step until nothing is left to do; stores are committed, loads succeed."""
        for _ in range(limit):
            if not self.scheduler.has_requests():
                return
            output, work = self.schedule()
            if client is not None:
                client.commit(store.reservation for store in work.stores)
            self.finish(
                output,
                reported=list(self.open_steps),
                received=[load.request for load in work.loads if not load.in_step],
            )
        raise AssertionError(f"still busy after {limit} steps")

    def abort(self, name: str) -> None:
        """Abort a request."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def planner(self) -> Any:
        """Our connector's planner."""
        ours = self.connector._connectors[self._ours] if self._multi else self.connector
        return ours._planner

    @property
    def free_blocks(self) -> int:
        """The number of free blocks."""
        return int(self.pool.get_num_free_blocks())
