"""Settings and environment variables of vLLM that do not go into a namespace unchanged.

Laws of this file:

- A field that is not listed goes in. So a new field of vLLM separates engines with different values
  until somebody lists it. ``docs/namespace-fields.md`` names every field: those that go in, those
  that are read by a rule, and those that are left out, with the reason.
  ``tests/engine/test_fields.py`` fails for a field that is not on that page, and for one on which
  the page and this file differ.
- A class of settings is left out as a whole only if the reason also holds for any field that a
  later version may add.
- A field that goes in has the same value in the scheduler's process and in every worker's. A field
  that a worker changes while it loads the model is left out, or read by a rule of its own.

The lists may name fields that the running version of vLLM does not have. A file of vLLM's version
(see ``adapt.py``).
"""

from __future__ import annotations

from typing import Final

SKIPPED: Final = {
    name: frozenset(fields.split())
    for name, fields in {
        "VllmConfig": """
            additional_config ec_manager_config instance_id kv_events_config kv_transfer_config
            logging_config lora_config observability_config optimization_level performance_mode
            profiler_config quant_config reasoning_config shutdown_timeout structured_outputs_config
            watchdog_config watermark_config weight_transfer_config
        """,
        "ModelConfig": """
            allow_deprecated_quantization allowed_local_media_path allowed_media_domains
            enable_cumem_allocator enable_nccl_comm_suspend enable_prompt_embeds
            enable_return_routed_experts enable_sleep_mode enable_trace_replay enforce_eager
            generation_config hf_config hf_overrides hf_text_config hf_token io_processor_plugin
            is_submodel_config logits_processors logprobs_mode max_logprobs max_model_len model
            model_weights override_generation_config pooler_config renderer_num_workers
            return_sampling_mask revision seed served_model_name skip_tokenizer_init
            sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names
            spec_target_max_model_len tokenizer tokenizer_mode tokenizer_revision use_fp64_gumbel
            word_embeddings_untied_by_checkpoint
        """,
        "MultiModalConfig": """
            allow_missing_mm_embeddings enable_mm_embeds interleave_mm_strings limit_per_prompt
            mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
            mm_encoder_fp8_scale_save_path mm_hasher_algorithm mm_ipc_gpu_memory_gb
            mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
            mm_tensor_ipc skip_mm_profiling
        """,
        "CacheConfig": """
            _block_size_resolved block_size cache_dtype cache_hit_alignment_tokens
            effective_attention_block_size enable_mamba_shared_prefix_checkpoint
            enable_prefix_caching gpu_memory_utilization hash_block_size is_attention_free
            kv_cache_dtype_skip_layers kv_cache_layout kv_cache_max_concurrency
            kv_cache_memory_bytes kv_cache_size_tokens kv_offloading_backend kv_offloading_size
            mamba_block_size mamba_cache_mode mamba_page_size_padded num_cpu_blocks num_gpu_blocks
            num_gpu_blocks_override prefix_cache_retention_interval prefix_caching_hash_algo
            prefix_match_unit simple_cpu_offload_num_blocks skip_page_size_padded sliding_window
            user_specified_block_size user_specified_mamba_block_size
        """,
        "ParallelConfig": """
            _allow_auto_resolve_cp_interleave_size _api_process_count _api_process_rank
            _coord_store_port _data_parallel_master_port_list assigned_physical_gpu_ids
            cp_kv_cache_interleave_size cpu_distributed_timeout_seconds data_parallel_backend
            data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index
            data_parallel_master_ip data_parallel_master_port data_parallel_rank
            data_parallel_rank_local data_parallel_rpc_port data_parallel_size
            data_parallel_size_local dbo_decode_token_threshold dbo_prefill_token_threshold
            dcp_kv_cache_interleave_size decode_context_parallel_size disable_custom_all_reduce
            disable_nccl_for_dp_synchronization distributed_executor_backend
            distributed_timeout_seconds dp_sync_interval elastic_ep_max_dp_size
            enable_batch_sharded_sampling enable_dbo enable_elastic_ep enable_ep_weight_filter
            enable_eplb enable_fault_tolerance enable_shm_tensor_arena eplb_config
            fault_tolerance_config is_moe_model master_addr master_port
            max_parallel_loading_workers nnodes node_rank numa_bind numa_bind_cpus numa_bind_nodes
            pipeline_parallel_size placement_group prefill_context_parallel_size rank
            ray_runtime_env ray_workers_use_nsight tensor_parallel_size ubatch_size world_size
        """,
        "SchedulerConfig": """
            async_scheduling disable_chunked_mm_input disable_hybrid_kv_cache_manager
            enable_chunked_prefill encoder_cache_size is_multimodal_model
            long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_active_seqs
            max_num_batched_tokens max_num_encoder_input_tokens max_num_queued_reqs
            max_num_queued_tokens max_num_scheduled_tokens max_num_seqs policy
            prefill_schedule_interval runner_type scheduler_cls scheduler_reserve_full_isl
            stream_interval watermark
        """,
        "LoadConfig": """
            download_dir pt_load_map_location safetensors_load_strategy
            safetensors_prefetch_block_size safetensors_prefetch_num_threads use_tqdm_on_load
        """,
        "OffloadConfig": "offload_backend prefetch uva",
        "UVAOffloadConfig": "cpu_offload_gb cpu_offload_params",
        "PrefetchOffloadConfig": """
            offload_group_size offload_num_in_group offload_params offload_prefetch_step
        """,
        "HiSparseConfig": "device_buffer_size eager_host_mirror",
        "AuxOutputConfig": "enable_return_routed_experts max_bytes",
        "EngramConfig": "cpu_offload dp_shared_memory embedding_across_dp use_thp",
        "KernelConfig": """
            enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup
            enable_rocm_segmented_attn_autotune
        """,
        "LoRAConfig": """
            default_mm_loras max_cpu_loras max_lora_cls_labels max_lora_rank max_loras
            specialize_active_lora
        """,
        "SpeculativeConfig": """
            disable_eagle_block_drop disable_padded_drafter_batch draft_model_config
            draft_parallel_config draft_sample_method dspark_draft_topk
            enable_adaptive_verification enforce_eager method model num_speculative_tokens
            num_speculative_tokens_per_batch_size prompt_lookup_max prompt_lookup_min
            rejection_sample_method revision suffix_decoding_max_cached_requests
            suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth
            suffix_decoding_min_token_prob synthetic_acceptance_length synthetic_acceptance_rates
            target_model_config target_parallel_config use_local_argmax_reduction
        """,
        "CompilationConfig": """
            cache_dir compilation_time compile_cache_save_format compile_ranges_endpoints
            compile_sizes cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_decoder_replay
            cudagraph_mm_encoder cudagraph_mode cudagraph_num_of_warmups cudagraph_specialize_lora
            custom_ops debug_dump_path decoder_replay_cudagraph_capture_sizes
            decoder_replay_trim_threshold disabled_custom_ops enabled_custom_ops
            encoder_compilation_time encoder_cudagraph_max_frames_per_batch
            encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_token_budgets
            fast_moe_cold_start inductor_compile_config inductor_passes local_cache_dir
            max_cudagraph_capture_size splitting_ops static_all_moe_layers static_forward_context
            traced_files
        """,
        "DynamicShapesConfig": "evaluate_guards",
        "DeviceConfig": "device device_type",
        "ECTransferConfig": """
            ec_buffer_device ec_buffer_size ec_connector_extra_config ec_ip ec_parallel_size ec_port
            ec_rank engine_id mm_encoder_output_widths
        """,
    }.items()
}
"""For each class, the fields that are read by a rule or left out."""

_VARIABLES: Final = """
    CMAKE_BUILD_TYPE CUDA_HOME CUDA_VISIBLE_DEVICES FORCE_COLOR LD_LIBRARY_PATH LOCAL_RANK MAX_JOBS
    MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME NO_COLOR NVCC_THREADS
    S3_ACCESS_KEY_ID S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY VERBOSE
    VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN
    VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_ALLOW_INSECURE_SERIALIZATION
    VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_ALLREDUCE_USE_SYMM_MEM
    VLLM_API_KEY VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_AUDIO_FETCH_TIMEOUT
    VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL
    VLLM_CACHE_ROOT VLLM_CHAT_TEMPLATE_FUEL VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT
    VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_COMPUTE_NANS_IN_LOGITS VLLM_CONFIGURE_LOGGING
    VLLM_CONFIG_ROOT VLLM_CPU_CI_ENV VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU
    VLLM_CPU_OMP_THREADS_BIND VLLM_CUDART_SO_PATH VLLM_CUDA_COMPATIBILITY_PATH
    VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DBO_COMM_SMS VLLM_DEBUG_DUMP_PATH
    VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE
    VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE
    VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_PREFER_OVERLAP
    VLLM_DEEP_GEMM_WARMUP VLLM_DISABLE_COMPILE_CACHE VLLM_DISABLE_LOG_LOGO
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_DISABLE_SHARED_EXPERTS_STREAM
    VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_DOCKER_BUILD_CONTEXT VLLM_DO_NOT_TRACK VLLM_DP_MASTER_IP
    VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST
    VLLM_EC_SIDE_CHANNEL_PORT VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH
    VLLM_ENABLE_COHERE_API VLLM_ENABLE_CUDAGRAPH_GC VLLM_ENABLE_CUDA_COMPATIBILITY
    VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_STARTUP_PLAN VLLM_ENABLE_V1_MULTIPROCESSING
    VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_ENGINE_READY_TIMEOUT_S
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_FASTSAFETENSORS_QUEUE_SIZE
    VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_FORCE_AOT_LOAD
    VLLM_GC_DEBUG VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS
    VLLM_GPU_NIC_PCIE_MAPPING VLLM_GPU_SYNC_CHECK VLLM_HAS_FLASHINFER_CUBIN VLLM_HOST_IP
    VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_IMAGE_FETCH_TIMEOUT
    VLLM_IMAGE_TAG VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_KV_CACHE_LAYOUT
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_LOGGING_COLOR
    VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM
    VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_LOG_STATS_INTERVAL VLLM_LOOPBACK_IP
    VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM VLLM_LORA_RESOLVER_CACHE_DIR
    VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_MAIN_CUDA_VERSION VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
    VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_PREPROCESS_WORKERS
    VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_EMBED_DECODE_BYTES
    VLLM_MAX_IMAGE_PIXELS VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES
    VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES
    VLLM_MAX_STOP_STRINGS VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS
    VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS
    VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_MLA_DISABLE VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
    VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT
    VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS
    VLLM_MOONCAKE_STORE_TIER_LOG VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD
    VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH
    VLLM_NIC_SELECTION_VARS VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT
    VLLM_NO_USAGE_STATS VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME
    VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS
    VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_PATTERN_MATCH_DEBUG VLLM_PLUGINS
    VLLM_PORT VLLM_PP_LAYER_PARTITION VLLM_PROCESS_NAME_PREFIX VLLM_RAISE_ON_LOGIT_NANS
    VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY
    VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY
    VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS
    VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_REQUEST_BODY_LOG_LEVEL VLLM_RINGBUFFER_WARNING_INTERVAL
    VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_ROCM_USE_SKINNY_GEMM VLLM_RPC_BASE_PATH
    VLLM_RUST_FRONTEND_PATH VLLM_SERVER_DEV_MODE VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
    VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SKIP_P2P_CHECK VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX
    VLLM_SKIP_VERSION_SUFFIX VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_SSM_CONV_STATE_LAYOUT
    VLLM_SYSTEM_START_DATE VLLM_TARGET_DEVICE VLLM_TEST_FORCE_LOAD_FORMAT
    VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_TRACE_FUNCTION
    VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_TUNED_CONFIG_FOLDER VLLM_USAGE_SOURCE
    VLLM_USAGE_STATS_SERVER VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_BYTECODE_HOOK
    VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS VLLM_USE_FLASHINFER_SAMPLER
    VLLM_USE_LAYERNAME VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST
    VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM
    VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_RUST_BENCH
    VLLM_USE_RUST_FRONTEND VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_USE_SPINLOOP_EXT
    VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_V1_USE_OUTLINES_CACHE VLLM_VIDEO_FETCH_TIMEOUT
    VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
    VLLM_WORKER_MULTIPROC_METHOD VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_WSL2_ENABLE_PIN_MEMORY
    VLLM_XGRAMMAR_CACHE_MB VLLM_XLA_CACHE_PATH VLLM_XLA_CHECK_RECOMPILATION VLLM_XPU_PP_MICROBATCH
    VLLM_XPU_USE_SAMPLER_KERNEL
"""
VARIABLES: Final = frozenset(_VARIABLES.split())
"""Variables of ``vllm.envs`` that are read by a rule or left out. Variables that vLLM itself sets
in a worker are among them."""
