"""Which fields of vLLM's configuration are left out of a namespace, and why.

Laws of this file:

- A field is left out only if it is listed, with a reason. A field that no list names goes in, so a
  new field of vLLM separates engines until somebody has looked at it.
  ``tests/engine/test_fields.py`` fails for a field that is neither here nor in
  ``docs/namespace-fields.md``, which also lists what goes in.
- A class of settings is left out as a whole only if its reason holds for any field it may get.
- A field that goes in has the same value in the scheduler's process and in every worker's. A field
  that a worker changes while it loads the model is left out, or read by a rule of its own.

The lists may name fields that the running version of vLLM does not have. A file of vLLM's version
(see ``adapt.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

REASONS: Final = {
    "PAGES": "each rank's layout has the whole cache spec of each of its layers",
    "MEMORY": "how much memory is used, or where data lies in it",
    "BATCHES": "which requests run when, and how they are batched",
    "GRAPHS": "how kernels are launched, not what they compute",
    "SAMPLING": "how tokens are chosen or returned; they are in the block hashes",
    "PROMPTS": "how prompts are made or which are refused; their tokens are in the block hashes",
    "SPEED": "how quickly something is done; the result is the same",
    "ADDRESSES": "names, addresses and places of processes",
    "WATCHED": "what is logged, measured or reported",
    "DERIVED": "vLLM derives it from fields that are in",
}
"""Reasons that many lists have, by the word that stands for them."""


class Lists(NamedTuple):
    """The fields of one class of settings that do not go in as they are: a reason -> their names,
    separated by blanks. ``read``: by a rule of its own; the reason says which."""

    read: Mapping[str, str] = {}
    left: Mapping[str, str] = {}

    @classmethod
    def parse(cls, text: str) -> Lists:
        """From entries ``read|out REASON | NAMES``, each a line and its more indented ones. A
        reason in capitals is one of ``REASONS``."""
        kinds: dict[str, dict[str, str]] = {"read": {}, "out": {}}
        for entry in re.sub(r"\n {4,}", " ", text).strip().splitlines():
            kind, rest = entry.split(maxsplit=1)
            reason, names = rest.split(" | ")
            kinds[kind][REASONS.get(reason, reason)] = names
        return cls(*kinds.values())

    def skipped(self) -> frozenset[str]:
        """The fields of all lists."""
        return frozenset(n for lists in self for names in lists.values() for n in names.split())


FIELDS: Final = """
VllmConfig
  read settings of a platform's plug-in: itself if it is a dict, else its compute_hash() |
      additional_config
  read mixed into the keys of the requests that have an adapter | lora_config
  out made from the model's configuration and files; a worker completes it | quant_config
  out a default for other fields, which are in | optimization_level performance_mode
  out WATCHED | observability_config logging_config profiler_config kv_events_config
  out SAMPLING | watermark_config structured_outputs_config reasoning_config
  out MEMORY | ec_manager_config
  out how new weights arrive; the namespace is told of them otherwise | weight_transfer_config
  out ADDRESSES | instance_id
  out SPEED | shutdown_timeout

ModelConfig
  read by `weights` | model model_weights revision
  read a digest, without where it lay and without what models set while they load | hf_config
  read as `positions`, of a model whose arithmetic depends on it | max_model_len generation_config
      override_generation_config
  read as `seed`, if the weights are drawn from it (load_format dummy) | seed
  out DERIVED | hf_text_config is_submodel_config
  out from the checkpoint, which `weights` names | word_embeddings_untied_by_checkpoint
  out acts through compilation_config | enforce_eager
  out checked at start, and no more | allow_deprecated_quantization
  out PROMPTS | tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init
      allowed_local_media_path allowed_media_domains enable_prompt_embeds io_processor_plugin
      renderer_num_workers spec_target_max_model_len
  out SAMPLING | return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay
      logits_processors
  out ADDRESSES | served_model_name hf_token
  out MEMORY | enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
      sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator

MultiModalConfig
  read a digest of the file | mm_encoder_fp8_scale_path
  out written at run time, read by no engine under this name | mm_encoder_fp8_scale_save_path
      mm_encoder_fp8_scale_save_margin
  out PROMPTS | limit_per_prompt enable_mm_embeds interleave_mm_strings allow_missing_mm_embeddings
  out another algorithm gives an item another id | mm_hasher_algorithm
  out MEMORY | mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
      skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb

PoolerConfig
  out read after the KV is computed; kinds that make prefixes uncacheable are refused | task
      pooling_type seq_pooling_type tok_pooling_type use_activation enable_flash_late_interaction
      dimensions enable_chunked_processing max_embed_len logit_mean logit_sigma step_tag_id
      returned_token_ids

CacheConfig
  read as `kv_dtype`; fp8_ds_mla, which only a worker writes here, as the cache spec says |
      cache_dtype kv_cache_dtype_skip_layers
  read as `tokens` | block_size hash_block_size cache_hit_alignment_tokens
  read as `hash` | prefix_caching_hash_algo
  read as `kv_layout` | kv_cache_layout
  out PAGES | mamba_page_size_padded skip_page_size_padded mamba_block_size mamba_cache_mode
      sliding_window
  out DERIVED | is_attention_free user_specified_block_size effective_attention_block_size
      _block_size_resolved
  out which hits and states vLLM itself keeps | enable_prefix_caching prefix_match_unit
      prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint
  out MEMORY | gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks
      kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size
      kv_offloading_backend

ParallelConfig
  read as `parallel` | tensor_parallel_size pipeline_parallel_size decode_context_parallel_size
      cp_kv_cache_interleave_size dcp_kv_cache_interleave_size
  read more than one is refused | prefill_context_parallel_size
  out a data-parallel rank is an engine of its own, and they share | data_parallel_size
      data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_index
      data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval
      disable_nccl_for_dp_synchronization
  out the CPU's workers change it | disable_custom_all_reduce
  out which rank holds an expert; changes while the engine runs | enable_eplb eplb_config
      enable_elastic_ep elastic_ep_max_dp_size
  out DERIVED | is_moe_model world_size _allow_auto_resolve_cp_interleave_size
  out this process's place in the engine | rank node_rank nnodes _api_process_count
      _api_process_rank assigned_physical_gpu_ids
  out BATCHES | enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
  out SAMPLING | enable_batch_sharded_sampling
  out SPEED | enable_ep_weight_filter max_parallel_loading_workers enable_shm_tensor_arena
      distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes
      numa_bind_cpus enable_fault_tolerance fault_tolerance_config
  out ADDRESSES | data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port
      data_parallel_backend master_addr master_port _data_parallel_master_port_list
      _coord_store_port distributed_executor_backend ray_workers_use_nsight ray_runtime_env
      placement_group

SchedulerConfig
  out BATCHES | max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs
      long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_queued_reqs
      max_num_queued_tokens enable_chunked_prefill max_num_encoder_input_tokens policy
      disable_chunked_mm_input scheduler_cls scheduler_reserve_full_isl watermark
      prefill_schedule_interval async_scheduling stream_interval
  out MEMORY | encoder_cache_size
  out DERIVED | runner_type is_multimodal_model
  out each rank's layout has the groups that come of it | disable_hybrid_kv_cache_manager

LoadConfig
  out SPEED | safetensors_load_strategy safetensors_prefetch_num_threads
      safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location
  out where the weights lie; `weights` names them | download_dir

OffloadConfig
  out MEMORY | offload_backend uva prefetch

UVAOffloadConfig
  out MEMORY | cpu_offload_gb cpu_offload_params

PrefetchOffloadConfig
  out MEMORY | offload_group_size offload_num_in_group offload_prefetch_step offload_params

HiSparseConfig
  out MEMORY | device_buffer_size eager_host_mirror

AuxOutputConfig
  out an engine that returns routed experts is refused | enable_return_routed_experts
  out MEMORY | max_bytes

EngramConfig
  out MEMORY | cpu_offload embedding_across_dp dp_shared_memory use_thp

KernelConfig
  out SPEED | enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup
      enable_jit_warmup

LoRAConfig
  out MEMORY | max_lora_rank max_loras max_cpu_loras max_lora_cls_labels
  out a request names the adapter that it gets | default_mm_loras
  out GRAPHS | specialize_active_lora

SpeculativeConfig
  read as `speculative` | method num_speculative_tokens model revision
  read as a model's, but for what the names of its weights say | draft_model_config
  out as the model's own | target_model_config target_parallel_config draft_parallel_config
  out GRAPHS | enforce_eager disable_padded_drafter_batch use_local_argmax_reduction
  out how much of a hit is used | disable_eagle_block_drop
  out which tokens are proposed, or accepted; they are in the block hashes | prompt_lookup_max
      prompt_lookup_min num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth
      suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
      suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates
      synthetic_acceptance_length enable_adaptive_verification draft_sample_method dspark_draft_topk

CompilationConfig
  read as a set: vLLM may append a name more than once | custom_ops
  read without the filter of guards that a worker adds; passes by their uuid() |
      inductor_compile_config
  out part of inductor_compile_config | inductor_passes
  out how a graph is cut; some models' workers change it | splitting_ops
  out for which sizes is compiled; follows from batch sizes | compile_sizes compile_ranges_endpoints
  out GRAPHS | cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs
      cudagraph_specialize_lora max_cudagraph_capture_size cudagraph_mm_encoder
      encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch
      encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay
      decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold fast_moe_cold_start
  out the compiler's cache and what it writes | debug_dump_path cache_dir local_cache_dir
      compile_cache_save_format traced_files
  out a worker's own record of what it built | enabled_custom_ops disabled_custom_ops
      compilation_time encoder_compilation_time static_forward_context static_all_moe_layers

DynamicShapesConfig
  out GRAPHS | evaluate_guards

DeviceConfig
  read as `device` | device device_type

KVTransferConfig
  read as options of kvass | kv_connector_extra_config
  out which connector moves KV, and how | kv_connector kv_buffer_device kv_role
      kv_connector_module_path enable_permute_local_kv kv_load_failure_policy
  out ADDRESSES | engine_id kv_port

ECTransferConfig
  out ADDRESSES | engine_id ec_ip ec_port ec_connector_extra_config
  out MEMORY | ec_buffer_device ec_buffer_size
  out DERIVED | mm_encoder_output_widths

"""

LISTS: Final = {
    name: Lists.parse(entries)
    for name, entries in re.findall(r"^(\w+)\n((?: .+\n)+)", FIELDS, re.MULTILINE)
}
"""By class of ``vllm.config``."""

VARIABLES: Final = Lists.parse("""
read as `plugins`: those that are loaded | VLLM_PLUGINS
read as `kv_layout` | VLLM_KV_CACHE_LAYOUT
read as `states` | VLLM_SSM_CONV_STATE_LAYOUT
read as `parallel` and each rank's layers | VLLM_PP_LAYER_PARTITION
read PAGES | VLLM_MLA_DISABLE VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE
read acts through compilation_config | VLLM_CPU_CI_ENV
out workers set it themselves if batch invariance is on, which is in | VLLM_ROCM_USE_SKINNY_GEMM
    VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_USE_AOT_COMPILE
out the compiler's cache, and how compiled code is called | VLLM_DISABLE_COMPILE_CACHE
    VLLM_USE_BYTECODE_HOOK VLLM_FORCE_AOT_LOAD VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_LAYERNAME
    VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_XLA_CACHE_PATH VLLM_XLA_CHECK_RECOMPILATION
out read when vLLM is built or packed | VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION MAX_JOBS
    NVCC_THREADS VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX
    VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG
    CMAKE_BUILD_TYPE VERBOSE VLLM_SKIP_VERSION_SUFFIX VLLM_NCCL_INCLUDE_PATH
out where libraries and caches lie on this machine | VLLM_CONFIG_ROOT VLLM_CACHE_ROOT CUDA_HOME
    VLLM_NCCL_SO_PATH LD_LIBRARY_PATH VLLM_CUDART_SO_PATH VLLM_ASSETS_CACHE
    VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_HAS_FLASHINFER_CUBIN
    VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_CUDA_COMPATIBILITY_PATH VLLM_LORA_RESOLVER_CACHE_DIR
    VLLM_LORA_RESOLVER_HF_REPO_LIST
out tuned for speed: tiles and launches of the same kernels | VLLM_TUNED_CONFIG_FOLDER
    VLLM_DEEP_GEMM_WARMUP VLLM_TRITON_JIT_WARMUP_NUM_THREADS
out ADDRESSES | VLLM_HOST_IP VLLM_PORT VLLM_RPC_BASE_PATH LOCAL_RANK CUDA_VISIBLE_DEVICES
    VLLM_API_KEY S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL
    VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM
    VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_DISTRIBUTED_USE_SPLIT_GROUP
    VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_RAY_PER_WORKER_GPUS
    VLLM_RAY_BUNDLE_INDICES VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_DP_MASTER_IP
    VLLM_DP_MASTER_PORT VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RAY_DP_PACK_STRATEGY
    VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY
    VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_LOOPBACK_IP VLLM_PROCESS_NAME_PREFIX
    VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_GPU_NIC_PCIE_MAPPING
    VLLM_NIC_SELECTION_VARS VLLM_SKIP_P2P_CHECK VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME
out other connectors, and how KV is offloaded or encoder outputs are sent |
    VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST
    VLLM_P2P_SIDE_CHANNEL_PORT VLLM_P2P_MAX_PEERS VLLM_P2P_HANDSHAKE_TIMEOUT_S
    VLLM_P2P_IDLE_TIMEOUT_S VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT
    VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_STORE_TIER_LOG
    VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO
    MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS
    VLLM_USE_SIMPLE_KV_OFFLOAD
out WATCHED | VLLM_GPU_SYNC_CHECK VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_PATTERN_MATCH_DEBUG
    VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_USAGE_STATS_SERVER
    VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_CONFIGURE_LOGGING
    VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX
    VLLM_LOGGING_COLOR NO_COLOR FORCE_COLOR VLLM_LOG_STATS_INTERVAL VLLM_TRACE_FUNCTION
    VLLM_LOG_BATCHSIZE_INTERVAL VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS
    VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_GC_DEBUG
    VLLM_DEBUG_WORKSPACE VLLM_LOG_MODEL_INSPECTION VLLM_DEBUG_MFU_METRICS VLLM_DISABLE_LOG_LOGO
out SPEED | VLLM_ENGINE_READY_TIMEOUT_S VLLM_FASTSAFETENSORS_QUEUE_SIZE
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
    VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_USE_SPINLOOP_EXT
    VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_DBO_COMM_SMS
    VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE
    VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_PREFER_OVERLAP
out MEMORY | VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_CPU_KVCACHE_SPACE VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
    VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_ENABLE_STARTUP_PLAN
    VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
    VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
out GRAPHS | VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_ENABLE_CUDAGRAPH_GC
    VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
    VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM
    VLLM_XPU_PP_MICROBATCH
out BATCHES | VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN
out SAMPLING | VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL VLLM_V1_USE_OUTLINES_CACHE
    VLLM_XGRAMMAR_CACHE_MB VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
out PROMPTS | VLLM_USE_FASTOKENS VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_MAX_N_SEQUENCES
    VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS
    VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_SYSTEM_START_DATE VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS
    VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT
    VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB
    VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB
    VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
    VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_EMBED_DECODE_BYTES
    VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_IMAGE_PIXELS VLLM_ALLOW_LONG_MAX_MODEL_LEN
out the API server | VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_USE_RUST_FRONTEND VLLM_USE_RUST_BENCH
    VLLM_RUST_FRONTEND_PATH VLLM_SERVER_DEV_MODE VLLM_ALLOW_INSECURE_SERIALIZATION
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS
    VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API
    VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY
    VLLM_SKIP_MODEL_NAME_VALIDATION
out for vLLM's own tests | VLLM_TEST_FORCE_LOAD_FORMAT
""")
"""The variables that ``vllm.envs`` knows. One that vLLM itself sets in a worker is left out."""
