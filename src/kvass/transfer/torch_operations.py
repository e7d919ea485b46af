"""The copy and pinning operations of torch alone: for engines that have none of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from kvass.transfer.device import Operations


class TensorCopies:
    """Copies between host memory and ``storages`` by ``Tensor.copy_``, run by run: the way of an
    engine without a copy operation of its own."""

    def __init__(self, torch: Any, storages: Sequence[Any]) -> None:
        self._torch = torch
        self._flat: dict[int, Any] = {}
        for storage in storages:
            self.add(storage)

    def add(self, storage: Any) -> None:
        """Copy to and from ``storage`` as well."""
        flat = self._torch.empty(0, dtype=self._torch.uint8, device=storage.device).set_(storage)
        self._flat[flat.data_ptr()] = flat

    def remove(self, address: int) -> None:
        """Forget the storage at ``address``. No copy may be using it."""
        del self._flat[address]

    def __call__(self, sources: Any, targets: Any, sizes: Any, any_order: bool) -> None:
        """As ``CopyBatch``."""
        runs = zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True)
        for source, target, count in runs:
            there = self._bytes(target, count)
            there.copy_(self._bytes(source, count), non_blocking=True)

    def _bytes(self, address: int, count: int) -> Any:
        for first, flat in self._flat.items():
            if first <= address < first + len(flat):
                return flat[address - first : address - first + count]
        memory = (ctypes.c_uint8 * count).from_address(address)
        return self._torch.frombuffer(memory, dtype=self._torch.uint8)


def torch_operations(storages: Sequence[Any]) -> Operations:
    """The operations of torch, for ``storages`` of one device."""
    import torch

    register, unregister = torch_pinning(storages[0].device)
    return Operations(TensorCopies(torch, storages), None, register, unregister)


def torch_pinning(
    device: Any,
) -> tuple[Callable[[int, int], bool] | None, Callable[[int], bool] | None]:
    """``register`` and ``unregister`` by the CUDA (or HIP) runtime that torch uses; None for other
    devices."""
    import torch

    if torch.device(device).type != "cuda":
        return None, None
    runtime: Any = torch.cuda.cudart()

    def drained(result: Any) -> bool:
        """Whether ``result`` is success. Else the error stays with this thread, and the next launch
        would take it for its own: launch something that nobody needs."""
        if int(result):
            with suppress(RuntimeError):
                torch.ones(1, device=device)
        return not int(result)

    def register(address: int, count: int) -> bool:
        return drained(runtime.cudaHostRegister(address, count, 0))

    def unregister(address: int) -> bool:
        return drained(runtime.cudaHostUnregister(address))

    return register, unregister
