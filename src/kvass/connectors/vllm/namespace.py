"""The fields of a namespace, from vLLM's settings: engines share KV if all of them are equal.

``fields.py`` says which settings are left out; everything else goes in. A setting with its default
value is omitted, which keeps an identity short, and a variable of the environment that is not set.
A file of vLLM's version (see ``adapt.py``).

Laws of this file:

- A field is equal in all processes of one engine, whatever part of the model each has, and in every
  engine whose pages hold the same. What only a rank knows (``groups.page_formats``) is in the
  layout that it reports.
- No CUDA context is made in a process that has none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from kvass._version import code_version
from kvass.connectors.vllm.fields import SKIPPED, VARIABLES
from kvass.connectors.vllm.groups import all_specs
from kvass.engine import identity, weights

NOT_THE_MODELS: Final = frozenset(
    re.findall(
        r"\w+",
        "_attn_implementation attn_temperature_tuning image_token_id image_token_index "
        "max_model_len media_placeholder_token_id num_labels num_ln_in_parallel_attn "
        "projector_hidden_act use_sep_token _name_or_path _commit_hash",
    )
)
"""Attributes of a Hugging Face configuration that are left out. The last two say where it lay.
Models set the others while a worker loads them; they follow from the model's files and
``hf_overrides``, which count, and for Llama 4 from the rule for ``positions``."""

QUANTIZATION_FILE: Final = "quantization_config_file"
PLUGIN_GROUPS: Final = ("vllm.general_plugins", "vllm.platform_plugins")
"""Groups of entry points that vLLM loads in the processes that compute. Plug-ins of its other
groups see requests before they are hashed, or outputs."""
KNOWN_PLUGINS: Final = ("vllm", "kvass")
"""Packages whose plug-ins do not count: vLLM's version is a field, and kvass computes no page."""


def describe(vllm_config: Any, kv_cache_config: Any, version: str) -> dict[str, str]:
    """The tagged fields, but for those of weights, parallelism and options, and empty ones.
    ``version`` is vLLM's, whole. Raises ``identity.Indescribable``."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    model, cache = vllm_config.model_config, vllm_config.cache_config
    drafter = vllm_config.speculative_config  # its layers share the cache; ``weights`` has its own
    drafts = drafter and identity.canonical([drafter.method, drafter.num_speculative_tokens])
    # It makes pixels of images, and in vLLM's backend of that name computes the model.
    processors = model.multimodal_config is not None or "Transformers" in str(model.architecture)
    # With some backends of MLA a worker writes ``fp8_ds_mla`` into its own settings when it loads
    # the model. The cache specs say it too, and the scheduler is given those.
    told = [getattr(spec, "cache_dtype_str", None) for spec in all_specs(kv_cache_config)]
    dtype = "fp8_ds_mla" if "fp8_ds_mla" in told else cache.cache_dtype
    algorithm = cache.prefix_caching_hash_algo
    seed = resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
    fields = {
        "engine": f"vllm {code_version(version)}",
        "plugins": _plugins(),
        "environment": _variables(),
        "seed": str(model.seed) if str(vllm_config.load_config.load_format) == "dummy" else "",
        "positions": _positions(model),
        "processors": f"transformers {metadata.version('transformers')}" if processors else "",
        "kv_dtype": identity.canonical([dtype, cache.kv_cache_dtype_skip_layers], "cache_dtype"),
        "states": str(get_conv_state_layout()),  # their shape is in the rank's layout
        "kv_layout": str(kv_cache_config.kv_cache_layout),
        "hash": f"{algorithm}:{identity.digest([seed])}",
        "device": _device(),
        "speculative": drafts or "",
    }
    for name, taken in taken_of(vllm_config, "vllm_config").items():
        fields[name] = identity.canonical(taken, name)
    return {name: text for name, text in fields.items() if text}


def adapter_settings(lora: Any) -> str:
    """Settings that change what LoRA adapters compute, of an engine that has some."""
    taken = taken_of(lora, "lora_config") if lora is not None else {}
    return identity.canonical(taken, "lora_config") if taken else ""


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


# ---------------------------------------------------------------- the process and its device


def _variables() -> str:
    """The environment variables that go into a namespace, as vLLM reads them."""
    from vllm import envs

    names = envs.environment_variables.keys() & os.environ.keys() - VARIABLES
    found = {name: envs.environment_variables[name]() for name in names}
    return identity.canonical(found, "environment") if found else ""


def _plugins() -> str:
    """Other people's code in the processes that compute: the plug-ins that vLLM loads, by group,
    name, what they name, and their distribution's name and version. Raises
    ``identity.Indescribable``."""
    from vllm import envs

    allowed = envs.VLLM_PLUGINS
    found = set()
    for group in PLUGIN_GROUPS:
        for entry in metadata.entry_points(group=group):
            own = entry.value.partition(":")[0].split(".")[0] in KNOWN_PLUGINS
            if not own and (allowed is None or entry.name in allowed):
                dist = entry.dist
                of = "" if dist is None else f" of {dist.name} {dist.version}{_in_place(entry)}"
                found.add(f"{group} {entry.name} = {entry.value}{of}")
    return identity.canonical(sorted(found)) if found else ""


def _in_place(entry: Any) -> str:
    """The code of a plug-in that is installed in place (``pip install -e``), which changes without
    its version; empty for others. Raises ``identity.Indescribable``."""
    told = json.loads(entry.dist.read_text("direct_url.json") or "{}")
    if not told.get("dir_info", {}).get("editable"):
        return ""
    spec = find_spec(entry.value.partition(":")[0].split(".")[0])
    if spec is None:
        return ""  # vLLM cannot load it either
    files = [Path(spec.origin)] if spec.origin and not spec.submodule_search_locations else []
    for folder in spec.submodule_search_locations or ():
        files += [file for file in Path(folder).rglob("*") if file.suffix in (".py", ".so")]
    return " in place " + identity.digest(
        f"{file.name} {_file(str(file))}" for file in sorted(files)
    )


def device_kind() -> str:
    """vLLM's name of the device that holds the KV cache, e.g. ``cpu``."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def capability() -> tuple[int, int] | None:
    """The compute capability of the first device that this process may use; None on a CPU."""
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    return None if found is None else (int(found.major), int(found.minor))


def _device() -> str:
    """Device kind, and what chooses the kernels and with them what pages hold (backends, scales in
    equal layouts, exactness): a GPU's compute capability, a CPU's instruction sets. Raises
    ``identity.Indescribable``."""
    from vllm.platforms import current_platform

    if (kind := device_kind()) != "cpu":
        if (found := capability()) is None:
            raise identity.Indescribable("the device's compute capability cannot be read")
        return identity.canonical([current_platform.device_name, *found])  # tells ROCm from CUDA
    sets = (torch.cpu._is_avx512_supported(), torch.cpu._is_amx_tile_supported())
    chosen = torch.backends.cpu.get_cpu_capability()
    return identity.canonical([kind, platform.machine(), chosen, sets])


# ---------------------------------------------------------------- classes of settings


def taken_of(config: Any, name: str) -> dict[str, Any]:
    """The fields of a dataclass of settings that go into a namespace and are not at their default,
    as plain data. ``name``: what an error calls it. Raises ``identity.Indescribable``."""
    kind = type(config).__name__
    skipped = SKIPPED.get(kind, frozenset())
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        rule = RULES.get((kind, field.name))
        if not hasattr(config, field.name) or (rule is None and field.name in skipped):
            continue
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if rule is not None:
            value = rule(value)
        elif nested:
            value = taken_of(value, f"{name}.{field.name}")
        elif _is_default(field, value):
            continue
        if value or not (rule or nested):
            found[field.name] = value
    return found


def _is_default(field: Any, value: Any) -> bool:
    """vLLM's classes are pydantic's: a default may be wrapped."""
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    elif hasattr(default, "get_default"):
        default = default.get_default(call_default_factory=True)
    return value is default or (type(value) is type(default) and bool(value == default))


def _hf_config(config: Any) -> str:
    """A digest of the model's configuration. Its own type is the model's, which is a field."""

    def models_own(of: Any) -> Any:
        if not isinstance(of, dict):
            return of
        return {key: models_own(value) for key, value in of.items() if key not in NOT_THE_MODELS}

    plain = models_own(config.to_dict())
    plain.pop("dtype", None)
    return identity.digest([identity.canonical(plain, "hf_config")])


def _file(path: str | None) -> str:
    """A digest of a file's content. Raises ``identity.Indescribable`` if it cannot be read, or is
    perhaps not what the engine read."""
    if not path:
        return ""
    try:
        content, changed_ns = Path(path).read_bytes(), Path(path).stat().st_ctime_ns
    except OSError as error:
        raise identity.Indescribable(f"{path} cannot be read: {error}") from None
    if changed_ns > weights.started_ns():
        raise identity.Indescribable(f"{path} changed since this engine started: restart it")
    return hashlib.sha256(content).hexdigest()


def _overrides(given: Any) -> Any:
    """Overrides of the model's configuration. A file that they name counts by its content."""
    if isinstance(given, Mapping) and QUANTIZATION_FILE in given:
        return {**given, QUANTIZATION_FILE: _file(given[QUANTIZATION_FILE])}
    return given


def _inductor(options: Mapping[str, Any]) -> dict[str, Any]:
    """A worker adds ``guard_filter_fn`` when it compiles; a pass is an object with a ``uuid``."""
    return {
        name: str(value.uuid()) if hasattr(value, "uuid") else value
        for name, value in options.items()
        if name != "guard_filter_fn"
    }


def _draft(config: Any) -> dict[str, Any]:
    """A draft's settings but for its configuration and overrides, which its weights cover. A worker
    changes the configuration when it loads them, and vLLM itself makes the overrides."""
    found = taken_of(config, "draft_model_config") if config is not None else {}
    return {name: found[name] for name in found if name not in ("hf_config", "hf_overrides")}


RULES: Final[dict[tuple[str, str], Callable[[Any], Any]]] = {
    ("ModelConfig", "hf_config"): _hf_config,
    ("ModelConfig", "hf_overrides"): _overrides,
    ("MultiModalConfig", "mm_encoder_fp8_scale_path"): _file,
    ("CompilationConfig", "custom_ops"): lambda names: sorted(set(names)),
    ("CompilationConfig", "inductor_compile_config"): _inductor,
    ("SpeculativeConfig", "draft_model_config"): _draft,
    ("VllmConfig", "additional_config"): lambda of: (
        of if isinstance(of, dict) else of.compute_hash()
    ),
}
"""How a field is read that is listed as ``read`` and is not a field of the identity itself."""
