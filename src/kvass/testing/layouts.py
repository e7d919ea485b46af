"""Models that simulated engines serve: layouts of all shapes, and prompts that share prefixes.

Law of this file: a model is a value; whoever has its seed has it again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvass import messages as m
from kvass.types import PAGE, SCHEDULER, GroupLayout, RankLayout

WIDTH = 8
"""Bytes of a chunk hash here."""


@dataclass(frozen=True, eq=False, slots=True)
class Model:
    """What an engine serves: its namespace, and the prompts (chunk hashes) its users send."""

    identity: dict[str, str]
    world_size: int
    layouts: tuple[RankLayout, ...]  # of rank r, which holds shard r % world_size
    prompts: tuple[tuple[bytes, ...], ...]
    chunk_tokens: int = 16

    @property
    def ranks(self) -> int:
        return len(self.layouts)

    @property
    def groups(self) -> int:
        return len(self.layouts[0].groups)

    def shard_bytes(self, group: int) -> tuple[int, ...]:
        shards = self.layouts[: self.world_size]
        return tuple(x.groups[group].shard_bytes(self.chunk_tokens) for x in shards)

    @property
    def row_bytes(self) -> int:
        """Of one chunk in all groups and shards."""
        return sum(sum(self.shard_bytes(g)) for g in range(self.groups))

    def register(self, instance: str, rank: int) -> m.Register:
        return m.Register(
            seq=2,
            instance=instance,
            identity=self.identity,
            chunk_tokens=self.chunk_tokens,
            rank=rank,
            ranks=self.ranks,
            world_size=self.world_size,
            shard=max(rank, 0) % self.world_size,
            writer=rank < self.world_size,
            layout=None if rank == SCHEDULER else self.layouts[rank],
        )


def random_layout(rng: random.Random, groups: int) -> RankLayout:
    """Shards of one to three pages."""
    return RankLayout(
        groups=tuple(
            GroupLayout(
                kind="full",
                block_tokens=8,
                layers=("a", "b"),
                page_bytes=(rng.randint(1, PAGE // 2), rng.randint(1, PAGE)),
            )
            for _ in range(groups)
        )
    )


def random_model(rng: random.Random, name: str) -> Model:
    """One to four ranks with as many shards or fewer, one to three groups, a tree of prompts."""
    ranks = rng.choice([1, 1, 2, 3, 4])
    world_size = rng.choice([1, ranks, ranks])
    groups = rng.choice([1, 1, 2, 3])
    shards = [random_layout(rng, groups) for _ in range(world_size)]
    prompts: list[tuple[bytes, ...]] = [()]
    for i in range(rng.randint(3, 7)):
        parent = rng.choice(prompts)
        tail = tuple(b"%04d%04d" % (i, j) for j in range(rng.randint(1, 5)))
        prompts.append(parent[: rng.randint(0, len(parent))] + tail)
    layouts = tuple(shards[r % world_size] for r in range(ranks))
    return Model({"model": name}, world_size, layouts, tuple(prompts[1:]))


def even_model(name: str, groups: int, ranks: int, shard_bytes: int) -> Model:
    """A rank per shard, every shard of ``shard_bytes``."""
    group = GroupLayout(kind="full", block_tokens=16, layers=("a",), page_bytes=(shard_bytes,))
    return Model({"model": name}, ranks, (RankLayout((group,) * groups),) * ranks, ())
