"""Random models for simulated engines: layouts of all kinds, and prompts that share prefixes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec

from kvass import messages as m
from kvass.client.parallel import ParallelStrategy
from kvass.kinds import KINDS, GroupKind
from kvass.types import PAGE, SCHEDULER, GroupLayout, RankLayout, chunk_blocks

WIDTH: Final = 8
"""Bytes of a chunk hash."""

CHUNK_TOKENS: Final = 16

GRIDS: Final = tuple((tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4))
"""``(tp, pp)`` of the parallel strategies that tests cover."""

_SMALL: Final = ((1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (4, 1))


@dataclass(frozen=True, eq=False, slots=True)
class Model:
    """A model as the daemon knows it, and the prompts (chunk hashes) that its users send."""

    identity: dict[str, str]
    world: ParallelStrategy
    layouts: tuple[RankLayout, ...]
    """By shard."""
    prompts: tuple[tuple[bytes, ...], ...]
    chunk_tokens: int = CHUNK_TOKENS

    @property
    def ranks(self) -> int:
        return self.world.ranks

    @property
    def groups(self) -> int:
        return len(self.layouts[0].groups)

    def shard_of(self, rank: int) -> int:
        return rank // self.world.replicas

    def shard_bytes(self, group: int) -> tuple[int, ...]:
        return tuple(x.groups[group].shard_bytes(self.chunk_tokens) for x in self.layouts)

    @property
    def row_bytes(self) -> int:
        """Bytes of one chunk in all groups and shards."""
        return sum(sum(self.shard_bytes(g)) for g in range(self.groups))

    @property
    def chunk_blocks(self) -> int:
        """Blocks of a chunk, if hits may end at each of them."""
        return chunk_blocks(self.layouts[0].groups, self.chunk_tokens)

    def block_hashes(self, prompt: tuple[bytes, ...], chunk: int) -> list[bytes]:
        """The hashes of the blocks of a chunk of ``prompt``, or of the chunk after it. Chunks that
        follow the same chunk have some of their first blocks in common."""
        parent = prompt[chunk - 1] if chunk else b""
        own = prompt[chunk] if chunk < len(prompt) else _digest(parent, b"after")
        count = self.chunk_blocks
        alike = own[-1] % count
        hashes = [_digest(parent if i < alike else own, b"%d" % i) for i in range(count - 1)]
        return [*hashes, own]

    def register(self, instance: str, rank: int) -> m.Register:
        layout = None if rank == SCHEDULER else self.layouts[self.shard_of(rank)]
        said = self.world.at(rank).register(instance, self.identity, self.chunk_tokens, layout)
        return msgspec.structs.replace(said, seq=2)


def _digest(*parts: bytes) -> bytes:
    return blake2b(b"/".join(parts), digest_size=WIDTH).digest()


_MIXED: Final = [kind for kind in KINDS for _ in range(2 if kind == "sliding_window" else 1)]

Shape = tuple[GroupKind, int, int]
"""Kind, block tokens and window tokens of a layer group, the same on every rank."""


def random_shapes(rng: random.Random, chunk_tokens: int) -> list[Shape]:
    """One to four groups: mostly ``full`` alone, else any mix, seldom without a ``full`` one."""
    shapes: list[Shape] = []
    hybrid = rng.random() < 0.5
    alike = rng.choice([0, 2, 4, 4])
    for number in range(rng.choice([1, 1, 2, 3]) + hybrid):
        kind: GroupKind = "full"
        if hybrid and (number or rng.random() < 0.2):
            kind = rng.choice(_MIXED)
        window = 0
        if KINDS[kind].windowed:
            window = rng.choice([1, 2, 7, 8, 16, 17, 24, 40, 64])
        blocks = [n for n in (2, 4, 8, 16) if chunk_tokens % n == 0]
        shapes.append((kind, rng.choice(blocks), window))
    if alike and not hybrid:  # hits may end at any block
        shapes = [(kind, min(alike, chunk_tokens), window) for kind, _, window in shapes]
    return shapes


def random_layout(rng: random.Random, shapes: list[Shape], stage: int = 0) -> RankLayout:
    """Shards of a few pages. Each pipeline ``stage`` has its own layers, seldom none."""
    groups = []
    for number, (kind, block_tokens, window) in enumerate(shapes):
        pages = tuple(rng.randint(1, n * block_tokens // 8) for n in (PAGE // 2, PAGE))
        if number and rng.random() < 0.1:
            pages = ()
        layers = tuple(f"{stage}.{i}" for i in range(len(pages)))
        groups.append(GroupLayout(kind, block_tokens, layers, pages, window))
    return RankLayout(tuple(groups))


def random_world(rng: random.Random) -> ParallelStrategy:
    """Mostly up to four ranks, seldom any of ``GRIDS``; KV heads replicated or not."""
    tp, pp = rng.choice(GRIDS if rng.random() < 0.03 else _SMALL)
    return ParallelStrategy(tp, pp, rng.choice([1, tp, *(n for n in (2, 4) if tp % n == 0)]))


def random_model(rng: random.Random, name: str) -> Model:
    """A model of random groups, prompts and strategy.

    Shards differ in size, also within a stage, so that mixing them up is noticed.
    """
    world = random_world(rng)
    shapes = random_shapes(rng, CHUNK_TOKENS)
    each_stage = world.world_size // world.pp
    layouts = tuple(
        random_layout(rng, shapes, shard // each_stage) for shard in range(world.world_size)
    )
    prompts: list[tuple[bytes, ...]] = [()]
    for i in range(rng.randint(3, 7)):
        parent = rng.choice(prompts)
        tail = tuple(b"%04d%04d" % (i, j) for j in range(rng.randint(1, 5)))
        prompts.append(parent[: rng.randint(0, len(parent))] + tail)
    return Model({"model": name}, world, layouts, tuple(prompts[1:]))


def even_model(name: str, groups: int, world: ParallelStrategy, shard_bytes: int) -> Model:
    """A model of full attention groups, each shard of a chunk ``shard_bytes`` long."""
    group = GroupLayout(kind="full", block_tokens=16, layers=("a",), page_bytes=(shard_bytes,))
    layouts = (RankLayout((group,) * groups),) * world.world_size
    return Model({"model": name}, world, layouts, ())
