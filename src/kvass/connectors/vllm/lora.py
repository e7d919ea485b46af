"""The LoRA adapters that a vLLM worker holds, each named by a digest of its weights.

A file of vLLM's version (see ``adapt.py``).

Facts relied on:

- The worker's ``model_runner.lora_manager._adapter_manager`` lists the adapters by ``lora_int_id``.
  Each is a ``LoRAModel`` on the CPU. Right after a forward pass the list has the adapters that the
  pass used.
- An adapter object does not change after it was added. Another adapter is another object.
- The method ``_load_adapter`` of the ``lora_manager`` reads an adapter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from kvass.connectors.vllm import borrowed
from kvass.engine.adapter_files import files_state
from kvass.engine.boundary import Boundary
from kvass.engine.held_adapters import UNKNOWN, HeldAdapters

THREADS: Final = 4
LARGE_BYTES: Final = 16 << 20
"""An adapter of more bytes is hashed by several threads, because vLLM's step waits for the hash."""
OWN_NAMES: Final = frozenset({"id"})
"""Attributes of a ``LoRAModel`` that are this engine's name for it and not part of its content."""


def held_adapters(rank: int, boundary: Boundary) -> HeldAdapters | None:
    """The adapters that this worker holds. None if its LoRA manager is not found. Call it while the
    worker makes its connector."""
    if (runner := borrowed.lora_runner()) is None:
        return None
    manager = runner.lora_manager
    return HeldAdapters(rank, _listed(runner), digest, sources(manager, boundary))


def _listed(runner: Any) -> Callable[[], Mapping[int, object]]:
    def listed() -> Mapping[int, object]:
        adapters: Mapping[int, object] = runner.lora_manager._adapter_manager.list_adapters()
        return adapters

    return listed


def sources(manager: Any, boundary: Boundary) -> Callable[[object], tuple[str, str]]:
    """A function that returns an adapter's path and the state of the files there, each "" if
    unknown.

    It knows the adapters that the ``manager`` loads from now on. The state is known if it was equal
    before and after the load. A failure of kvass does not end vLLM's load.
    """
    known = WeakKeyDictionary[object, tuple[str, str]]()

    def load_adapter(load: Callable[[Any], Any], request: Any) -> Any:
        path = str(request.lora_path)
        before = boundary.run("", files_state, path)
        adapter = load(request)
        after = boundary.run("", files_state, path)
        known[adapter] = path, before if before == after else ""
        return adapter

    borrowed.replace_load_adapter(manager, load_adapter)
    return lambda adapter: known.get(adapter, ("", ""))


def digest(adapter: Any) -> str:
    """The SHA-256 of everything in ``adapter`` except its id, in hex. ``UNKNOWN`` if a value in it
    has a type that is not known here.

    Anybody may have made an adapter, so the hash must be collision-resistant.
    """
    parts: list[str | torch.Tensor] = []
    content = {key: value for key, value in vars(adapter).items() if key not in OWN_NAMES}
    try:
        parts.extend(_parts(content))
    except _Unreadable:
        return UNKNOWN
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if sum(tensor.nbytes for tensor in tensors) > LARGE_BYTES:
        with ThreadPoolExecutor(THREADS, "kvass-adapter") as pool:
            hashed = iter(list(pool.map(_digest_of, tensors)))
    else:
        hashed = map(_digest_of, tensors)
    state = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else next(hashed)
        state.update(len(raw).to_bytes(8, "little") + raw)
    return state.hexdigest()


class _Unreadable(Exception):
    """Raised for a value of a type that is not known here."""


def _parts(value: object) -> Iterator[str | torch.Tensor]:
    """The texts and tensors that describe ``value``. Equal values give equal sequences."""
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


def _digest_of(tensor: torch.Tensor) -> bytes:
    """The SHA-256 of a tensor's elements in their order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).digest()
