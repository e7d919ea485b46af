"""The table of what the connector uses of vLLM, and the check of vLLM's sources against it.

Laws of this file:

- It imports nothing of vLLM. The check parses the files of vLLM's package. So ``kvass doctor`` can
  run the check without torch, and the connector can run it before it uses anything of vLLM.
- The table names what the connector calls, overrides or reads. It does not describe how vLLM
  behaves; only tests show that (``make test-versions``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

TABLE: Final = """\
distributed/kv_transfer/kv_connector/v1/base.py
    KVConnectorBase_V1.abstract build_connector_meta get_num_new_matched_tokens \
save_kv_layer start_load_kv update_state_after_alloc wait_for_layer_load wait_for_save
    KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
    KVConnectorBase_V1._get_connector_metadata(self)
    KVConnectorBase_V1._kv_cache_config
    KVConnectorBase_V1._cache_hit_source [0.32]
    KVConnectorBase_V1.requires_kv_delivery
    KVConnectorBase_V1.get_required_kvcache_layout(cls, vllm_config)
    KVConnectorBase_V1.get_kv_connector_stats(self)
    KVConnectorBase_V1.build_kv_connector_stats(cls, data=None)
    KVConnectorBase_V1.build_prom_metrics(cls, vllm_config, metric_types, labelnames, \
per_engine_labelvalues)
    KVConnectorBase_V1.bind_kv_cache_manager(self, kv_cache_manager)
    KVConnectorBase_V1.on_new_request(self, request)
    KVConnectorBase_V1.get_num_new_matched_tokens(self, request, num_computed_tokens)
    KVConnectorBase_V1.update_state_after_alloc(self, request, blocks, num_external_tokens)
    KVConnectorBase_V1.build_connector_meta(self, scheduler_output)
    KVConnectorBase_V1.update_connector_output(self, connector_output)
    KVConnectorBase_V1.request_finished(self, request, block_ids)
    KVConnectorBase_V1.has_pending_block_frees(self)
    KVConnectorBase_V1.has_pending_push_work(self)
    KVConnectorBase_V1.reset_cache(self)
    KVConnectorBase_V1.take_events(self)
    KVConnectorBase_V1.register_kv_caches(self, kv_caches)
    KVConnectorBase_V1.handle_preemptions(self, kv_connector_metadata)
    KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)
    KVConnectorBase_V1.has_connector_metadata(self)
    KVConnectorBase_V1.start_load_kv(self, forward_context, **kwargs)
    KVConnectorBase_V1.wait_for_layer_load(self, layer_name)
    KVConnectorBase_V1.save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs)
    KVConnectorBase_V1.wait_for_save(self)
    KVConnectorBase_V1.get_transfer_results(self, finished_req_ids)
    KVConnectorBase_V1.get_block_ids_with_load_errors(self) [optional]
    KVConnectorBase_V1.build_connector_worker_meta(self)
    KVConnectorBase_V1.unregister_kv_caches(self) [0.33]
    KVConnectorBase_V1.shutdown(self)
    KVConnectorMetadata
    KVConnectorRole.SCHEDULER
    KVConnectorTransferResults.finished_recving = field(default_factory=set)
    KVConnectorTransferResults.failed_recving = field(default_factory=set)
    KVConnectorWorkerMetadata.abstract aggregate
    KVConnectorWorkerMetadata.aggregate(self, other)
    SupportsHMA.abstract request_finished_all_groups
    SupportsHMA.request_finished_all_groups(self, request, block_ids)
distributed/kv_transfer/kv_connector/factory.py
    KVConnectorFactory.register_connector(cls, name, module_path, class_name)
distributed/kv_transfer/kv_connector/v1/metrics.py
    KVConnectorStats.data = field(default_factory=dict)
    KVConnectorStats.reset(self)
    KVConnectorStats.aggregate(self, other)
    KVConnectorStats.reduce(self)
    KVConnectorStats.is_empty(self)
    KVConnectorPromMetrics.__init__(self, vllm_config, metric_types, labelnames, \
per_engine_labelvalues)
    KVConnectorPromMetrics.observe(self, transfer_stats_data, engine_idx=0)
distributed/kv_events.py
    BlockStored.block_hashes
    BlockStored.parent_block_hash
    BlockStored.token_ids
    BlockStored.block_size
    BlockStored.lora_id
    BlockStored.medium
    BlockStored.lora_name
    BlockStored.extra_keys = None
    BlockStored.group_idx = None
    BlockStored.session_id = None
    BlockStored.lookahead_token_ids = None [0.33]
    BlockStored.kv_cache_spec_kind = None
    BlockStored.kv_cache_spec_sliding_window = None
    BlockRemoved.block_hashes
    BlockRemoved.medium
    BlockRemoved.group_idx = None
v1/metrics/cache_hit_source.py
    CacheHitSource.HOST [0.32]
v1/core/kv_cache_utils.py
    make_block_hash_with_group_id(block_hash, group_id)
    resolve_none_hash_seed(hash_fn)
    maybe_convert_block_hash(hash_bytes)
    generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)
    to_event_extra_keys(extra_keys) [0.31]
    resolve_dcp_kv_block_size(spec, dcp_world_size)
    resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    KVCacheBlock.block_hash
    KVCacheBlock.block_id [optional]
    KVCacheBlock.ref_cnt = 0
v1/core/block_pool.py
    BlockHashToBlockMap.__len__(self)
    BlockPool.blocks
    BlockPool.num_gpu_blocks
    BlockPool.cached_block_hash_to_block
    BlockPool.get_cached_block(self, block_hash, kv_cache_group_ids)
    BlockPool.touch(self, blocks)
    BlockPool.free_blocks(self, ordered_blocks)
    BlockPool.reset_prefix_cache(self)
engine/arg_utils.py
    EngineArgs.create_engine_config(self, usage_context=None, headless=False)
    EngineArgs.kv_offloading_size = CacheConfig.kv_offloading_size
    EngineArgs.kv_transfer_config = None
_custom_ops.py
    swap_blocks_batch(src_ptrs, dst_ptrs, sizes, is_src_access_order_any=False)
v1/kv_offload/cpu/swap_blocks_triton.py
    swap_blocks_batch(src_addrs, dst_addrs, sizes, is_src_access_order_any=False, *, \
bytes_per_chunk)
    THRESHOLD_BYTES
compilation/monitor.py
    validate_cudagraph_capturing_enabled()
v1/engine/core.py
    EngineCore.model_executor
    EngineCore.vllm_config
    EngineCore.scheduler
    EngineCore.step_fn
    EngineCore.post_step(self, model_executed)
    EngineCore._reset_caches(self, reset_running_requests=True, reset_connector=True)
    EngineCoreProc
    DPEngineCoreProc
v1/engine/core_client.py
    InprocClient
    InprocClient.dp_engines_running(self)
v1/executor/abstract.py
    Executor.get_class(vllm_config)
    Executor.shutdown(self)
    Executor.collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False)
v1/executor/uniproc_executor.py
    UniProcExecutor
    ExecutorWithExternalLauncher
v1/executor/multiproc_executor.py
    MultiprocExecutor
v1/core/kv_cache_manager.py
    KVCacheBlocks.get_block_ids(self, allow_none=False, *, group_ids=None)
    KVCacheManager.block_pool
    KVCacheManager.evict_blocks(self, block_ids) [optional]
    KVCacheManager.get_block_ids(self, request_id) [optional]
v1/core/sched/scheduler.py
    Scheduler.get_request_counts(self)
    Scheduler.requests [optional]
    Scheduler.running [optional]
    Scheduler.kv_cache_manager [optional]
    Scheduler.prev_step_scheduled_req_ids [optional]
    Scheduler.recompute_kv_load_failures [optional]
    Scheduler._handle_invalid_blocks(self, invalid_block_ids, num_scheduled_tokens) [optional]
    Scheduler._handle_failed_recving(self, failed_req_ids) [optional]
    Scheduler._preempt_request(self, request, timestamp, drop_stale_output=False) [optional]
v1/core/sched/output.py
    SchedulerOutput.num_scheduled_tokens
    SchedulerOutput.total_num_scheduled_tokens
    SchedulerOutput.kv_connector_block_state = None
    KVConnectorBlockState.get_block_ids(self, req_id)
    KVConnectorBlockState.boundary_state_offloads
v1/outputs.py
    KVConnectorOutput.finished_recving = None
    KVConnectorOutput.failed_recving = field(default_factory=set)
    KVConnectorOutput.kv_connector_worker_meta = None
v1/request.py
    Request.request_id
    Request.all_token_ids
    Request.arrival_time
    Request.block_hashes
    Request.drop_stale_output [optional]
    Request.num_stale_output_tokens [optional]
    Request.cache_salt
    Request.lora_request
    Request.max_tokens
    Request.mm_features
    Request.num_computed_tokens
    Request.num_prompt_tokens
    Request.num_tokens
    Request.prompt_embeds
    Request.prompt_is_token_ids
    Request.priority
    Request.prompt_token_ids
    Request.session_id
    Request.skip_reading_prefix_cache
    Request.status
    Request.trace_headers
    RequestStatus.WAITING
    RequestStatus.WAITING_FOR_REMOTE_KVS
    RequestStatus.PREEMPTED
    RequestStatus.RUNNING [optional]
multimodal/inputs.py
    MultiModalFeatureSpec.identifier
    MultiModalFeatureSpec.mm_hash = None
lora/request.py
    LoRARequest.adapter_id
    LoRARequest.load_inplace = False
    LoRARequest.lora_int_id
    LoRARequest.name
    LoRARequest.lora_name
    LoRARequest.lora_path = ''
lora/lora_model.py
    LoRAModel.id
lora/model_manager.py
    LoRAModelManager.list_adapters(self)
lora/worker_manager.py
    WorkerLoRAManager._adapter_manager
    WorkerLoRAManager._load_adapter(self, lora_request)
v1/kv_cache_interface.py
    KVCacheConfig.num_blocks
    KVCacheConfig.kv_cache_tensors
    KVCacheConfig.kv_cache_groups
    KVCacheConfig.kv_cache_layout = None
    KVCacheConfig.prefix_cacheable_group_ids
    KVCacheConfig.kv_tp_replicas = 1 [0.31]
    KVCacheConfig.hash_block_size = None [0.32]
    KVCacheConfig.cache_hit_alignment_tokens = None [0.32]
    KVCacheGroupSpec.layer_names
    KVCacheGroupSpec.kv_cache_spec
    KVCacheGroupSpec.is_eagle_group = False
    KVCacheGroupSpec.enable_kv_transfer = True
    KVCacheSpec.prefix_replay_tokens [0.32]
    KVCacheTensor.layers
    KVCacheTensor.offset = 0
    KVCacheTensor.layer_stride
    KVCacheTensor.block_stride
    FullAttentionSpec.block_size
    FullAttentionSpec.page_size_bytes
    FullAttentionSpec.non_causal = False
    MLAAttentionSpec.cache_dtype_str = None
    SlidingWindowSpec.sliding_window
    SlidingWindowSpec.extra_retained_tokens = 0
    SlidingWindowMLASpec.sliding_window
    ChunkedLocalAttentionSpec.attention_chunk_size
    MambaSpec.mamba_cache_mode = 'none'
    UniformTypeKVCacheSpecs.kv_cache_specs
    get_kv_cache_spec_kind(kv_cache_spec)
    get_kv_cache_spec_sliding_window(kv_cache_spec)
config/kv_transfer.py
    KVTransferConfig.engine_id = None
    KVTransferConfig.kv_connector = None
    KVTransferConfig.is_kv_consumer
    KVTransferConfig.is_kv_producer
    KVTransferConfig.kv_connector_extra_config = field(default_factory=dict)
    KVTransferConfig.kv_load_failure_policy = 'fail'
    KVTransferConfig.kv_role = None
config/cache.py
    CacheConfig.cache_dtype = 'auto'
    CacheConfig.kv_cache_dtype_skip_layers = field(default_factory=list)
    CacheConfig.enable_prefix_caching = True
    CacheConfig.prefix_caching_hash_algo = 'sha256'
    CacheConfig.prefix_match_unit = None
config/kv_events.py
    KVEventsConfig.enable_kv_cache_events = False
config/load.py
    LoadConfig.download_dir = None
    LoadConfig.load_format = 'auto'
config/model.py
    ModelConfig.architecture
    ModelConfig.attn_type
    ModelConfig.code_revision = None
    ModelConfig.dtype = 'auto'
    ModelConfig.generation_config = 'auto'
    ModelConfig.hf_config = field(init=False)
    ModelConfig.hf_config_path = None
    ModelConfig.hf_text_config = field(init=False)
    ModelConfig.is_encoder_decoder
    ModelConfig.is_prefix_caching_supported
    ModelConfig.max_model_len = None
    ModelConfig.model = 'Qwen/Qwen3-0.6B'
    ModelConfig.model_weights = ''
    ModelConfig.multimodal_config = None
    ModelConfig.override_generation_config = field(default_factory=dict)
    ModelConfig.pooler_config = None
    ModelConfig.revision = None
    ModelConfig.seed = 0
    ModelConfig.tokenizer = None
    ModelConfig.trust_remote_code = False
config/parallel.py
    ParallelConfig.cp_kv_cache_interleave_size = 1
    ParallelConfig.data_parallel_size = 1
    ParallelConfig.data_parallel_size_local = 1
    ParallelConfig.decode_context_parallel_size = 1
    ParallelConfig.distributed_executor_backend = None
    ParallelConfig.nnodes_within_dp
    ParallelConfig.pipeline_parallel_size = 1
    ParallelConfig.prefill_context_parallel_size = 1
    ParallelConfig.rank = 0
    ParallelConfig.tensor_parallel_size = 1
    ParallelConfig.worker_cls = 'auto'
    ParallelConfig.worker_extension_cls = ''
    ParallelConfig.world_size
config/pooler.py
    PoolerConfig.seq_pooling_type = None
    PoolerConfig.tok_pooling_type = None
config/scheduler.py
    SchedulerConfig.policy = 'fcfs'
config/speculative.py
    SpeculativeConfig.draft_load_config = None
    SpeculativeConfig.draft_model_config = None
    SpeculativeConfig.method = None
    SpeculativeConfig.num_speculative_tokens = None
    SpeculativeConfig.use_eagle_block_drop(self)
config/vllm.py
    VllmConfig.cache_config = Field(default_factory=CacheConfig)
    VllmConfig.kv_events_config
    VllmConfig.kv_transfer_config = None
    VllmConfig.load_config = Field(default_factory=LoadConfig)
    VllmConfig.lora_config = None
    VllmConfig.model_config = None
    VllmConfig.num_hash_lookahead_tokens [0.33]
    VllmConfig.num_prefill_lookahead_tokens [0.31]
    VllmConfig.parallel_config = Field(default_factory=ParallelConfig)
    VllmConfig.scheduler_config
    VllmConfig.speculative_config = None
envs.py
    environment_variables
model_executor/layers/mamba/mamba_utils.py
    get_conv_state_layout()
model_executor/model_loader/__init__.py
    _LOAD_FORMAT_TO_MODEL_LOADER
platforms/interface.py
    Platform.device_name
    Platform.device_type
    Platform.get_device_capability(cls, device_id=0)
    Platform.get_device_name(cls, device_id=0)
    Platform.is_rocm(self)
    Platform.is_xpu(self)
triton_utils/importing.py
    HAS_TRITON
utils/platform_utils.py
    is_pin_memory_available()
utils/hashing.py
    get_hash_fn_by_name(hash_fn_name)
"""
"""Files of vLLM's package, and below each file, indented, the names that it must define.

- A name alone is a class, function, field, property, enum member, or an attribute set by
  ``__init__``.
- A name with parentheses is a function with these parameters.
- A name with ``= value`` is a field with this default.
- ``abstract`` is followed by all abstract methods of a class.
- ``[0.31]`` means that the line holds from this version on; older versions are not checked for
  it.
- ``[optional]`` means that only loads inside a step need it (``bad_blocks.py``). In a version that
  lacks it all loads are asynchronous."""


@dataclass(frozen=True, slots=True)
class Term:
    """One name that the table requires.

    For a member of a class, ``name`` is ``Class.member``. ``rest`` is the text after the name:
    parameters, a default or abstract methods. ``since`` is empty if every version must have the
    name.
    """

    file: str
    name: str
    rest: str
    since: tuple[int, ...]
    optional: bool = False

    @property
    def text(self) -> str:
        """The line of the table without its version."""
        return self.name + self.rest


def terms() -> Iterator[Term]:
    """The required names of the table, in its order."""
    file = ""
    for line in filter(None, TABLE.splitlines()):
        if not line.startswith(" "):
            file = line
            continue
        text, _, since = line.strip().partition(" [")
        name, rest = re.fullmatch(r"([\w.]+)(.*)", text).groups()  # type: ignore[union-attr]
        yield Term(file, name, rest, release(since), since == "optional]")


def differences(package: Path, version: str, *, optional: bool = False) -> list[str]:
    """A line for each name of the table that the vLLM in the folder ``package`` lacks or defines in
    another way. ``version`` is that vLLM's version. The list is empty if the contract holds.
    ``optional``: look at the optional names, and at no others."""
    found = []
    wanted = (term for term in terms() if term.optional == optional)
    for file, lines in groupby(wanted, lambda term: term.file):
        top = _top_level(package / file)
        for term in lines:
            if term.since > release(version):
                continue
            defined = describe(top, term.name)
            if defined is None:
                found.append(f"{term.name} is not in {file}")
            elif term.rest not in ("", defined):
                found.append(f"{term.name}{defined} in {file} was {term.name}{term.rest}")
    return found


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (0, 31, 2) for ``0.31.2rc1+cpu``."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


# ---------------------------------------------------------------- sources

Names = dict[str, ast.AST]
"""Names that a file or a class defines, with their definitions."""


def describe(top: Names, name: str) -> str | None:
    """The text that the table would have after ``name``, or None if ``name`` is not defined.

    ``top`` has the top-level names of the file. The text is "" for a definition that has neither
    parameters nor a default.
    """
    outer, _, member = name.partition(".")
    found = top.get(outer)
    if not member or found is None:
        return None if found is None else _text(found)
    members = _members(top, found) if isinstance(found, ast.ClassDef) else {}
    if member == "abstract":
        abstract = (name for name, node in members.items() if _decorated(node, "abstractmethod"))
        return " " + " ".join(sorted(abstract))
    return _text(members[member]) if member in members else None


def _top_level(file: Path) -> Names:
    """The top-level names of a file; none if it cannot be read."""
    try:
        return dict(_named(ast.parse(file.read_bytes()).body))
    except (OSError, SyntaxError, ValueError):
        return {}


def _named(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.Assign):
            yield from ((name.id, node) for name in node.targets if isinstance(name, ast.Name))


def _members(top: Names, owner: ast.ClassDef) -> Names:
    """The members of a class and of its base classes in the same file."""
    found: Names = {}
    for base in reversed(owner.bases):
        parent = top.get(base.id) if isinstance(base, ast.Name) else None
        if isinstance(parent, ast.ClassDef):
            found |= _members(top, parent)
    own = dict(_named(owner.body))
    for node in ast.walk(own.get("__init__", ast.Pass())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found[node.attr] = ast.Pass()
    return found | own


def _decorated(node: ast.AST, by: str) -> bool:
    return any(by in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", []))


def _text(node: ast.AST) -> str:
    """A function's parameters or a field's default; "" for any other definition."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if _decorated(node, "property"):
            return ""
        for part in ast.walk(node.args):
            if isinstance(part, ast.arg):
                part.annotation = None
        return f"({ast.unparse(node.args)})"
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        value = node.value
        if isinstance(value, ast.Call):
            value = next((word.value for word in value.keywords if word.arg == "default"), value)
        return f" = {ast.unparse(value)}"
    return ""
