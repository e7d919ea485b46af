"""Reads KV pages without a mover, to verify what a mover copied.

Law of this file: nothing here writes to pages, and nothing is shared with the movers. The pages of
an engine are read by torch, from the storages that the engine allocated. Pages without a storage
are read from their regions.

On a device other than a CPU the reads are on a stream of their own. They wait for no other work, so
the caller must know that nothing writes to the pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np

from kvass.layout.describe import Plane
from kvass.transfer.base import U8Array
from kvass.types import I64Array

BATCH_BYTES: Final = 4 << 20
"""How many bytes are read at a time: the memory on the device that reading takes. One page at least
is read."""
HOST: Final = ("cpu",)
"""The types of devices whose memory code on the host may access."""


class KVPages:
    """The pages in ``regions``, or in ``owners``: torch storages, by region. Used from one thread
    at a time."""

    def __init__(self, regions: Sequence[U8Array], owners: Sequence[object]) -> None:
        self._regions, self._owners = regions, owners
        self._stream: Any = None

    def read(self, plane: Plane, blocks: I64Array) -> Iterator[tuple[int, U8Array]]:
        """The pages of ``blocks`` in ``plane``, some at a time: the number of the first one, and
        the bytes of all, uint8 of shape ``(n, plane.run)``."""
        most = max(1, BATCH_BYTES // plane.run)
        for first in range(0, len(blocks), most):
            ids = blocks[first : first + most]
            if self._owners:
                yield first, self._from_storage(self._owners[plane.region], plane, ids)
            else:
                yield first, _from_region(self._regions[plane.region], plane, ids)

    def _from_storage(self, storage: Any, plane: Plane, ids: I64Array) -> U8Array:
        import torch

        device = storage.device
        with self._own_stream(device):
            memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            shape, strides = (int(ids.max()) + 1, plane.run), (plane.block_stride, 1)
            pages = torch.as_strided(memory, shape, strides, plane.base)
            if device.type in HOST:  # torch would start threads
                found: U8Array = pages.numpy()[ids]
            else:
                found = pages.index_select(0, torch.from_numpy(ids).to(device)).cpu().numpy()
        return found

    def _own_stream(self, device: Any) -> AbstractContextManager[Any]:
        if device.type in HOST:
            return nullcontext()
        import torch

        if self._stream is None:
            self._stream = torch.Stream(device)
        stream: AbstractContextManager[Any] = self._stream
        return stream


def _from_region(region: U8Array, plane: Plane, ids: I64Array) -> U8Array:
    begins = (plane.base + ids * plane.block_stride).tolist()
    return np.stack([region[begin : begin + plane.run] for begin in begins])
