"""Blend in vLLM, without an engine: what is refused at the start, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import vllm

from kvass.blend.plan import FirstK
from kvass.connectors.vllm import configuration, namespace
from kvass.errors import UsageError
from kvass.types import GroupLayout
from tests.support.vllm.scheduler import before, make_configs, read_setup

pytestmark = pytest.mark.skipif(
    before("0.32") or not before("0.33"), reason="blend is for vLLM 0.32 alone"
)

FULL = GroupLayout("full", 32, ("layer",), (4096,))


def configs(blend: str = "first_k:16") -> tuple[Any, Any]:
    """Of an engine that has all that blend needs."""
    config, caches = make_configs({"kvass.blend": blend})
    scheduler = "kvass.connectors.vllm.blend.BlendScheduler"
    config.scheduler_config.scheduler_cls = scheduler
    config.scheduler_config.async_scheduling = False
    config.compilation_config.cudagraph_mode = vllm.config.CUDAGraphMode.NONE
    return config, caches


def refuse(config: Any, *layouts: GroupLayout, blend: str = "none") -> str:
    with pytest.raises(UsageError) as refused:
        configuration._blend(blend, config, layouts or [FULL])
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_it_needs() -> None:
    assert read_setup(*configs()).blend == FirstK(16)
    assert read_setup(*make_configs()).blend is None


CHANGES: dict[str, Callable[[Any], object]] = {
    "--scheduler-cls kvass": lambda c: setattr(c.scheduler_config, "scheduler_cls", None),
    "asynchronous": lambda c: setattr(c.scheduler_config, "async_scheduling", True),
    "CUDA graphs": lambda c: setattr(
        c.compilation_config, "cudagraph_mode", vllm.config.CUDAGraphMode.FULL
    ),
    "speculative": lambda c: setattr(c, "speculative_config", SimpleNamespace()),
    "several ranks": lambda c: setattr(c.parallel_config, "world_size", 2),
    "LoRA": lambda c: setattr(c, "lora_config", SimpleNamespace()),
    "do not generate": lambda c: setattr(c.model_config, "runner_type", "pooling"),
    "fp8": lambda c: setattr(c.cache_config, "cache_dtype", "fp8_e4m3"),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_an_engine_is_refused_with_the_reason(reason: str) -> None:
    config, _ = configs()
    CHANGES[reason](config)
    assert reason in refuse(config)


def test_models_versions_and_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = configs()
    assert "sliding_window" in refuse(config, GroupLayout("sliding_window", 32, ("l",), (1,), 64))
    assert "state" in refuse(config, FULL, GroupLayout("state", 32, ("l",), (1,)))
    assert "several KV cache groups" in refuse(config, FULL, FULL)
    assert "kv_dev:0.1" in refuse(config, blend="kv_dev:0.1")
    assert "first_k:TOKENS" in refuse(config, blend="some")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert "model runner V2" in refuse(config)
    monkeypatch.undo()
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    assert "never tried with vLLM 0.31.0, only 0.32.0" in refuse(config)
    monkeypatch.undo()
    monkeypatch.setattr(namespace, "device_kind", lambda: "cuda")
    assert "'cuda'" in refuse(config)
