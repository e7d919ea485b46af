"""The settings and environment variables of SGLang that are not part of a namespace.

Laws of this file:

- A setting that is not listed goes in. So a new setting of SGLang separates engines with different
  values until somebody lists it here.
- A setting is listed only if KV is the same for all its values, or if it is read by a rule. No
  group of settings is left out as a whole, because a later version may add others to it.

The lists may name settings that the running version does not have.
"""

from __future__ import annotations

import re
from typing import Final

_WEIGHTS = """
model_path revision download_dir load_format speculative_draft_model_path
speculative_draft_model_revision speculative_draft_load_format lora_paths custom_weight_loader
checkpoint_engine_wait_weights_before_ready delete_ckpt_after_loading engine_info_bootstrap_port
model_checksum model_loader_extra_config modelexpress_config
modelopt_checkpoint_save_path modelopt_export_path remote_instance_weight_loader_backend
remote_instance_weight_loader_seed_instance_ip
remote_instance_weight_loader_seed_instance_service_port
remote_instance_weight_loader_send_weights_group_ports
remote_instance_weight_loader_start_seed_via_transfer_engine startup_weight_load_mode
weight_cache_mode weight_cache_socket weight_cache_timeout weight_loader_disable_mmap
weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints
weight_loader_prefetch_num_threads weight_version enable_weights_cpu_backup
enable_draft_weights_cpu_backup
"""
"""Read by ``weight_files.py``, or how the weights get into memory."""

_PROCESSES = """
base_gpu_id custom_sigquit_handler gc_threshold gpu_id_step numa_node random_seed sleep_on_idle
soft_watchdog_timeout use_ray watchdog_timeout dist_init_addr dist_timeout gated_launch_port
nccl_port nnodes node_rank load_balance_method ep_join_rank_offset elastic_ep_scale_timeout
enable_memory_saver pre_warm_nccl disable_outlines_disk_cache
enable_dp_attention_local_control_broadcast enable_p2p_check dp_size
"""
"""Names, addresses and places of processes. Engines of a data-parallel group have the same KV.
``random_seed`` is read by a rule where weights are drawn from it."""

_TOKENS = """
admin_api_key allow_auto_truncate api_key asr_max_buffer_seconds asr_max_concurrent_sessions
batch_notify_size chat_template completion_template constrained_json_disable_any_whitespace
constrained_json_max_whitespace_cnt constrained_json_whitespace_pattern
default_chat_template_kwargs detokenizer_worker_num disable_tokenizer_batch_decode
dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_cache_report
enable_dynamic_batch_tokenizer enable_http2 enable_http_worker_reuseport enable_response_store
enable_ssl_refresh enable_streaming_session enable_strict_thinking enable_tokenizer_batch_encode
fastapi_root_path file_storage_path grpc_mode grpc_port grpc_response_timeout_secs
grpc_worker_threads hf_chat_template_name host http2_initial_connection_window_size
http2_max_concurrent_streams incremental_streaming_output port preferred_sampling_params
reasoning_parser return_input_ids return_output_ids sampling_defaults served_model_name sidecar
sidecar_args skip_server_warmup skip_tokenizer_init smg_grpc_mode ssl_ca_certs ssl_certfile
ssl_keyfile ssl_keyfile_password stream_interval stream_response_default_include_usage
strip_thinking_cache tokenizer_backend tokenizer_mode tokenizer_path tokenizer_worker_num
tool_call_parser tool_server trust_request_chat_template warmups grammar_backend sampling_backend
enable_custom_logit_processor enable_return_hidden_states return_hidden_states_mode
sampling_mask_max_tokens watermark_config watermark_context_window watermark_default_enabled
watermark_enforce_all watermark_key watermark_key_b watermark_max_probability
watermark_mixing_probability context_length
"""
"""How prompts become tokens and tokens become answers. The tokens are in the keys of pages."""

_REPORTS = """
bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token crash_dump_folder
debug_tensor_dump_input_file debug_tensor_dump_layers debug_tensor_dump_output_folder
decode_log_interval enable_forward_pass_metrics enable_metrics enable_metrics_for_all_schedulers
enable_mfu_metrics enable_request_time_stats_logging enable_trace export_metrics_to_file
export_metrics_to_file_dir extra_metric_labels forward_pass_metrics_ipc_name
forward_pass_metrics_worker_id gc_warning_threshold_secs generation_tokens_buckets kv_canary
kv_canary_real_data kv_canary_sweep_interval kv_events_config load_publish_endpoint
load_snapshot_publish_interval log_level log_level_http log_requests log_requests_format
log_requests_level log_requests_target otlp_service_name otlp_traces_endpoint
prompt_tokens_buckets show_time_cost smg_http_sidecar_port stat_loggers
tokenizer_metrics_allowed_custom_labels tokenizer_metrics_custom_labels_header trace_modules
uvicorn_access_log_exclude_prefixes enable_layerwise_nvtx_marker expert_balancedness_report_mode
expert_distribution_recorder_buffer_size expert_distribution_recorder_mode spec_trace_dir
enable_profile_cuda_graph debug_cuda_graph
"""
"""What is logged, measured or reported."""

_MEMORY = """
_radix_eviction_policy_explicitly_set disable_radix_cache enable_hierarchical_cache
enable_session_radix_cache hicache_host_memory_fraction hicache_host_memory_mode
hicache_io_backend hicache_mem_layout hicache_ratio hicache_size hicache_storage_backend
hicache_storage_backend_extra_config hicache_storage_prefetch_policy
hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval
hicache_write_policy radix_cache_backend radix_eviction_policy radix_eviction_policy_config
mem_fraction_static max_total_tokens mamba_full_memory_ratio max_mamba_cache_size
swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set int8_mamba_ckpt_size
mamba_max_states_per_path enable_unified_cache_external_linker
unified_cache_external_linker_backend unified_cache_external_linker_config
"""
"""How much memory caches have, and what they evict. The layout of a page is a field of its own."""

_SCHEDULING = """
abort_on_priority_when_disabled default_priority_value disable_priority_preemption
enable_prefill_delayer enable_priority_scheduling max_queued_requests max_running_requests
min_free_slots_delay prefill_decode_interval prefill_decode_interval_min_bs
prefill_delayer_forward_passes_buckets prefill_delayer_max_delay_ms
prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio
prefill_delayer_token_usage_low_watermark prefill_delayer_wait_seconds_buckets
prefill_max_requests priority_scheduling_preemption_threshold retraction_policy
schedule_conservativeness schedule_low_priority_values_first schedule_policy
scheduler_recv_interval lora_drain_wait_threshold lora_eviction_policy max_loaded_loras
enable_lora_overlap_loading
"""
"""Which requests run when."""

_TRANSFER = """
disaggregation_bootstrap_port disaggregation_decode_allocation_policy
disaggregation_decode_enable_offload_kvcache disaggregation_decode_enable_radix_cache
disaggregation_decode_extra_slots disaggregation_decode_host_receive_threshold
disaggregation_decode_polling_interval disaggregation_decode_retraction_backup
disaggregation_enable_kv_checksum disaggregation_ib_device disaggregation_mode
disaggregation_transfer_backend enable_pd_role_switch num_reserved_decode_tokens
optimistic_prefill_attempts
"""
"""How a prefill engine sends KV to a decode engine. Both compute the same KV."""

_MEDIA = """
allowed_media_domains enable_mm_global_cache limit_mm_data_per_request media_url_max_file_size_mb
mm_feature_transport mm_global_cache_backend mm_io_worker_num mm_preprocess_cache_size_mb
mm_processor_worker_num keep_mm_feature_on_device enable_broadcast_mm_inputs_process
"""
"""Where images and other media come from, and how they travel."""

LEFT_OUT: Final = frozenset(
    " ".join(
        (_WEIGHTS, _PROCESSES, _TOKENS, _REPORTS, _MEMORY, _SCHEDULING, _TRANSFER, _MEDIA)
    ).split()
)
"""Names of settings that are read by a rule or left out."""

VARIABLES: Final = re.compile("SGLANG_|SGL_")
"""Environment variables that go in if they are set."""
VARIABLES_LEFT_OUT: Final = re.compile(
    "SGLANG_(LOG_|TEST_|PROFILE_|TRACE_|HICACHE_|CUDA_COREDUMP|DISAGGREGATION_|OTLP_|MOONCAKE_).*"
    "|SGLANG_(RUN_ID|PORT|TCP_STORE_PORT|BACKUP_PORT_BASE|PLUGINS|IS_FIRST_RANK_ON_NODE|IS_IN_CI"
    "|TORCH_PROFILER_DIR|RAY_BUNDLE_INDICES|ONE_VISIBLE_DEVICE_PER_PROCESS|WARMUP_TIMEOUT"
    "|HUGEPAGE_SIZE|ENABLE_STRICT_MEM_CHECK_DURING_IDLE|DISTRIBUTED_INIT_METHOD_OVERRIDE"
    "|BLOCK_NONZERO_RANK_CHILDREN|HOST_IP|ZMQ_ALLOWED_PEERS|ZMQ_SOURCE_IP)"
)
"""Those of them that name places, ports and logs, or how much is reported."""
