"""The trial's pages in host memory."""

from __future__ import annotations

from kvass.transfer.base import U8Array
from kvass.transfer.open_device import TorchScratch


class CpuScratch(TorchScratch):
    """See above; a fake device takes them for its own."""

    def __init__(self, where: str) -> None:
        super().__init__("cpu")

    def write(self, data: U8Array) -> None:
        self._pages.copy_(self._torch.from_numpy(data))

    def read(self) -> U8Array:
        found: U8Array = self._pages.numpy().copy()
        return found
