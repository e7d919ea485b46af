"""Which fields of vLLM's configuration are in a namespace, which are left out, and why.

Laws of this file:

- A field is left out only if it is listed as left out, with a reason. A field that no list names
  goes in, so a new field of vLLM separates engines until somebody has looked at it.
  ``tests/engine/test_fields.py`` fails for a field that no list names.
- A field that goes in has the same value in the scheduler's process and in every worker's. A field
  that a worker changes while it loads the model is left out, or read by a rule of its own.

The lists may name fields that the running version of vLLM does not have.
``docs/namespace-fields.md`` is made from them (``python tests/engine/fields_page.py``). A file of
vLLM's version (see ``adapt.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

REASONS: Final = {
    "CODE": "chooses the code that computes the model",
    "VALUES": "changes what is computed",
    "KERNELS": "chooses kernels, or in which order or type they sum",
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
    "NESTED": "a class of settings; its fields are listed below",
}
"""Reasons that many lists have, by the word that stands for them."""


class Lists(NamedTuple):
    """The fields of one class of settings: a reason -> the names of fields, separated by blanks.

    ``read``: in the namespace by a rule of its own; the reason says which.
    """

    taken: Mapping[str, str] = {}
    read: Mapping[str, str] = {}
    left: Mapping[str, str] = {}

    @classmethod
    def parse(cls, text: str) -> Lists:
        """From entries ``in|read|out REASON | NAMES``, each a line and its more indented ones. A
        reason in capitals is one of ``REASONS``."""
        kinds: dict[str, dict[str, str]] = {"in": {}, "read": {}, "out": {}}
        for entry in re.sub(r"\n {4,}", " ", text).strip().splitlines():
            kind, rest = entry.split(maxsplit=1)
            reason, names = rest.split(" | ")
            kinds[kind][REASONS[reason] if reason.isupper() else reason] = names
        return cls(*kinds.values())

    def skipped(self) -> frozenset[str]:
        """The fields that ``settings.taken_of`` does not take."""
        return frozenset(name for names in (self.read, self.left) for name in words(names))

    def named(self) -> frozenset[str]:
        """All fields that the lists name."""
        return self.skipped() | frozenset(words(self.taken))


def words(lists: Mapping[str, str]) -> list[str]:
    """The names in one kind of list."""
    return [name for names in lists.values() for name in names.split()]


FIELDS: Final = """
VllmConfig
  in NESTED | model_config cache_config parallel_config scheduler_config load_config offload_config
      attention_config aux_output_config engram_config mamba_config kernel_config speculative_config
      watermark_config diffusion_config structured_outputs_config observability_config
      logging_config compilation_config profiler_config kv_transfer_config kv_events_config
      ec_transfer_config ec_manager_config reasoning_config weight_transfer_config device_config
  read settings of a platform's plug-in: itself if it is a dict, else its compute_hash() |
      additional_config
  read mixed into the keys of the requests that have an adapter | lora_config
  out made from the model's configuration and files; a worker completes it | quant_config
  out a default for other fields, which are in | optimization_level performance_mode
  out ADDRESSES | instance_id
  out SPEED | shutdown_timeout

ModelConfig
  in CODE | runner convert trust_remote_code hf_config_path code_revision config_format hf_overrides
      model_class_overrides model_impl
  in VALUES | dtype quantization quantization_config disable_sliding_window
  in KERNELS | disable_cascade_attn
  in NESTED | pooler_config multimodal_config
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
  in what becomes of pixels, frames and sound before the encoder, in every request | media_io_kwargs
      mm_processor_kwargs mm_device_do_normalize
  in how the encoder computes | mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype
      mm_encoder_only language_model_only
  in which of the encoder's outputs are kept | video_pruning_rate video_pruning_method
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

QuantizationConfigArgs
  in VALUES | linear moe ignore targets

QuantSpec
  in VALUES | weight activation

CacheConfig
  in VALUES | mamba_cache_dtype mamba_ssm_cache_dtype use_replayssm replayssm_buffer_len
      use_kda_recoverssm kv_sharing_fast_prefill swa_bounded_replay
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
  in which rank computes what, and how sums over ranks are made | enable_hc_sp
      enable_expert_parallel expert_placement_strategy all2all_backend dcp_comm_backend
      dcp_q_replicate
  in CODE | worker_cls worker_extension_cls
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

EPLBConfig
  out which rank holds an expert; changes while the engine runs | window_size step_interval
      num_redundant_experts log_balancedness log_balancedness_interval use_async policy communicator
      enable_migration_batching

FaultToleranceConfig
  out SPEED | engine_recovery_timeout_sec

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
  in which weights are loaded, and what is done to them | load_format model_loader_extra_config
      ignore_patterns device
  out SPEED | safetensors_load_strategy safetensors_prefetch_num_threads
      safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location
  out where the weights lie; `weights` names them | download_dir

OffloadConfig
  out MEMORY | offload_backend uva prefetch

UVAOffloadConfig
  out MEMORY | cpu_offload_gb cpu_offload_params

PrefetchOffloadConfig
  out MEMORY | offload_group_size offload_num_in_group offload_prefetch_step offload_params

AttentionConfig
  in KERNELS | backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version
      flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
      tq_max_kv_splits_for_cuda_graph use_trtllm_attention mla_prefill_backend sparse_mla_force_mqa
      sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
      flex_attn_kv_block_size
  in VALUES | disable_flashinfer_q_quantization use_prefill_query_quantization indexer_kv_dtype
      indexer_sparse_logits use_non_causal
  in NESTED | hisparse_config

HiSparseConfig
  out MEMORY | device_buffer_size eager_host_mirror

AuxOutputConfig
  out an engine that returns routed experts is refused | enable_return_routed_experts
  out MEMORY | max_bytes

EngramConfig
  out MEMORY | cpu_offload embedding_across_dp dp_shared_memory use_thp

MambaConfig
  in KERNELS | backend ssu_algorithm
  in VALUES | enable_stochastic_rounding stochastic_rounding_philox_rounds

KernelConfig
  in KERNELS | ir_op_priority moe_backend sparse_indexer_topk_backend linear_backend
      linear_backend_per_quant
  out SPEED | enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup
      enable_jit_warmup

IrOpPriorityConfig
  in KERNELS | rms_norm fused_add_rms_norm gelu_and_mul_sparse

LoRAConfig
  in VALUES | lora_dtype target_modules enable_tower_connector_lora enable_mixed_moe_lora_format
      enable_moe_shared_loras
  in KERNELS | fully_sharded_loras
  out MEMORY | max_lora_rank max_loras max_cpu_loras max_lora_cls_labels
  out a request names the adapter that it gets | default_mm_loras
  out GRAPHS | specialize_active_lora

SpeculativeConfig
  in how the draft's layers, which share the cache, are computed | quantization moe_backend
      attention_backend kv_cache_dtype max_model_len code_revision index_share_for_mtp_iteration
      parallel_drafting use_heterogeneous_vocab draft_tensor_parallel_size tensor_parallel_size
  in NESTED | draft_load_config
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

WatermarkConfig
  out SAMPLING | key algorithm alpha context_width deduplicate_contexts
      deduplicate_contexts_max_history prf allow_target_only_watermarking

DiffusionConfig
  in VALUES | canvas_length max_denoising_steps

StructuredOutputsConfig
  out SAMPLING | backend disable_any_whitespace disable_additional_properties reasoning_parser
      reasoning_parser_plugin enable_in_reasoning

ReasoningConfig
  out SAMPLING | reasoning_parser reasoning_start_str reasoning_end_str _reasoning_start_token_ids
      _reasoning_end_token_ids _natural_reasoning_end_token_ids _enabled

ObservabilityConfig
  out WATCHED | show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
      per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample
      custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
      enable_mm_processor_stats enable_logging_iteration_details jit_monitor_mode
      jit_monitor_verbose

LoggingConfig
  out WATCHED | log_level formatter configure_logging pylogging_config_file

ProfilerConfig
  out WATCHED | profiler torch_profiler_dir torch_profiler_activities proton_profiler_dir
      proton_context proton_data proton_backend proton_mode proton_hook proton_output_format
      proton_graph_attribution torch_profiler_with_stack torch_profiler_with_flops
      torch_profiler_use_gzip torch_profiler_dump_cuda_time_total torch_profiler_record_shapes
      torch_profiler_with_memory capture_torch_profiler detailed_trace_annotation ignore_frontend
      delay_iterations max_iterations warmup_iterations active_iterations wait_iterations

CompilationConfig
  in which kernels the compiler makes or fuses | mode backend ir_enable_torch_wrap
      compile_mm_encoder use_inductor_graph_partition
  in NESTED | pass_config dynamic_shapes_config
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

PassConfig
  in which operations are fused | fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops
      fuse_allreduce_rms enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding
      fuse_mla_dual_rms_norm fuse_rope_kvcache fuse_qk_norm_rope_kvcache
      rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb

DynamicShapesConfig
  in what the compiler assumes of sizes | type assume_32_bit_indexing
  out GRAPHS | evaluate_guards

DeviceConfig
  read as `device` | device device_type

KVTransferConfig
  read as options of kvass | kv_connector_extra_config
  out which connector moves KV, and how | kv_connector kv_buffer_device kv_role
      kv_connector_module_path enable_permute_local_kv kv_load_failure_policy
  out ADDRESSES | engine_id kv_port

KVEventsConfig
  out WATCHED | enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm
      max_queue_size topic

ECTransferConfig
  in whether another engine computes the encoder's outputs | ec_connector ec_role
      ec_connector_module_path
  out ADDRESSES | engine_id ec_ip ec_port ec_connector_extra_config
  out MEMORY | ec_buffer_device ec_buffer_size
  out DERIVED | mm_encoder_output_widths

EncoderCacheManagerConfig
  out MEMORY | encoder_cache_manager_cls manager_config

WeightTransferConfig
  out how new weights arrive; the namespace is told of them otherwise | backend
"""

LISTS: Final = {
    name: Lists.parse(entries)
    for name, entries in re.findall(r"^(\w+)\n((?: .+\n)+)", FIELDS, re.MULTILINE)
}
"""By class of ``vllm.config``."""

NO_SETTINGS: Final = {
    "AudioDummyOptions": "part of MultiModalConfig.limit_per_prompt",
    "BaseDummyOptions": "part of MultiModalConfig.limit_per_prompt",
    "ImageDummyOptions": "part of MultiModalConfig.limit_per_prompt",
    "VideoDummyOptions": "part of MultiModalConfig.limit_per_prompt",
    "ModelArchitectureConfig": REASONS["DERIVED"],
    "Range": "a pair of numbers",
    "SpeechToTextConfig": REASONS["PROMPTS"],
    "SpeechToTextParams": REASONS["PROMPTS"],
}
"""Classes in ``vllm.config`` that no namespace reads, and why."""
