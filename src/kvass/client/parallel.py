"""How an engine is spread over worker processes: distinct shards, which of them a worker holds, who
writes and who reads. Only this file derives them from an engine's parallel configuration.

Rank order is vLLM's: the ranks of a tensor-parallel group are consecutive, pipeline stages stride
over them, so ``rank = stage * tp + tensor rank``. Data-parallel replicas are instances of their
own.

The ranks that reach one daemon are a *node*. To its daemon a node is an engine of its own: it
registers with ranks and shards that are numbered from 0 on, and its name and its identity say which
ranks of the engine they are (``ParallelStrategy.on``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kvass.errors import UsageError
from kvass.messages import Register
from kvass.types import MAX_RANKS, SCHEDULER, RankLayout

NODE: Final = "node"
"""The field of an identity that says which ranks a node has."""


class ParallelStrategy(msgspec.Struct, frozen=True):
    """One process of an engine of ``tp`` x ``pp`` worker ranks; ``rank`` -1 is its scheduler.

    ``replicas`` consecutive ranks of a tensor-parallel group hold the same bytes: 1 for a dense
    model, ``tp`` under MLA, between them for GQA with fewer KV heads than ranks. They share one
    shard; the first of them writes it, and all of them read it. ``node``: the ranks that reach the
    daemon of this process; empty: all of them do. ``daemons``: how many the engine uses.

    Raises ``UsageError`` for sizes below 1, more than ``MAX_RANKS`` ranks, ``replicas`` that do not
    divide ``tp``, and a rank outside the world.
    """

    tp: int = 1
    pp: int = 1
    replicas: int = 1
    rank: int = SCHEDULER
    node: tuple[int, ...] = ()
    daemons: int = 1

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

    def on(self, ranks: Iterable[int], daemons: int) -> ParallelStrategy:
        """This process where ``ranks`` reach its daemon, and others reach the others of
        ``daemons``."""
        node = tuple(sorted(ranks))
        node = () if len(node) == self.ranks else node
        return msgspec.structs.replace(self, node=node, daemons=daemons)

    @property
    def ranks(self) -> int:
        """Worker processes, on all nodes."""
        return self.tp * self.pp

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks that reach the daemon of this process. The others below are numbers of this
        node."""
        return self.node or tuple(range(self.ranks))

    @property
    def number(self) -> int:
        """This rank's number on its node; that of a scheduler is the same on all nodes."""
        return self.rank if self.rank == SCHEDULER else self.here.index(self.rank)

    @property
    def shards(self) -> tuple[int, ...]:
        """The engine's shards that this node holds."""
        return tuple(sorted({rank // self.replicas for rank in self.here}))

    @property
    def world_size(self) -> int:
        """Distinct shards of a row."""
        return len(self.shards)

    @property
    def readers(self) -> tuple[int, ...]:
        """The ranks that read a match and release it: all ranks, also those that share a shard."""
        return tuple(range(len(self.here)))

    @property
    def writers(self) -> tuple[int, ...]:
        """The rank that writes each shard, by shard."""
        first = dict[int, int]()
        for number, rank in enumerate(self.here):
            first.setdefault(rank // self.replicas, number)
        return tuple(first.values())

    @property
    def shard(self) -> int:
        """The shard this worker holds; 0 for a scheduler, which holds none."""
        shard = max(self.rank, 0) // self.replicas
        return self.shards.index(shard) if self.node and self.rank != SCHEDULER else shard

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes its shard."""
        return self.number in self.writers

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
        if self.node:
            more = self.daemons - 1
            instance = f"{instance}, {self.node_name}, {more} more daemon{'s' * (more > 1)}"
            identity = {**identity, NODE: self._node_text}
        return Register(
            instance=instance,
            identity=dict(identity),
            chunk_tokens=chunk_tokens,
            rank=self.number,
            ranks=len(self.here),
            world_size=self.world_size,
            shard=self.shard,
            writer=self.rank == SCHEDULER or self.writes,
            layout=layout,
            model=model,
        )

    @property
    def node_name(self) -> str:
        """The ranks of this node, for people."""
        runs = list[list[int]]()
        for rank in self.here:
            if runs and runs[-1][-1] == rank - 1:
                runs[-1][1:] = [rank]
            else:
                runs.append([rank])
        return f"ranks {', '.join('-'.join(map(str, run)) for run in runs)} of {self.ranks}"

    @property
    def _node_text(self) -> str:
        """What a node's rows depend on, beside the engine's identity."""
        return f"{self.node_name}: tp {self.tp}, pp {self.pp}, replicas {self.replicas}"


def without_node(identity: Mapping[str, str]) -> dict[str, str]:
    """``identity`` without what ``register`` adds of a node, for a process that registers as a part
    of another node, or of none."""
    return {name: text for name, text in identity.items() if name != NODE}
