"""The LoRA adapters that a vLLM worker holds, named by their weights.

A file of vLLM's version (see ``adapt.py``).

Facts relied on: the worker makes its connector in a method of its own, after it loaded the model.
Its ``model_runner.lora_manager._adapter_manager`` lists the adapters by ``lora_int_id``, as
``LoRAModel`` on the CPU; a forward pass uses what is listed after it, under its requests' ids.
Another adapter is another object: none is changed after it was added. ``_load_adapter`` of the
``lora_manager`` reads it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from kvass.engine.adapter_files import files_state
from kvass.engine.boundary import Boundary
from kvass.engine.held_adapters import UNKNOWN, HeldAdapters

THREADS: Final = 4
LARGE_BYTES: Final = 16 << 20
"""A larger adapter is hashed by several threads: vLLM waits for it, as it waited for the disk."""
NAMES_IT: Final = frozenset({"id"})
"""Attributes of a ``LoRAModel`` that say how this engine calls it, not what it is."""


def held_adapters(rank: int, boundary: Boundary) -> HeldAdapters | None:
    """What this worker, which is rank ``rank``, holds; None if it cannot be found. Called where it
    makes its connector: only the frames of our callers refer to it."""
    frame = inspect.currentframe()
    while frame is not None:
        runner: Any = getattr(frame.f_locals.get("self"), "model_runner", None)
        manager = getattr(runner, "lora_manager", None)
        if hasattr(manager, "_adapter_manager"):
            return HeldAdapters(rank, _listed(runner), digest, sources(manager, boundary))
        frame = frame.f_back
    return None


def _listed(runner: Any) -> Callable[[], Mapping[int, object]]:
    def listed() -> Mapping[int, object]:
        adapters: Mapping[int, object] = runner.lora_manager._adapter_manager.list_adapters()
        return adapters

    return listed


def sources(manager: Any, boundary: Boundary) -> Callable[[object], tuple[str, str]]:
    """Where the manager reads an adapter from now on, and the state of the files if it is one
    before and after. A defect of kvass ends no load of vLLM's."""
    load, known = manager._load_adapter, WeakKeyDictionary[object, tuple[str, str]]()

    def load_adapter(request: Any) -> Any:
        path = str(request.lora_path)
        before = boundary.run("", files_state, path)
        adapter = load(request)
        after = boundary.run("", files_state, path)
        known[adapter] = path, before if before == after else ""
        return adapter

    manager._load_adapter = load_adapter
    return lambda adapter: known.get(adapter, ("", ""))


def digest(adapter: Any) -> str:
    """Hex SHA-256 of all that is in ``adapter``, but for its id. Adapters may come from strangers,
    so no weaker hash will do. ``UNKNOWN`` if it has something in it that cannot be read."""
    parts: list[str | torch.Tensor] = []
    content = {key: value for key, value in vars(adapter).items() if key not in NAMES_IT}
    try:
        parts.extend(_parts(content))
    except _Unreadable:
        return UNKNOWN
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if sum(tensor.nbytes for tensor in tensors) > LARGE_BYTES:
        with ThreadPoolExecutor(THREADS, "kvass-adapter") as pool:
            hashed = iter(list(pool.map(_bytes_of, tensors)))
    else:
        hashed = map(_bytes_of, tensors)
    state = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else next(hashed)
        state.update(len(raw).to_bytes(8, "little") + raw)
    return state.hexdigest()


class _Unreadable(Exception):
    """A value of a kind that is not known."""


def _parts(value: object) -> Iterator[str | torch.Tensor]:
    """``value`` as texts and tensors, in an order that is equal for equal values."""
    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}"
        yield value
    elif value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, list | tuple):
        yield f"list {len(value)}"
        for item in value:
            yield from _parts(item)
    elif isinstance(value, dict):
        yield f"dict {len(value)}"
        for key in sorted(value, key=repr):
            yield repr(key)
            yield from _parts(value[key])
    elif type(value).__module__.startswith("vllm.") and hasattr(value, "__dict__"):
        yield type(value).__qualname__
        yield from _parts(vars(value))
    else:
        raise _Unreadable


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """SHA-256 of a tensor's elements, in their order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).digest()
