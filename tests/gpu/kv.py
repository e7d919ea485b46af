"""KV tensors on a device, every byte of which says where it belongs.

Law of this file: pages are written by kernels on the engine's stream, as a model writes them, into
``as_strided`` tensors over one storage, as vLLM makes them; what they must hold is that of
``kvass.testing.pages``, computed apart from it on the CPU.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import torch

from bench.geometries import GEOMETRIES, Geometry
from kvass.layout.copy_plan import CopyPlan
from kvass.testing.pages import RankMemory, WrongPageError, page_bytes
from kvass.transfer.base import U8Array
from kvass.types import GroupLayout, I64Array
from tests.gpu.device import Device, Kernel

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
SHRINK, FEWER = 64, 4
"""On a fake, pages are so many times smaller (equal ones stay equal), and layers fewer."""

Tables = Sequence[I64Array]
"""By group: block ids of rows, of shape ``(rows, chunk_blocks)``."""


def on(device: Device, geometry: Geometry) -> Geometry:
    """The geometry that is used on ``device``: itself on a GPU, a small likeness on a fake. Where
    blocks are outermost, a block's pages are one piece, as the connector takes them."""
    groups = geometry.groups if device.real else tuple(map(_small, geometry.groups))
    if geometry.outermost == "blocks":
        groups = tuple(map(_joined, groups))
    return replace(geometry, groups=groups)


def _small(group: GroupLayout) -> GroupLayout:
    kept = max(5, len(group.layers) // FEWER)
    pages = tuple(n // SHRINK for n in group.page_bytes[:kept])
    return msgspec.structs.replace(group, layers=group.layers[:kept], page_bytes=pages)


def _joined(group: GroupLayout) -> GroupLayout:
    return msgspec.structs.replace(group, layers=("all",), page_bytes=(sum(group.page_bytes),))


NAMES = [one.name for one in GEOMETRIES]


class KvMemory(RankMemory):
    """The KV tensors of one rank of ``geometry``, on ``device``.

    ``compute`` and ``wipe`` say what the engine's next step is to do; ``zero``, ``forward`` and
    ``draft`` are its kernels. The target model leaves the last block of each row to the drafter.
    """

    def __init__(self, device: Device, geometry: Geometry, blocks: int, shard: int = 0) -> None:
        self.device, self.shard = device, shard
        self.planes = geometry.planes(blocks)
        self.storage: Any = torch.zeros(
            geometry.region_bytes(blocks), dtype=torch.uint8, device=device.where
        )
        self.region = device.region(self.storage)
        self.views = [
            [
                self.storage.as_strided((blocks, plane.run), (plane.block_stride, 1), plane.base)
                for plane in group.planes
            ]
            for group in self.planes
        ]
        self._zero, self._forward, self._draft = list[Kernel](), list[Kernel](), list[Kernel]()

    # ------------------------------------------------------------ what the next step does

    def compute(self, keys: Sequence[bytes], tables: Tables) -> None:
        """The next forward pass computes these rows."""
        ahead = [table[:, -1:] for table in tables]
        self._forward += [*self.writes(keys, tables), *self.fills(ahead, 0xEE)]
        self._draft += self.writes(keys, tables, drafted=True)

    def wipe(self, tables: Tables) -> None:
        """These blocks are new, and zeroed before the next forward pass."""
        self._zero += self.fills(tables, 0)

    def zero(self) -> None:
        """Queue what zeroes new blocks."""
        self._run(self._zero)

    def forward(self) -> None:
        """Queue the target model's forward pass."""
        self._run(self._forward)

    def draft(self) -> None:
        """Queue the drafter's."""
        self._run(self._draft)

    def _run(self, kernels: list[Kernel]) -> None:
        for kernel in kernels:
            self.device.queue(kernel)
        kernels.clear()

    # ------------------------------------------------------------ kernels

    def writes(
        self, keys: Sequence[bytes], tables: Tables, *, drafted: bool = False
    ) -> list[Kernel]:
        """Kernels that write the pages of rows (``drafted``: of their last blocks alone).

        One each for a row and a layer: behind a stream that is held, the thread that launches more
        than a thousand waits with it.
        """
        made: list[Kernel] = []
        for group, key, ids in _rows(keys, tables):
            there = self.device.up(ids)
            for layer, view in enumerate(self.views[group]):
                seed = _seed(key, group, self.shard, layer)
                first = len(ids) - 1 if drafted else 0
                code = self.device.up(_code(view.shape[1], first, len(ids), seed))
                made.append(partial(view.index_copy_, 0, there[first:], code))
        return made

    def fills(self, tables: Tables, value: int) -> list[Kernel]:
        """Kernels that fill the pages of these blocks with one byte."""
        made: list[Kernel] = []
        for group, table in enumerate(tables):
            if table.size:
                there = self.device.up(table.reshape(-1))
                made += [partial(_fill, view, there, value) for view in self.views[group]]
        return made

    # ------------------------------------------------------------ looking

    def pages(self, tables: Tables) -> Iterator[tuple[int, int, int, U8Array]]:
        """``(group, row, layer, pages)``; the engine's stream has done what it was given."""
        for group, table in enumerate(tables):
            if not table.size:
                continue
            there = self.device.up(table.reshape(-1))
            for layer, view in enumerate(self.views[group]):
                every = self.device.read(partial(view.index_select, 0, there))
                for row, pages in enumerate(every.reshape(*table.shape, -1)):
                    yield group, row, layer, pages

    def verify(self, keys: Sequence[bytes], tables: Tables) -> int:
        """As ``RankMemory.verify``; a group of fewer rows than keys has the last ones."""
        right = 0
        for group, row, layer, pages in self.pages(tables):
            key = keys[row - len(tables[group])]
            want = page_bytes(key, group, self.shard, layer, *pages.shape)
            if not np.array_equal(pages, want):
                page = int((pages != want).any(axis=1).argmax())
                raise WrongPageError(f"group {group}, row {row}, layer {layer}, page {page}")
            right += len(pages)
        return right

    def digest(self, tables: Tables) -> str:
        """Of all pages of these rows."""
        told = blake2b(digest_size=16)
        for *_, pages in self.pages(tables):
            told.update(pages.tobytes())
        return told.hexdigest()


def wrong_row(arena: U8Array, plans: Sequence[CopyPlan], keys: Sequence[bytes]) -> str:
    """The first row of ``plans`` in ``arena`` that does not hold what its key says; "" if none."""
    for plan in plans:
        for key, row in zip(keys, plan.rows, strict=True):
            at = row.slot
            for layer, plane in enumerate(plan.planes.planes):
                want = page_bytes(key, plan.planes.group, 0, layer, len(row.blocks), plane.run)
                if not np.array_equal(arena[at : at + want.size], want.reshape(-1)):
                    return f"group {plan.planes.group}, slot {row.slot}, layer {layer}"
                at += want.size
    return ""


def keys_of(name: str, count: int) -> list[bytes]:
    """Keys of ``count`` rows."""
    return [f"{name}:{n}".encode() for n in range(count)]


def _rows(keys: Sequence[bytes], tables: Tables) -> Iterator[tuple[int, bytes, I64Array]]:
    for group, table in enumerate(tables):
        for key, ids in zip(keys, table, strict=True):
            if len(ids):
                yield group, key, ids


def _seed(key: bytes, group: int, shard: int, layer: int) -> int:
    place = struct.pack("<III", group, shard, layer)
    return int.from_bytes(blake2b(key + place, digest_size=8).digest(), "little", signed=True)


def _code(size: int, first: int, end: int, seed: int) -> U8Array:
    """What pages ``first .. end - 1`` of a row hold, of ``size`` bytes each."""
    words = -(-size // 8)
    place = torch.arange(first * words, end * words, dtype=torch.int64)
    code = (((place + 1) * _ODD) ^ seed).view(torch.uint8).reshape(-1, words * 8)[:, :size]
    found: U8Array = code.contiguous().numpy()
    return found


def _fill(view: Any, ids: Any, value: int) -> None:
    view.index_fill_(0, ids, value)
