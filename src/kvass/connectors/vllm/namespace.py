"""The fields of a namespace, read from vLLM's settings. Engines share KV if all fields are equal.

``fields.py`` lists the settings that are left out. All other settings go into the namespace.
Settings with their default value and unset environment variables are omitted, which keeps
the fields short. A file of vLLM's version (see ``adapt.py``).

Laws of this file:

- A field is equal in all processes of one engine, whatever part of the model each has. It is also
  equal in all engines whose pages hold the same KV. What only a rank knows
  (``groups.page_formats``) is in the layout that the rank reports.
- It makes no CUDA context in a process that has none.
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
from kvass.connectors.vllm import making
from kvass.connectors.vllm.fields import SKIPPED, VARIABLES
from kvass.connectors.vllm.groups import all_specs
from kvass.engine import identity, weights

SKIPPED_HF_ATTRIBUTES: Final = frozenset(
    re.findall(
        r"\w+",
        "_attn_implementation attn_temperature_tuning image_token_id image_token_index "
        "max_model_len media_placeholder_token_id num_labels num_ln_in_parallel_attn "
        "projector_hidden_act use_sep_token _name_or_path _commit_hash",
    )
)
"""Attributes of a Hugging Face configuration that are left out. The last two say where it was
found. Models set the others while a worker loads them. Their values follow from the model's files,
from ``hf_overrides``, and for Llama 4 from the field ``positions``. All these are in the
namespace."""

QUANTIZATION_FILE: Final = "quantization_config_file"
PLUGIN_GROUPS: Final = ("vllm.general_plugins", "vllm.platform_plugins")
"""Groups of entry points whose plug-ins vLLM loads in workers. Plug-ins of other groups cannot
change KV. They handle only outputs, or requests that vLLM has not hashed yet."""
KNOWN_PLUGINS: Final = ("vllm", "kvass")
"""Packages whose plug-ins are left out: vLLM's version is a field, and kvass computes no KV."""


def describe(
    vllm_config: Any, kv_cache_config: Any, version: str, tokens: str, tag: str
) -> dict[str, str]:
    """The fields by name, but for ``weights``, whose name may come later. ``version`` is vLLM's
    complete version. ``tokens``: the sizes of chunks, blocks and hashes. Raises
    ``identity.Indescribable``."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    model, cache = vllm_config.model_config, vllm_config.cache_config
    # The drafter's layers share the cache. The field ``weights`` covers its weights.
    drafter = vllm_config.speculative_config
    drafts = drafter and identity.canonical([drafter.method, drafter.num_speculative_tokens])
    # The package transformers preprocesses images. In vLLM's backend of that name it is the model.
    processors = model.multimodal_config is not None or "Transformers" in str(model.architecture)
    # With some MLA backends a worker sets its own ``cache_dtype`` to ``fp8_ds_mla`` when it loads
    # the model. The scheduler's does not change, but its cache specs have that dtype, too.
    dtypes = [getattr(spec, "cache_dtype_str", None) for spec in all_specs(kv_cache_config)]
    dtype = "fp8_ds_mla" if "fp8_ds_mla" in dtypes else cache.cache_dtype
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
        "states": str(get_conv_state_layout()),  # the states' shape is in the rank's layout
        "kv_layout": str(kv_cache_config.kv_cache_layout),
        "hash": f"{algorithm}:{identity.digest([seed])}",
        "device": _device(),
        "speculative": drafts or "",
    }
    since_ns = making.since_ns(vllm_config)
    for name, value in settings_of(vllm_config, "vllm_config", since_ns).items():
        fields[name] = identity.canonical(value, name)
    parallel = vllm_config.parallel_config
    dcp = parallel.decode_context_parallel_size
    # These numbers decide which tokens, heads and layers a rank's page holds.
    ranks = [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, dcp]
    ranks.append(parallel.cp_kv_cache_interleave_size if dcp > 1 else 1)
    always = {"parallel": identity.canonical(ranks), "tokens": tokens, "tag": tag}
    return {name: text for name, text in fields.items() if text} | always


def adapter_settings(lora: Any) -> str:
    """The settings in ``lora``, vLLM's ``LoRAConfig`` or None, that change KV; "" if none."""
    settings = settings_of(lora, "lora_config") if lora is not None else {}
    return identity.canonical(settings, "lora_config") if settings else ""


def _positions(model: Any) -> str:
    """The settings through which the engine's maximum length changes KV. With LongRoPE (formerly
    "su") the length chooses the rotary factors. Llama 4 scales its queries if the length is large,
    unless the generation config turns that off."""
    config = model.hf_text_config
    rope = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    text = identity.canonical(rope)
    length = str(model.max_model_len) if "longrope" in text or '"su"' in text else ""
    if "llama4" not in str(getattr(config, "model_type", "")):
        return length
    tuning = model.override_generation_config.get("attn_temperature_tuning")
    scales = [model.max_model_len > 32768, model.generation_config, tuning]
    return identity.canonical([length, *scales], "generation_config")


# ---------------------------------------------------------------- the process and its device


def _variables() -> str:
    """The environment variables that go into a namespace, with the values vLLM reads."""
    from vllm import envs

    names = envs.environment_variables.keys() & os.environ.keys() - VARIABLES
    found = {name: envs.environment_variables[name]() for name in names}
    return identity.canonical(found, "environment") if found else ""


def _plugins() -> str:
    """The plug-ins that vLLM loads in workers: third-party code that may change KV. Each is
    described by its entry point and its distribution's name and version. Raises
    ``identity.Indescribable``."""
    from vllm import envs

    allowed = envs.VLLM_PLUGINS
    found = set()
    for group in PLUGIN_GROUPS:
        for entry in metadata.entry_points(group=group):
            own = entry.value.partition(":")[0].split(".")[0] in KNOWN_PLUGINS
            if not own and (allowed is None or entry.name in allowed):
                dist = entry.dist
                code = _editable_code(entry) if dist is not None else ""
                of = f" of {dist.name} {dist.version}{code}" if dist is not None else ""
                found.add(f"{group} {entry.name} = {entry.value}{of}")
    return identity.canonical(sorted(found)) if found else ""


def _editable_code(entry: Any) -> str:
    """A digest of the code of an editable plug-in (``pip install -e``), whose code may change while
    its version does not. "" for other plug-ins. Raises ``identity.Indescribable``."""
    source = json.loads(entry.dist.read_text("direct_url.json") or "{}")
    if not source.get("dir_info", {}).get("editable"):
        return ""
    spec = find_spec(entry.value.partition(":")[0].split(".")[0])
    if spec is None:
        return ""  # vLLM cannot load it either
    files = [Path(spec.origin)] if spec.origin and not spec.submodule_search_locations else []
    for folder in spec.submodule_search_locations or ():
        files += [file for file in Path(folder).rglob("*") if file.suffix in (".py", ".so")]
    since_ns = weights.started_ns()  # it is loaded once in a process, and no second time in a fork
    return " in place " + identity.digest(
        f"{file.name} {_file(str(file), since_ns)}" for file in sorted(files)
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
    """The device and the properties by which vLLM chooses kernels: a GPU's compute capability or
    name, or a CPU's instruction sets.

    Different kernels may compute different KV for equal layouts.
    """
    from vllm.platforms import current_platform

    if (kind := device_kind()) != "cpu":
        # XPU has no compute capability. The platform's name tells ROCm from CUDA.
        found = capability() or [current_platform.get_device_name()]
        return identity.canonical([current_platform.device_name, *found])
    sets = (torch.cpu._is_avx512_supported(), torch.cpu._is_amx_tile_supported())
    chosen = torch.backends.cpu.get_cpu_capability()
    return identity.canonical([kind, platform.machine(), chosen, sets])


# ---------------------------------------------------------------- classes of settings


def settings_of(config: Any, name: str, since_ns: int = 0) -> dict[str, Any]:
    """The fields of the settings ``config``, a dataclass, that go into a namespace, as plain data.
    Fields with their default value are omitted. Errors name the settings ``name``. A file that
    changed after ``since_ns`` has no digest. Raises ``identity.Indescribable``."""
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
            value = rule(value, since_ns)
        elif nested:
            value = settings_of(value, f"{name}.{field.name}", since_ns)
        elif _is_default(field, value):
            continue
        if value or not (rule or nested):
            found[field.name] = value
    return found


def _is_default(field: Any, value: Any) -> bool:
    """Whether ``value`` is the field's default, which pydantic may wrap."""
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    elif hasattr(default, "get_default"):
        default = default.get_default(call_default_factory=True)
    return value is default or (type(value) is type(default) and bool(value == default))


def _hf_config(config: Any, _: int) -> str:
    """A digest of the model's Hugging Face configuration. Its ``dtype`` is left out, because the
    dtype that vLLM uses is a field of ``ModelConfig``."""

    def without_skipped(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            key: without_skipped(inner)
            for key, inner in value.items()
            if key not in SKIPPED_HF_ATTRIBUTES
        }

    plain = without_skipped(config.to_dict())
    plain.pop("dtype", None)
    return identity.digest([identity.canonical(plain, "hf_config")])


def _file(path: str | None, since_ns: int) -> str:
    """A digest of a file's content. Raises ``identity.Indescribable`` if the file cannot be read,
    or if it changed after ``since_ns``, so perhaps after the engine read it."""
    if not path:
        return ""
    try:
        content, changed_ns = Path(path).read_bytes(), Path(path).stat().st_ctime_ns
    except OSError as error:
        raise identity.Indescribable(f"{path} cannot be read: {error}") from None
    if changed_ns > since_ns:
        raise identity.Indescribable(f"{path} changed since this engine started: restart it")
    return hashlib.sha256(content).hexdigest()


def _overrides(overrides: Any, since_ns: int) -> Any:
    """Overrides of the model's configuration, with a digest for a quantization file."""
    if isinstance(overrides, Mapping) and QUANTIZATION_FILE in overrides:
        return {**overrides, QUANTIZATION_FILE: _file(overrides[QUANTIZATION_FILE], since_ns)}
    return overrides


def _inductor(options: Mapping[str, Any], _: int) -> dict[str, Any]:
    """The options of Inductor as plain data. ``guard_filter_fn`` is left out, because a worker adds
    it when it compiles. A compiler pass is replaced by its ``uuid``."""
    return {
        name: str(value.uuid()) if hasattr(value, "uuid") else value
        for name, value in options.items()
        if name != "guard_filter_fn"
    }


def _draft(config: Any, since_ns: int) -> dict[str, Any]:
    """The settings of a draft model, without its configuration and overrides.

    The name of its weights covers the configuration file. A worker changes the configuration when
    it loads the weights, and vLLM itself makes the overrides.
    """
    found = settings_of(config, "draft_model_config", since_ns) if config is not None else {}
    return {name: found[name] for name in found if name not in ("hf_config", "hf_overrides")}


RULES: Final[dict[tuple[str, str], Callable[[Any, int], Any]]] = {
    ("ModelConfig", "hf_config"): _hf_config,
    ("ModelConfig", "hf_overrides"): _overrides,
    ("MultiModalConfig", "mm_encoder_fp8_scale_path"): _file,
    ("CompilationConfig", "custom_ops"): lambda names, _: sorted(set(names)),
    ("CompilationConfig", "inductor_compile_config"): _inductor,
    ("SpeculativeConfig", "draft_model_config"): _draft,
    ("VllmConfig", "additional_config"): lambda value, _: (
        value if isinstance(value, dict) else value.compute_hash()
    ),
}
"""Rules for fields that ``docs/namespace-fields.md`` lists as read by a rule: a function from the
field's value, and from the time ``since_ns`` of ``settings_of``, to what goes into the namespace.
``describe`` reads other such fields itself."""
