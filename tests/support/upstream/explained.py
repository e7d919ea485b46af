"""Which of vLLM's tests run, and why some of them end differently with kvass.

A test is named without its folder. Each reason is documented behaviour of kvass (docs/vllm.md), and
what the test asserts is not true of an engine in which kvass is, too.
"""

from __future__ import annotations

from typing import Final

CONNECTORS: Final = "tests/v1/kv_connector/unit/"
FILES: Final = tuple(
    f"{CONNECTORS}{name}.py"
    for name in (
        "test_multi_connector",
        "test_kv_connector_lifecycle",
        "test_remote_decode_lifecycle",
        "test_remote_prefill_lifecycle",
        "test_invalid_blocks_correctness",
        "test_error_propagation",
        "test_cache_pollution_prevention",
        "test_scheduler_kv_connector_override",
        "test_kv_load_failure_recovery",
    )
)
"""Those of the scheduler's dealings with any connector."""

EXPLAINED: Final[dict[str, tuple[str, ...]]] = {
    "kvass sets the policy for failed loads to recompute, for all connectors of the engine. The "
    "tests set fail for the whole engine, where kvass cannot tell it from vLLM's default. Who "
    "needs fail writes it into the other connector's entry, and kvass is inert": (
        "test_invalid_blocks_correctness.py::test_sync_fail_invalid_blocks_evicted",
        "test_error_propagation.py::test_error_propagation_sync_load",
        "test_error_propagation.py::test_error_propagation_async_load",
        "test_cache_pollution_prevention.py::test_invalid_blocks_evicted_prevents_cache_pollution",
        "test_kv_load_failure_recovery.py::test_failed_receive_completion_honors_failure_policy[fail]",
        "test_kv_load_failure_recovery.py::"
        "test_deepseek_v4_sync_load_failure_fails_and_evicts_real_blocks",
    ),
    "kvass holds the blocks that it stores until the copy has ended. The tests count who holds a "
    "block in the step that computes it": (
        "test_remote_prefill_lifecycle.py::test_basic_lifecycle",
        "test_remote_prefill_lifecycle.py::test_no_spurious_prefix_caching",
    ),
}
"""Why tests of these files differ, and which."""
