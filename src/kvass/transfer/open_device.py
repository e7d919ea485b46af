"""Opens a GPU for copies, after a test on this very machine (``self_check``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

from kvass.transfer.base import U8Array
from kvass.transfer.batch import Kind, Region
from kvass.transfer.device import DeviceRuntime, Fault, MissingError, Operations, first_line
from kvass.transfer.self_check import SCRATCH_BYTES, self_check

_BUSY_CYCLES: Final = 200_000_000
"""Some 100 ms."""
_BUSY_PRODUCTS, _BUSY_WIDTH = 50, 2048
"""Matrix products of some 10 ms, for devices that cannot count cycles."""
_kept: Final[list[object]] = []
"""Scratch pages of tests that failed: a copy that did not end may still write there, when torch
would have given the memory to the engine."""
_log = logging.getLogger(__name__)
ERRORS: Final = (RuntimeError, AssertionError, AttributeError, TypeError)
"""What torch raises if a device or a version cannot do something."""


FindOperations = Callable[[Sequence[Any]], Operations]
"""The engine's operations for torch storages on one device. Raises MissingError."""


def open_device(
    device: str, find: FindOperations, storages: Sequence[Any]
) -> tuple[DeviceRuntime, Mapping[Kind, int]]:
    """The runtime of ``device`` (torch's name) for ``storages``, and below which lengths of runs a
    kernel moves them.

    Scratch pages of known bytes were stored and loaded. Raises MissingError: one line that says why
    the device cannot be used.
    """
    below, wrong = None, ""
    try:
        scratch = TorchScratch(device)
        _kept.append(scratch)
        runtime = open_untested(device, find, [*storages, scratch.storage])
        below, wrong = self_check(runtime, scratch)
        last = runtime.order()
    except ERRORS as error:  # of torch, for example if it has no memory
        raise MissingError(f"device {device} failed its test: {first_line(error)}") from error
    if isinstance(last, Fault):
        raise MissingError(f"device {device} failed its test, for the engine too: {last.text}")
    if below is None:
        raise MissingError(f"device {device} failed its test: {wrong}")
    if wrong:
        _log.warning("kvass: copies on this device are slower than they could be: %s", wrong)
    else:
        _kept.remove(scratch)
    return runtime, below


def open_untested(device: str, find: FindOperations, storages: Sequence[Any]) -> DeviceRuntime:
    """The runtime of ``device`` for ``storages``, where another one was tested. Raises
    MissingError."""
    import torch

    if not hasattr(torch, "accelerator"):
        raise MissingError(f"torch {torch.__version__} is too old for copies from a GPU")
    try:
        return DeviceRuntime(device, find(storages), torch)
    except ERRORS as error:
        raise MissingError(f"device {device} cannot be used: {first_line(error)}") from error


def no_operations(storages: Sequence[Any]) -> Operations:
    """For an engine that cannot copy from a GPU. Raises MissingError."""
    raise MissingError("this connector has no operation that copies from a GPU")


class TorchScratch:
    """``self_check.Scratch`` on the device that torch calls ``where``."""

    def __init__(self, where: str) -> None:
        import torch

        self._torch: Any = torch
        self._pages = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=where)
        self.region = Region(self._pages.data_ptr(), SCRATCH_BYTES, where)
        self.storage: Any = self._pages.untyped_storage()
        self._beside: Any = torch.Stream(where) if where != "cpu" else nullcontext()

    def write(self, data: U8Array) -> None:
        staged = self._torch.from_numpy(data.copy()).to(self._pages.device)
        self._stay_busy()
        self._pages.copy_(staged)

    def _stay_busy(self) -> None:
        """Queue work that takes time."""
        torch, device = self._torch, self._pages.device
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda._sleep(_BUSY_CYCLES)
            return
        product = torch.ones(_BUSY_WIDTH, _BUSY_WIDTH, device=device)
        for _ in range(_BUSY_PRODUCTS):
            product = torch.mm(product, product).clamp_(max=1)

    def read(self) -> U8Array:
        """As ``Scratch.read``. The stream is one of its own: waiting for the device would give
        copies that were reported too early the time that they lack."""
        with self._beside:
            found: U8Array = self._pages.cpu().numpy().copy()  # waits for that stream's work only
        return found
