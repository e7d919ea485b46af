"""Who shares bytes with whom: the fields of a namespace (DESIGN section 4), from vLLM's settings.

Law of this file: a field is equal in all processes of one engine, whatever part of the model each
has, and in every engine whose pages hold the same. What only a rank knows (``groups.page_formats``)
is in the layout that it reports. A file of vLLM's version (see ``adapt.py``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from kvass.connectors.vllm import device, identity

CODE: Final = "hf_config_path config_format model_class_overrides model_impl code_revision"
"""Settings of the model that choose the code which computes it."""
ORIGIN: Final = frozenset({"_name_or_path", "_commit_hash"})  # ``weights`` says so already
LORA: Final = (
    "lora_dtype target_modules enable_tower_connector_lora "
    "enable_mixed_moe_lora_format enable_moe_shared_loras"
)


def describe(vllm_config: Any, kv_cache_config: Any, version: str) -> dict[str, str]:
    """The tagged fields, but for those of parallelism and of the options.

    Raises ``identity.Indescribable``.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    load, attention = vllm_config.load_config, vllm_config.attention_config
    kinds = [attention.backend, attention.backend_per_kind]
    kinds += [attention.use_non_causal, attention.indexer_kv_dtype]
    return {
        "engine": f"vllm {version}",
        "model": _model_name(model.model),
        "weights": _weights(model),
        "config": identity.canonical(_without_origin(model.hf_config.to_dict()), "hf_config"),
        "code": identity.canonical(
            {name: getattr(model, name) for name in CODE.split()}, "model_config"
        ),
        "overrides": identity.canonical(model.hf_overrides, "hf_overrides"),
        "loader": identity.canonical(
            [load.load_format, load.model_loader_extra_config]
            + ([model.seed] if str(load.load_format) == "dummy" else []),
            "load_config",
        ),
        "dtype": str(model.dtype),
        "quantization": identity.canonical(
            [model.quantization, model.quantization_config], "quant"
        ),
        "positions": _positions(model),
        "kv_dtype": identity.canonical([cache.cache_dtype, cache.kv_cache_dtype_skip_layers]),
        "states": _states(vllm_config),
        "kv_layout": str(kv_cache_config.kv_cache_layout),
        "hash": _hash_identity(cache.prefix_caching_hash_algo),
        "device": device.describe(),
        "attention": identity.canonical(kinds, "attention_config"),
        "speculative": _speculative(vllm_config.speculative_config),
    }


def _states(vllm_config: Any) -> str:
    """What of the settings chooses how a state is kept (its shape is in the rank's layout)."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    cache, mamba = vllm_config.cache_config, vllm_config.mamba_config
    types = [cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype]
    return identity.canonical([*types, get_conv_state_layout(), mamba.backend], "mamba_config")


def _without_origin(config: Any) -> Any:
    """A Hugging Face configuration but for where it and its parts lay."""
    if not isinstance(config, dict):
        return config
    return {name: _without_origin(of) for name, of in config.items() if name not in ORIGIN}


def _model_name(name: str) -> str:
    """For people (``kvass status``): a local path in its one spelling, anything else as it is."""
    return os.path.realpath(name) if os.path.exists(name) else name


def _weights(model: Any) -> str:
    """A local path by its files, anything else by name and revision (and commit, if known)."""
    for name in (model.model, model.model_weights):
        if name and os.path.exists(name):
            return f"local:{identity.local_weights(Path(name))}"
    commit = getattr(model.hf_config, "_commit_hash", None)
    return identity.canonical([model.model, model.model_weights, model.revision, commit])


def _positions(model: Any) -> str:
    """With LongRoPE (formerly "su"), the engine's maximum length chooses the rotary factors."""
    config = model.hf_text_config
    rope = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    text = identity.canonical(rope)
    return str(model.max_model_len) if "longrope" in text or '"su"' in text else ""


def _hash_identity(algorithm: str) -> str:
    """Algorithm and a digest of the seed, as vLLM's own resolver gives it."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    seed = resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
    return f"{algorithm}:{identity.digest([seed])}"


def _speculative(config: Any) -> str:
    """The draft model's layers share the cache, so its weights are part of the bytes."""
    if config is None:
        return ""
    weights = _weights(draft) if (draft := config.draft_model_config) is not None else ""
    return identity.canonical([config.method, config.num_speculative_tokens, weights])


def adapter_settings(lora: Any) -> str:
    """Settings that change what LoRA adapters compute, of an engine that has some."""
    return "" if lora is None else identity.canonical([getattr(lora, n) for n in LORA.split()])
