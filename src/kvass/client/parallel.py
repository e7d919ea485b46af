"""How an engine is spread over worker processes: distinct shards, which of them a worker holds, who
writes and who reads. Only this file derives them from an engine's parallel configuration.

Rank order is vLLM's: the ranks of a tensor-parallel group are consecutive, pipeline stages stride
over them, so ``rank = stage * tp + tensor rank``. Data-parallel replicas are instances of their
own.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvass.errors import UsageError
from kvass.messages import Register
from kvass.types import MAX_RANKS, SCHEDULER, RankLayout


class ParallelStrategy(msgspec.Struct, frozen=True):
    """One process of an engine of ``tp`` x ``pp`` worker ranks; ``rank`` -1 is its scheduler.

    ``replicas`` consecutive ranks of a tensor-parallel group hold the same bytes: 1 for a dense
    model, ``tp`` under MLA, between them for GQA with fewer KV heads than ranks. They share one
    shard; the first of them writes it, and all of them read it.

    Raises ``UsageError`` for sizes below 1, more than ``MAX_RANKS`` ranks, ``replicas`` that do not
    divide ``tp``, and a rank outside the world.
    """

    tp: int = 1
    pp: int = 1
    replicas: int = 1
    rank: int = SCHEDULER

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1 or self.ranks > MAX_RANKS:
            raise UsageError(
                f"tp {self.tp} x pp {self.pp}: use sizes of at least 1 and at most "
                f"{MAX_RANKS} ranks in all"
            )
        if self.replicas < 1 or self.tp % self.replicas:
            raise UsageError(f"replicas {self.replicas}: give a divisor of tp {self.tp}")
        if not SCHEDULER <= self.rank < self.ranks:
            raise UsageError(
                f"rank {self.rank}: a world of {self.ranks} has 0..{self.ranks - 1}, "
                f"and {SCHEDULER} for its scheduler"
            )

    def at(self, rank: int) -> ParallelStrategy:
        return msgspec.structs.replace(self, rank=rank)

    @property
    def ranks(self) -> int:
        """Worker processes."""
        return self.tp * self.pp

    @property
    def world_size(self) -> int:
        """Distinct shards of a row."""
        return self.ranks // self.replicas

    @property
    def readers(self) -> tuple[int, ...]:
        """The ranks that read a match and release it: all ranks, also those that share a shard."""
        return tuple(range(self.ranks))

    @property
    def writers(self) -> tuple[int, ...]:
        """The rank that writes each shard, by shard."""
        return tuple(range(0, self.ranks, self.replicas))

    @property
    def shard(self) -> int:
        """The shard this worker holds; 0 for a scheduler, which holds none."""
        return max(self.rank, 0) // self.replicas

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes its shard."""
        return self.rank in self.writers

    @property
    def last_stage(self) -> bool:
        """Whether this worker belongs to the last pipeline stage, which samples the tokens."""
        return self.rank >= self.tp * (self.pp - 1)

    def register(
        self,
        instance: str,
        identity: Mapping[str, str],
        chunk_tokens: int,
        layout: RankLayout | None = None,
        *,
        model: str = "",
    ) -> Register:
        """This process's registration; ``layout`` is a worker's own and None for the scheduler,
        ``model`` a name for people. Raises ``UsageError`` if a worker gives no layout or a
        scheduler one.
        """
        if (self.rank == SCHEDULER) != (layout is None):
            raise UsageError("layout: every worker gives one and a scheduler none")
        return Register(
            instance=instance,
            identity=dict(identity),
            chunk_tokens=chunk_tokens,
            rank=self.rank,
            ranks=self.ranks,
            world_size=self.world_size,
            shard=self.shard,
            writer=self.rank == SCHEDULER or self.writes,
            layout=layout,
            model=model,
        )
