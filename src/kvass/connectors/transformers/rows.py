"""The layout of K and V in a row, and the copies between rows and tensors.

A row is a chunk's blocks, one after the other. A block has of each layer its K, then its V, each of
shape ``(heads, block, width)``. The tensors here are those of a ``DynamicCache``: of each layer K,
then V, each of shape ``(1, heads, tokens, width)``; heads and widths may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvass.transfer.base import U8Array
from kvass.types import GroupLayout, RankLayout

BLOCK = 16
"""Tokens per block. A hit ends at the end of a block."""

KV = list[Any]
"""Tensors of K and V, as above."""


class Rows:
    """The rows of one model. ``kv``: tensors that it made, of any number of tokens."""

    def __init__(self, kv: KV, chunk_tokens: int) -> None:
        self.chunk_tokens, self.chunk_blocks = chunk_tokens, chunk_tokens // BLOCK
        self.dtype, self.device = kv[0].dtype, kv[0].device
        self.shapes: list[tuple[int, int]] = [(t.shape[1], t.shape[3]) for t in kv]
        self._sizes = [heads * BLOCK * width for heads, width in self.shapes]
        page = sum(self._sizes) * self.dtype.itemsize
        self.layout = RankLayout((GroupLayout("full", BLOCK, ("kv",), (page,)),))
        self.shard_bytes = self.layout.groups[0].shard_bytes(chunk_tokens)

    def zeros(self, tokens: int) -> KV:
        """Tensors for ``tokens`` tokens."""
        options = {"dtype": self.dtype, "device": self.device}
        return [torch.zeros(1, heads, tokens, width, **options) for heads, width in self.shapes]

    def load(self, arena: U8Array, offset: int, kv: KV, at: int, blocks: int) -> None:
        """Copy the first ``blocks`` blocks of the row at byte ``offset`` to token ``at``."""
        row = self._row(arena, offset)[:blocks].to(self.device)
        for inside, tensor in self._pairs(row, kv, at):
            tensor.copy_(inside)

    def store(self, arena: U8Array, offset: int, kv: KV, at: int, blocks: int) -> None:
        """Copy ``blocks`` blocks from token ``at`` on to the row at byte ``offset``."""
        row = self._row(arena, offset)[:blocks]
        staged = row if self.device.type == "cpu" else torch.empty_like(row, device=self.device)
        for inside, tensor in self._pairs(staged, kv, at):
            inside.copy_(tensor)
        if staged is not row:
            row.copy_(staged)

    def _row(self, arena: U8Array, offset: int) -> Any:
        count = self.chunk_blocks * sum(self._sizes)
        flat = torch.frombuffer(arena.data, dtype=self.dtype, count=count, offset=offset)
        return flat.view(self.chunk_blocks, -1)

    def _pairs(self, row: Any, kv: KV, at: int) -> Sequence[tuple[Any, Any]]:
        """Each tensor's part of ``row`` and its tokens from ``at`` on, both of shape
        ``(heads, blocks, BLOCK, width)``."""
        tokens = slice(at, at + len(row) * BLOCK)
        return [
            (
                part.unflatten(1, (heads, BLOCK, width)).transpose(0, 1),
                tensor[0, :, tokens].unflatten(1, (len(row), BLOCK)),
            )
            for part, (heads, width), tensor in zip(
                row.split(self._sizes, 1), self.shapes, kv, strict=True
            )
        ]
