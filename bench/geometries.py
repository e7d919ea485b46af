"""Where vLLM 0.32 keeps the KV pages of well-known models, as planes: for benchmarks and tests.

Page sizes, groups and strides are those of the model on a GPU, in bf16 (DeepSeek-V4 in its own
fp8). Nothing here touches memory.

As vLLM lays them out: all groups of a model share one allocation from byte 0 on, because a block id
belongs to one group at a time. *Layers outermost*: each layer has a region of its own. *Blocks
outermost*: a block holds its layers' pages side by side, those of one size together, and is as
long as the largest group needs. Models whose pages differ in size have only the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from kvass.kinds import GroupKind
from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import GroupPlanes, Part, describe_group, join_layers
from kvass.simulate.models import MODELS, layout
from kvass.types import GroupLayout, I64Array

Outermost = Literal["layers", "blocks"]


@dataclass(frozen=True)
class Geometry:
    """The layer groups of one rank of a model, and which index is outermost in its memory."""

    name: str
    groups: tuple[GroupLayout, ...]
    chunk_tokens: int = 256
    outermost: Outermost = "layers"

    @property
    def block_bytes(self) -> int:
        """What one block takes in all layers of the largest group."""
        return max(sum(group.page_bytes) for group in self.groups)

    def rows(self, tokens: int) -> int:
        """Whole chunks in ``tokens``: rows of every group."""
        return tokens // self.chunk_tokens

    def blocks(self, tokens: int, tables: int = 1) -> int:
        """Block ids for ``tables`` disjoint block tables of ``tokens``, and the null block."""
        one = sum(group.row_blocks(self.chunk_tokens) for group in self.groups)
        return 1 + tables * self.rows(tokens) * one

    def region_bytes(self, blocks: int) -> int:
        """The allocation that holds ``blocks`` blocks."""
        return self.block_bytes * blocks

    def arena_bytes(self, tokens: int) -> int:
        """What the rows of ``tokens`` take in an arena, padding included."""
        shards = [group.shard_bytes(self.chunk_tokens) for group in self.groups]
        return self.rows(tokens) * sum(shards)

    def planes(self, blocks: int) -> tuple[GroupPlanes, ...]:
        """The planes of all groups, in one region of ``region_bytes(blocks)``: as a worker makes
        them, so what lies in one piece in every block is one."""
        return tuple(self._planes(n, group, blocks) for n, group in enumerate(self.groups))

    def _planes(self, number: int, group: GroupLayout, blocks: int) -> GroupPlanes:
        pages = group.page_bytes
        inside = _side_by_side(pages)
        if self.outermost == "layers":
            bases = [at * blocks for at in inside]
            strides = list(pages)
        else:
            bases, strides = inside, [self.block_bytes] * len(pages)
        parts = [
            Part(name, base, stride, page, 0)
            for name, base, stride, page in zip(group.layers, bases, strides, pages, strict=True)
        ]
        joined, *where = join_layers(group, parts)
        return describe_group(number, joined, self.chunk_tokens, blocks, *where)

    def tables(self, tokens: int, count: int, rng: np.random.Generator) -> list[list[I64Array]]:
        """``count`` disjoint block tables: per group the ids of each row, of shape ``(rows,
        chunk_blocks)``, scattered over all blocks."""
        ids: I64Array = rng.permutation(self.blocks(tokens, count) - 1) + 1
        rows, at, made = self.rows(tokens), 0, []
        for _ in range(count):
            table = []
            for group in self.groups:
                width = group.row_blocks(self.chunk_tokens)
                table.append(ids[at : at + rows * width].reshape(rows, width))
                at += rows * width
            made.append(table)
        return made

    def plans(
        self, planes: Sequence[GroupPlanes], table: Sequence[I64Array], base: int = 0
    ) -> tuple[CopyPlan, ...]:
        """A plan per group: the rows of ``table`` one after the other in the arena from byte
        ``base``, group by group, as extents hold them."""
        made, at = [], base
        for group, ids in zip(planes, table, strict=True):
            slots = at + group.shard_bytes * np.arange(len(ids), dtype=np.int64)
            made.append(plan_copy(group, ids, slots))
            at += group.shard_bytes * len(ids)
        return tuple(made)


def _side_by_side(pages: Sequence[int]) -> list[int]:
    """Where each layer's page begins in a block: pages of one size lie together."""
    at, offsets = 0, [0] * len(pages)
    for size in dict.fromkeys(pages):
        for layer, page in enumerate(pages):
            if page == size:
                offsets[layer] = at
                at += page
    return offsets


def _group(kind: GroupKind, block_tokens: int, pages: Sequence[int]) -> GroupLayout:
    names = tuple(map(str, range(len(pages))))
    return GroupLayout(kind, block_tokens, names, tuple(pages))


def _both(name: str, *groups: GroupLayout, chunk_tokens: int = 256) -> list[Geometry]:
    """A model whose pages are of one size: either index can be outermost."""
    return [
        Geometry(name, groups, chunk_tokens),
        Geometry(f"{name}_blocks", groups, chunk_tokens, "blocks"),
    ]


def _kv(heads: int, width: int, block_tokens: int = 16) -> int:
    """A page of K and V in bf16."""
    return block_tokens * heads * width * 2 * 2


_LLAMA_8B: Final = layout(MODELS["llama-3-8b"], 16)
_LLAMA_70B_TP8: Final = _group("full", 16, [_kv(1, 128)] * 80)
_DEEPSEEK_V3: Final = layout(MODELS["deepseek-v3"], 16)
_GPT_OSS: Final = layout(MODELS["gpt-oss-20b"], 16)
# Attention's block is made as long as a state, so that all pages are of one size: 544 tokens.
_QWEN3_NEXT: Final = (
    _group("full", 544, [_kv(2, 256, 544)] * 12),
    *[_group("state", 544, [_kv(2, 256, 544)] * 12)] * 3,
)
_DEEPSEEK_V4: Final = layout(MODELS["deepseek-v4"], 256)

GEOMETRIES: Final[tuple[Geometry, ...]] = (
    *_both("llama_8b", *_LLAMA_8B),
    *_both("llama_70b_tp8", _LLAMA_70B_TP8),
    *_both("deepseek_v3", *_DEEPSEEK_V3),
    *_both("gpt_oss", *_GPT_OSS),
    *_both("qwen3_next", *_QWEN3_NEXT, chunk_tokens=544),
    Geometry("deepseek_v4", _DEEPSEEK_V4, 256, "blocks"),
)
"""4,096 tokens of them are 144 to 512 MiB, in runs of 8 KiB to 12.75 MiB."""


def geometry(name: str) -> Geometry:
    """The geometry of that name; KeyError if there is none."""
    return {one.name: one for one in GEOMETRIES}[name]
