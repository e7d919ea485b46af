"""The settings of vLLM that go into a namespace, as plain data.

``fields.py`` says what is left out; everything else goes in. A field with its default value is
omitted, which keeps an identity short. A file of vLLM's version (see ``adapt.py``).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvass.connectors.vllm.fields import LISTS, Lists
from kvass.engine import identity

SET_BY_MODELS: Final = frozenset(
    {
        "_attn_implementation",
        "attn_temperature_tuning",
        "image_token_id",
        "image_token_index",
        "max_model_len",
        "media_placeholder_token_id",
        "num_labels",
        "num_ln_in_parallel_attn",
        "projector_hidden_act",
        "use_sep_token",
    }
)
"""Attributes of a Hugging Face configuration that models set while a worker loads them. They follow
from the model's files (``weight_files.READ``) and ``hf_overrides``, which count, and for Llama 4
from the rule for ``positions``."""

ORIGIN: Final = frozenset({"_name_or_path", "_commit_hash"})  # the field ``weights`` covers these


def taken_of(config: Any, name: str) -> dict[str, Any]:
    """The fields of a dataclass of settings that go into a namespace and are not at their default,
    as plain data. ``name``: what an error calls it. Raises ``identity.Indescribable``."""
    kind = type(config).__name__
    skipped = LISTS.get(kind, Lists()).skipped()
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


def describe(config: Any, name: str) -> str:
    """``taken_of`` as a field of an identity; empty if nothing is taken."""
    found = taken_of(config, name)
    return identity.canonical(found, name) if found else ""


def _is_default(field: Any, value: Any) -> bool:
    """vLLM's classes are pydantic's: a default may be wrapped."""
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    elif hasattr(default, "get_default"):
        default = default.get_default(call_default_factory=True)
    return value is default or (type(value) is type(default) and bool(value == default))


# ---------------------------------------------------------------- rules


def _hf_config(config: Any) -> str:
    """A digest of the model's configuration. Its own type is the model's, which is a field."""
    plain = _without_origin(config.to_dict())
    plain.pop("dtype", None)
    return identity.digest([identity.canonical(plain, "hf_config")])


def _without_origin(config: Any) -> Any:
    """A Hugging Face configuration without the places of its parts and without what models set."""
    if not isinstance(config, dict):
        return config
    left = ORIGIN | SET_BY_MODELS
    return {name: _without_origin(of) for name, of in config.items() if name not in left}


def _file(path: str | None) -> str:
    """A digest of a file's content. Raises ``identity.Indescribable`` if it cannot be read."""
    if not path:
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise identity.Indescribable(f"{path} cannot be read: {error}") from None


def _inductor(options: Mapping[str, Any]) -> dict[str, Any]:
    """A worker adds ``guard_filter_fn`` when it compiles; a pass is an object with a ``uuid``."""
    return {
        name: str(value.uuid()) if hasattr(value, "uuid") else value
        for name, value in options.items()
        if name != "guard_filter_fn"
    }


def _platform(config: Any) -> Any:
    return config if isinstance(config, dict) else config.compute_hash()


def _draft(config: Any) -> dict[str, Any]:
    """A draft's settings but for its configuration and overrides, which its weights cover. A worker
    changes the configuration when it loads them, and vLLM itself makes the overrides."""
    if config is None:
        return {}
    found = taken_of(config, "draft_model_config")
    return {name: found[name] for name in found if name not in ("hf_config", "hf_overrides")}


RULES: Final[dict[tuple[str, str], Callable[[Any], Any]]] = {
    ("ModelConfig", "hf_config"): _hf_config,
    ("MultiModalConfig", "mm_encoder_fp8_scale_path"): _file,
    ("CompilationConfig", "custom_ops"): lambda names: sorted(set(names)),
    ("CompilationConfig", "inductor_compile_config"): _inductor,
    ("SpeculativeConfig", "draft_model_config"): _draft,
    ("VllmConfig", "additional_config"): _platform,
}
"""How a field is read that is listed as ``read`` and is not a field of the identity itself."""
