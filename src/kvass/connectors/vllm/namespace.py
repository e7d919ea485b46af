"""The fields of a namespace, from vLLM's settings: engines share KV if all of them are equal.

Law of this file: a field is equal in all processes of one engine, whatever part of the model each
has, and in every engine whose pages hold the same. What only a rank knows (``groups.page_formats``)
is in the layout that it reports. A file of vLLM's version (see ``adapt.py``).
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any, Final

from kvass.connectors.vllm import device, environment, settings
from kvass.connectors.vllm.groups import all_specs
from kvass.engine import identity

WHEEL: Final = re.compile(r"(^|\.)(cpu|cu\d+|rocm[\d.]*|xpu|tpu|empty)(?=\.|$)")
"""What vLLM's own builds add to its version: the kind of device, which is a field of its own."""


def describe(vllm_config: Any, kv_cache_config: Any, version: str) -> dict[str, str]:
    """The tagged fields, but for those of weights, parallelism and options, and empty ones.

    ``version`` is vLLM's, whole. Raises ``identity.Indescribable``.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    fields = {
        "engine": f"vllm {code_version(version)}",
        "plugins": environment.plugins(),
        "environment": environment.variables(),
        "seed": str(model.seed) if str(vllm_config.load_config.load_format) == "dummy" else "",
        "positions": _positions(model),
        "processors": _transformers(model),
        "kv_dtype": _kv_dtype(cache, kv_cache_config),
        "states": _states(),
        "kv_layout": str(kv_cache_config.kv_cache_layout),
        "hash": _hash_identity(cache.prefix_caching_hash_algo),
        "device": device.describe(),
        "speculative": _speculative(vllm_config.speculative_config),
    }
    for name, taken in settings.taken_of(vllm_config, "vllm_config").items():
        fields[name] = identity.canonical(taken, name)
    return {name: text for name, text in fields.items() if text}


def code_version(version: str) -> str:
    """vLLM's version. What a build of somebody else adds to it is kept: its code may differ."""
    release, _, local = version.partition("+")
    local = WHEEL.sub("", local).strip(".")
    return f"{release}+{local}" if local else release


def _transformers(model: Any) -> str:
    """The version of ``transformers``, which makes pixels of images, and in vLLM's backend of that
    name computes the model. No release of vLLM names one version of it only."""
    if model.multimodal_config is None and "Transformers" not in str(model.architecture):
        return ""
    return f"transformers {metadata.version('transformers')}"


def _kv_dtype(cache: Any, kv_cache_config: Any) -> str:
    """With some backends of MLA a worker writes ``fp8_ds_mla`` into its own settings when it loads
    the model. The cache specs say it too, and the scheduler is given those."""
    told = [getattr(spec, "cache_dtype_str", None) for spec in all_specs(kv_cache_config)]
    dtype = "fp8_ds_mla" if "fp8_ds_mla" in told else cache.cache_dtype
    return identity.canonical([dtype, cache.kv_cache_dtype_skip_layers], "cache_dtype")


def _states() -> str:
    """How a convolution's state lies in memory (its shape is in the rank's layout)."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return str(get_conv_state_layout())


def _positions(model: Any) -> str:
    """Where the engine's maximum length reaches arithmetic: with LongRoPE (formerly "su") it
    chooses the rotary factors; Llama 4 scales its queries if it is large, unless told otherwise."""
    config = model.hf_text_config
    rope = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    text = identity.canonical(rope)
    length = str(model.max_model_len) if "longrope" in text or '"su"' in text else ""
    if "llama4" not in str(getattr(config, "model_type", "")):
        return length
    told = model.override_generation_config.get("attn_temperature_tuning")
    scales = [model.max_model_len > 32768, model.generation_config, told]
    return identity.canonical([length, *scales], "generation_config")


def _hash_identity(algorithm: str) -> str:
    """Algorithm and a digest of the seed, as vLLM's own resolver gives it."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    seed = resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
    return f"{algorithm}:{identity.digest([seed])}"


def _speculative(config: Any) -> str:
    """The draft model's layers share the cache. Its weights are in ``weights``."""
    if config is None:
        return ""
    return identity.canonical([config.method, config.num_speculative_tokens])


def adapter_settings(lora: Any) -> str:
    """Settings that change what LoRA adapters compute, of an engine that has some."""
    return "" if lora is None else settings.describe(lora, "lora_config")
