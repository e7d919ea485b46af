"""Copies of rows that are one page each, in the caller's thread.

Law of this file: when ``copy`` returns or raises, it reads and writes nothing any more.

Rows of one page may be small and many. ``HostMover`` takes 35 to 63 us per row, for its queue and
its threads. Here rows whose pages and slots follow one another are one call of numpy, and any other
row takes 2 to 4 us.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from kvass.layout.copy_plan import CopyPlan
from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import Kind, U8Array, check_bytes
from kvass.transfer.host import Bundle, as_bytes, bundles_of


class PageRows:
    """Copies between the pages of ``planes`` in ``regions`` (uint8 arrays of shape ``(bytes,)``)
    and the arena. A row has one page. Any number of threads may use it at once.

    Raises ``UsageError`` if a region is no flat, writable array of bytes, or a plane leaves it.
    """

    def __init__(self, regions: Sequence[U8Array], planes: GroupPlanes) -> None:
        assert planes.chunk_blocks == 1, "a row is one page"
        for number, region in enumerate(regions):
            check_bytes(region, f"region {number}")
        planes.check([region.nbytes for region in regions])
        self._slot_bytes = planes.shard_bytes
        self._bundles = bundles_of(planes, regions)

    def copy(self, kind: Kind, plan: CopyPlan, arena: U8Array) -> None:
        """Copy all rows of ``plan``: pages to slots for a ``store``, slots to pages for a
        ``load``."""
        assert plan.end <= arena.nbytes, "the plan is of another arena"
        count = len(plan.rows)
        pages = np.fromiter((row.blocks[0] for row in plan.rows), np.int64, count)
        slots = np.fromiter((row.slot for row in plan.rows), np.int64, count)
        jumps = (np.diff(pages) != 1) | (np.diff(slots) != self._slot_bytes)
        cuts = [0, *(np.flatnonzero(jumps) + 1).tolist(), count]
        for bundle in self._bundles:
            memory = as_bytes(bundle.grid)
            for lo, hi in itertools.pairwise(cuts):
                page = int(pages[lo])
                theirs = memory[:, page : page + hi - lo]
                ours = self._slots(bundle, arena, int(slots[lo]), hi - lo)
                if kind == "store":
                    ours[:] = theirs
                else:
                    theirs[:] = ours

    def _slots(self, bundle: Bundle, arena: U8Array, slot: int, count: int) -> U8Array:
        """The bundle's part of ``count`` slots that follow one another: uint8, shape ``(layers,
        count, bytes of a page)``."""
        layers, run = len(bundle.grid), bundle.grid.dtype.itemsize
        strides = (run, self._slot_bytes, 1)
        return np.ndarray((layers, count, run), np.uint8, arena.data, slot + bundle.at, strides)
