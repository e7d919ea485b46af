"""The check of the options of blend and of the engine: blend supports few settings of vLLM.

A file of vLLM's version (see ``adapt.py``). It is imported only if blend is on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import vllm

from kvass._version import code_version
from kvass.blend.plan import Selection, parse
from kvass.connectors.vllm import namespace
from kvass.errors import ConfigError
from kvass.types import GroupLayout

BLENDS: Final = frozenset({"0.32.0"})
"""Versions of vLLM whose internals ``blend.py`` overrides."""


def read_selection(
    blend: str, oracle: bool, vllm_config: Any, layouts: Sequence[GroupLayout]
) -> Selection:
    """The selection of tokens that ``blend``, the value of ``kvass.blend``, asks for. ``oracle`` is
    the value of ``kvass.blend_oracle``. Raises :class:`ConfigError` for an engine that blend does
    not support."""
    selection = parse(blend)
    if not callable(selection) and not oracle:
        raise ConfigError(
            f"kvass.blend {blend!r}: use first_k:TOKENS, all or none in vLLM; "
            "kv_dev works with kvass.blend_oracle alone"
        )
    if reason := next(_unblended(vllm_config, layouts), ""):
        raise ConfigError(f"kvass.blend: {reason}")
    return selection


def _unblended(vllm_config: Any, layouts: Sequence[GroupLayout]) -> Iterator[str]:
    """The reasons why blend does not support this engine."""
    parallel, schedules = vllm_config.parallel_config, vllm_config.scheduler_config
    if code_version(vllm.__version__) not in BLENDS:
        yield f"it was never tried with vLLM {vllm.__version__}, only {', '.join(sorted(BLENDS))}"
    if vllm_config.use_v2_model_runner:
        yield "model runner V2 is not supported: set VLLM_USE_V2_MODEL_RUNNER=0"
    if (kind := namespace.device_kind()) != "cpu":
        yield f"device {kind!r} is not supported, only cpu"
    if vllm_config.compilation_config.cudagraph_mode.name != "NONE":
        yield "CUDA graphs are not supported: set --enforce-eager"
    if schedules.async_scheduling:
        yield "asynchronous scheduling is not supported: set --no-async-scheduling"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding is not supported"
    if parallel.world_size > 1:
        yield "several ranks (TP, PP) are not supported"
    if vllm_config.lora_config is not None:
        yield "LoRA adapters are not supported"
    if vllm_config.model_config.runner_type != "generate":
        yield f"models that do not generate ({vllm_config.model_config.runner_type})"
    kinds = sorted({one.kind for one in layouts if not one.rules.whole})
    if kinds:
        yield f"layers of kind {', '.join(kinds)} are not supported, only full attention"
    if len(layouts) > 1 or vllm_config.model_config.use_mla:
        yield "MLA, and models with several KV cache groups, are not supported"
    if "fp8" in vllm_config.cache_config.cache_dtype:
        yield "a KV cache in fp8 is not supported"
    if not getattr(schedules.get_scheduler_cls(), "blends", False):
        yield "set --scheduler-cls kvass.connectors.vllm.blend.BlendScheduler"
