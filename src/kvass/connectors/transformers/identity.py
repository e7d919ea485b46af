"""The namespace of a model in this process: everything that changes the bytes of its KV.

Weights count by the content of the tensors in memory, whatever file they came from: whoever changed
a model after it was loaded shares nothing with the original. The SHA-256 is computed once, in
``connect``: 0.5 to 2 GB/s and core. What a model computes with besides tensors is in the fields
``config`` and ``modules``.
"""

from __future__ import annotations

import hashlib
import inspect
import platform
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType
from typing import Any, Final

import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef

from kvass.connectors.transformers.rows import BLOCK, Rows
from kvass.engine import identity

LEFT_OUT: Final = frozenset(
    ["_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "use_cache"]
)
"""Fields of a configuration that say where it came from, or are set when a model is saved or run:
classes and data types count by what is in memory."""
THREADS: Final = 4


def describe(model: Any, rows: Rows, tag: str) -> dict[str, str]:
    """The fields of the namespace. Reads all weights. Raises ``identity.Indescribable``."""
    fields = {
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "device": _device(rows.device),
        "precision": torch.get_float32_matmul_precision(),
        "config": identity.canonical(_that_counts(model.config.to_dict()), "config"),
        "attention": attention(model),
        "modules": identity.digest(_modules(model)),
        "kv": identity.canonical([rows.shapes, str(rows.dtype)]),
        "tokens": f"{rows.chunk_tokens}/{BLOCK}",
        "tag": tag,
        "weights": weights(model),
    }
    return {name: identity.short(text) for name, text in fields.items() if text}


def attention(model: Any) -> str:
    """The implementation of attention, which may be changed while a model lives."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def weights(model: Any) -> str:
    """The digest of all tensors that modules hold, those of rope among them."""
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(_tensor, tensors(model))
    return "sha256:" + identity.digest(text for texts in found for text in texts)


def tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """All tensors that modules hold, by name: parameters, buffers, attributes. One with several
    names has the first."""
    seen = set()
    for name, module in model.named_modules():
        for place, tensor in _inside(vars(module)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name + place, tensor


def _inside(value: object, place: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors in ``value``, an attribute or a collection."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _inside(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _inside(item, f"{place}.{index}")


def state(model: Any) -> tuple[object, ...]:
    """What differs after a field of ``describe`` changed: a weight was replaced, or changed in
    place in whatever way torch counts (through ``.data`` of a tensor it does not), or a setting,
    or the code of a module."""
    config = _that_counts(model.config.to_dict())
    modules = [_state(module) for module in model.modules()]
    return attention(model), torch.get_float32_matmul_precision(), config, modules


def _state(module: Any) -> tuple[object, ...]:
    held = [_memory(tensor) for _, tensor in _inside(vars(module))]
    return type(module), type(module).forward, _plain(module), held


def _memory(tensor: Any) -> tuple[object, ...]:
    """What identifies a tensor's memory and version. An address is not enough: after it is freed,
    another tensor may have it. A storage's number is not reused while a reference is held."""
    version = 0 if tensor.is_inference() else tensor._version
    view = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return StorageWeakRef(tensor.untyped_storage()), view, version


def _tensor(named: tuple[str, Any]) -> tuple[str, str, str, str]:
    name, tensor = named
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    content = hashlib.sha256(flat.numpy().data).hexdigest()
    return name, str(tensor.dtype), str(tuple(tensor.shape)), content


def _modules(model: Any) -> Iterator[str]:
    """Each module's classes, its ``forward``, and its plain attributes: a scale, an epsilon. The
    source of what is neither torch's nor transformers' counts too."""
    for name, module in model.named_modules():
        yield from (name, identity.canonical(_plain(module)))
        for code in (*type(module).__mro__, type(module).forward):
            yield f"{code.__module__}.{code.__qualname__}"
            if not is_known(code) and code.__module__ not in sys.stdlib_module_names:
                yield _source(code)
                yield from _compiled(code)


def _plain(module: Any) -> dict[str, Any]:
    """A copy of the plain attributes: numbers, texts, functions' names, collections of them."""
    return {
        key: _frozen(value)
        for key, value in vars(module).items()
        if not key.startswith("_") and key not in LEFT_OUT and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str) or inspect.isroutine(value)


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_frozen(item) for item in value]
    if inspect.isroutine(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    return value


def is_known(code: Any) -> bool:
    """Whether a class or a function is torch's or transformers': their versions are a field."""
    return str(getattr(code, "__module__", "")).partition(".")[0] in ("torch", "transformers")


def _source(kind: Any) -> str:
    """The digest of the file that defines ``kind``. Raises ``Indescribable``."""
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    except (OSError, TypeError) as error:
        raise identity.Indescribable(
            f"the code of {kind.__qualname__} cannot be read ({error}): define it in a file"
        ) from None


def _compiled(kind: Any) -> Iterator[str]:
    """The bytecode of a class or a function: its file may have changed since the import."""
    for found in vars(kind).values() if isinstance(kind, type) else [kind]:
        inner = getattr(found, "fget", None) or getattr(found, "__func__", found)
        if (code := getattr(inspect.unwrap(inner), "__code__", None)) is not None:
            yield _code_text(code)


def _code_text(value: Any) -> str:
    if isinstance(value, CodeType):
        parts = value.co_name, value.co_code.hex(), value.co_names
        return repr([*parts, *map(_code_text, value.co_consts)])
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _device(device: Any) -> str:
    if device.type != "cpu":
        name = torch.get_device_module(device).get_device_name(device)
        return f"{name}, {device.type} {torch.version.cuda or torch.version.hip}"
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _that_counts(config: Any) -> Any:
    if isinstance(config, dict):
        return {str(k): _that_counts(v) for k, v in config.items() if k not in LEFT_OUT}
    return [_that_counts(v) for v in config] if isinstance(config, list | tuple) else config


assert sys.byteorder == "little", "rows and hashes of tokens are little endian"
