"""The fields of a namespace, read from SGLang's settings. Engines share KV if all fields are equal.

``fields.py`` lists the settings that are left out. All others go in, by their resolved values.

Law of this file: a field is equal in all ranks whose pages hold the same bytes, and in all engines
that compute the same bytes.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from kvass.connectors.sglang.fields import LEFT_OUT, VARIABLES, VARIABLES_LEFT_OUT
from kvass.engine import identity
from kvass.engine.weights import Source

GROUPS: Final = (
    "device",
    "disagg",
    "exec",
    "lora",
    "memory",
    "mm",
    "model",
    "observability",
    "schedule",
    "serving",
    "spec",
)
"""The groups of settings in SGLang's ``runtime_context``. ``parallel`` is the twelfth; it has its
values in another form."""
KERNELS: Final = (
    "torch",
    "triton",
    "transformers",
    "sglang-kernel",
    "sgl-kernel",
    "flashinfer-python",
    "flash-attn-4",
    "aiter",
)
"""Packages that compute, beside SGLang."""
PLUGIN_GROUPS: Final = ("sglang.srt.plugins", "sglang.srt.platforms")
PER_RANK: Final = ("mamba",)
"""Pools whose pages differ from rank to rank also if those of attention do not (MLA)."""
POOL_ATTRIBUTES: Final = (
    "layout",
    "dtype",
    "page_size",
    "layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
    "start_layer",
    "end_layer",
    "size_per_token",
    "storage_format_tag",
    "dcp_size",
    "head_group_num",
)


class Settings:
    """The resolved settings of this process."""

    def __init__(self) -> None:
        from sglang.srt import runtime_context

        self.arguments = runtime_context.get_server_args()
        self._values: dict[str, Any] = {}
        for group in GROUPS:
            self._values |= _leaves(getattr(runtime_context, f"get_{group}")(), group)
        parallel = runtime_context.get_parallel()
        for name in _parallel_names():
            self._values[f"parallel.{name}"] = getattr(parallel, name)
        self._by_name = {path.rpartition(".")[2]: value for path, value in self._values.items()}

    def __call__(self, name: str) -> Any:
        """The value of the setting ``name``; None if this version does not have it."""
        return self._by_name.get(name)

    def counting(self) -> dict[str, Any]:
        """The settings that go in, by path."""
        return {
            path: value
            for path, value in self._values.items()
            if path.rpartition(".")[2] not in LEFT_OUT
        }

    def files(self) -> Iterator[Source]:
        """Files and folders that such a setting names: they count by content."""
        from kvass.connectors.sglang.weight_files import Files

        for _, value in sorted(self.counting().items()):
            if isinstance(value, str) and "/" in value and os.path.exists(value):
                yield Files(Path(os.path.abspath(value)))


def _leaves(group: Any, path: str) -> dict[str, Any]:
    """The settings in a group, and in the groups in it."""
    found = {}
    for name, value in object.__getattribute__(group, "_fields").items():
        found[f"{path}.{name}"] = value
    for name, inner in object.__getattribute__(group, "_subs").items():
        found |= _leaves(inner, f"{path}.{name}")
    return found


def _parallel_names() -> list[str]:
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    paths = namespace_of(ServerArgs).items()
    return sorted(name for name, path in paths if path.partition(".")[0] == "parallel")


def describe(settings: Settings, version: str, tag: str) -> dict[str, str]:
    """The fields that all pools of an engine have. Raises ``identity.Indescribable``."""
    counting = {
        path: identity.canonical(value, path) for path, value in settings.counting().items()
    }
    return {
        "engine": f"sglang {version}",
        "kernels": identity.canonical(list(_versions())),
        "device": _device(),
        "plugins": identity.canonical(sorted(_plugins())),
        "environment": identity.canonical(_variables(os.environ)),
        "settings": "sha256:"
        + identity.digest(part for pair in sorted(counting.items()) for part in pair),
        "tag": tag,
    }


def of_pool(name: str, pool: Any, config: Any) -> dict[str, str]:
    """The fields of one host pool: whose bytes its pages are, and in which order."""
    shared = config.is_mla_model and name not in PER_RANK
    held = {key: str(getattr(pool, key, None)) for key in POOL_ATTRIBUTES}
    device = getattr(pool, "device_pool", None)
    kinds = [type(pool).__qualname__, type(device).__qualname__]
    tp = str(config.tp_size) if shared else f"{config.tp_rank}/{config.tp_size}"
    return {
        "pool": identity.canonical([name, *kinds]),
        "pages": identity.canonical(held),
        "rank": f"tp {tp}, pp {config.pp_rank}/{config.pp_size}",
    }


def _versions() -> Iterator[str]:
    for name in KERNELS:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue


def _plugins() -> Iterator[str]:
    """The plug-ins that SGLang loads: third-party code that may change KV. kvass is none."""
    allowed = {
        name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()
    }
    for group in PLUGIN_GROUPS:
        for entry in metadata.entry_points(group=group):
            own = entry.value.partition(":")[0].split(".")[0] == "kvass"
            if not own and (not allowed or entry.name in allowed):
                dist = f"{entry.dist.name} {entry.dist.version}" if entry.dist else ""
                yield f"{group} {entry.name} = {entry.value} of {dist}"


def _variables(environ: Any) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if VARIABLES.match(name) and not VARIABLES_LEFT_OUT.fullmatch(name)
    }


def _device() -> str:
    """The device and the properties by which kernels are chosen."""
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        version = torch.version.cuda or torch.version.hip
        return f"{torch.cuda.get_device_name()} {capability} {version}"
    sets = torch.cpu._is_avx512_supported(), torch.cpu._is_amx_tile_supported()
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {sets}"
