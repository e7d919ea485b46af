"""Copies by torch alone, run by run: to measure and test the mover where vLLM is not installed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from kvass.connectors.vllm.operations import pinning
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


def operations_here(torch: Any, where: str, copies: TensorCopies) -> Operations:
    """vLLM's operations where it is installed, else ``copies``."""
    if find_spec("vllm") is not None:
        from kvass.connectors.vllm.operations import vllm_operations

        return vllm_operations([torch.empty(1, device=where).untyped_storage()])
    return Operations(copies, None, *pinning(where))
