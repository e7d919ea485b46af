"""Where the pages of a host pool of HiCache lie, read from the addresses that the pool gives.

SGLang's layouts (``layer_first``, ``page_first``, ``page_first_direct``, MLA, Mamba states and
others) need no names here: ``get_page_buffer_meta`` gives the addresses and sizes of each page's
parts, and the parts of all pages lie at equal distances.

Law of this file: which page a host index means is asked of the pool at each call, and checked
against the planes. A pool that moves its pages is never read or written at a wrong place.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvass.errors import UsageError
from kvass.layout.describe import Plane

I64Array = npt.NDArray[np.int64]
_PROBED: Final = 3
"""How many pages from the first are looked at, beside the last one."""


class HostPool:
    """The planes of ``pool``, one for each part of a page. ``memory``: the bytes of each, from its
    first page to its last one.

    Raises ``UsageError`` for a pool that gives no addresses, or whose pages do not lie evenly.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_tokens = int(pool.page_size)
        self.pages = int(pool.size) // self.page_tokens
        if self.pages < 2:
            raise UsageError(f"{_name(pool)} has {self.pages} pages: kvass needs two or more")
        probed = sorted({*range(min(_PROBED, self.pages)), self.pages - 1})
        starts, self._sizes = self._parts(_indices(probed, self.page_tokens), len(probed))
        strides = starts[1] - starts[0]
        expected = starts[0] + np.array(probed)[:, None] * strides
        if not np.array_equal(starts, expected) or (strides < self._sizes).any():
            raise UsageError(f"the pages of {_name(pool)} do not lie evenly in memory")
        self._first, self._strides = starts[0], strides
        # A region for each part: what lies between them may belong to nobody.
        parts = list(zip(starts[0], strides, self._sizes, strict=True))
        self.planes = tuple(
            Plane(0, int(stride), int(size), region)
            for region, (_, stride, size) in enumerate(parts)
        )
        self.memory = tuple(
            _bytes_at(int(start), (self.pages - 1) * int(stride) + int(size))
            for start, stride, size in parts
        )

    def locate(self, host_indices: Any, count: int) -> list[int]:
        """The pages of ``count`` keys, of which ``host_indices`` has one index per token. Raises
        ``UsageError`` if the pool's addresses are not those of whole pages of the planes."""
        if host_indices is None or host_indices.numel() != count * self.page_tokens:
            raise UsageError(f"{_name(self._pool)}: not one host index per token of {count} pages")
        starts, sizes = self._parts(host_indices, count)
        pages = (starts[:, 0] - self._first[0]) // self._strides[0]
        fits = np.array_equal(starts, self._first + pages[:, None] * self._strides)
        if not fits or not np.array_equal(sizes, self._sizes):
            raise UsageError(
                f"the pages of {_name(self._pool)} are not where they were at the start"
            )
        if pages.min() < 0 or pages.max() >= self.pages:
            raise UsageError(f"a page of {_name(self._pool)} lies outside of it")
        found: list[int] = pages.tolist()
        return found

    def _parts(self, host_indices: Any, count: int) -> tuple[I64Array, I64Array]:
        """The addresses of the parts of each page, and the sizes that all pages have."""
        try:
            meta = self._pool.get_page_buffer_meta(host_indices)
        except Exception as error:  # noqa: BLE001 - pools without addresses raise anything
            raise UsageError(f"{_name(self._pool)} gives no addresses: {error!r}") from None
        if meta is None:
            raise UsageError(f"{_name(self._pool)} gives no addresses of its pages")
        addresses, sizes = (np.array(list(column), np.int64) for column in meta)
        if (
            not count
            or not len(addresses)
            or len(addresses) % count
            or len(sizes) != len(addresses)
        ):
            raise UsageError(f"{_name(self._pool)} does not give each page an address")
        starts, lengths = addresses.reshape(count, -1), sizes.reshape(count, -1)
        if (lengths != lengths[0]).any():
            raise UsageError(f"the pages of {_name(self._pool)} have different sizes")
        return starts, lengths[0]


def _bytes_at(address: int, size: int) -> npt.NDArray[np.uint8]:
    """The memory of this process at ``address``. SGLang keeps it while it has the pool."""
    memory: npt.NDArray[np.uint8] = np.ctypeslib.as_array(
        (ctypes.c_uint8 * size).from_address(address)
    )
    return memory


def _name(pool: Any) -> str:
    return f"host pool {type(pool).__name__} (layout {getattr(pool, 'layout', None)})"


def _indices(pages: list[int], page_tokens: int) -> Any:
    import torch

    first = torch.tensor(pages, dtype=torch.int64)[:, None] * page_tokens
    return (first + torch.arange(page_tokens)).reshape(-1)
