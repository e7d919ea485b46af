"""One rank of a fake engine, and the transfers that it gets from the scheduler.

A rank settles a transfer right after its last byte, on the copy thread. A dead rank settles
nothing; the daemon sees its EOF.
"""

from __future__ import annotations

import socket as sockets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from kvass.client.endpoint import Endpoint
from kvass.client.worker import ArenaLease, WorkerClient
from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes
from kvass.messages import Register
from kvass.testing.pages import RankMemory
from kvass.transfer.base import Done, Job, Mover, U8Array
from kvass.transfer.host import HostMover
from kvass.types import I64Array, Slots

MakeMover = Callable[[Sequence[U8Array], Sequence[GroupPlanes]], Mover]


@dataclass(eq=False, slots=True)
class Transfer:
    """A grant or a match, until its last copy has ended.

    ``keys``: the keys of its chunks; ``tables[g]``: their blocks in group ``g``.
    """

    kind: Literal["store", "load"]
    id: int
    boot: bytes
    given_s: float
    deadline_s: float
    keys: list[bytes]
    slots: tuple[Slots, ...]
    tables: tuple[I64Array, ...]
    ranks: tuple[int, ...]
    """The ranks that owe a commit or a release."""
    which: tuple[tuple[int, ...], ...] = ()
    """By group: the indices in ``keys`` of the chunks that move; empty: all in every group."""
    outcomes: dict[int, str] = field(default_factory=dict)
    """By rank: how its copy ended; ``done`` is success."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def report(self, rank: int, outcome: str) -> None:
        """A rank's copy has ended, or never will; the first report counts."""
        with self.changed:
            self.outcomes.setdefault(rank, outcome)
            self.changed.notify_all()

    @property
    def moving(self) -> tuple[I64Array, ...]:
        """The blocks that move, by group."""
        if not self.which:
            return self.tables
        return tuple(t[list(w)] for t, w in zip(self.tables, self.which, strict=True))

    @property
    def whole(self) -> bool:
        """Whether every rank copied its part in time."""
        return all(self.outcomes.get(rank) == "done" for rank in self.ranks)


class FakeRank:
    """One worker process: ``blocks`` blocks of KV memory, its copies, its session.

    ``mover`` makes the mover, for host memory or for a fake GPU.
    """

    def __init__(
        self, socket: str, terms: Register, blocks: int, mover: MakeMover = HostMover
    ) -> None:
        assert terms.layout is not None, "a rank registers with its layout"
        self.rank = terms.rank
        self.alive = True
        self.memory = RankMemory(terms.layout, terms.shard, terms.chunk_tokens, blocks)
        self.mover = mover(self.memory.regions, self.memory.planes)
        self.client = WorkerClient(socket, terms)
        self.client.start()

    def copy(self, what: Transfer) -> None:
        """Start this rank's copy; it is settled on the copy thread."""
        if not self.alive:
            what.report(self.rank, "dead")
            return
        self.mover.poll()  # or it keeps what has ended, and so the arenas of daemons that are gone
        arena = self.client.arena(what.boot, what.given_s)
        if arena is None:
            self._settle(what, ok=False)
            what.report(self.rank, "refused")
            return
        shard = self.memory.shard
        plans = tuple(
            plan_copy(planes, table, slots.offsets(shard, planes.shard_bytes))
            for planes, table, slots in zip(
                self.memory.planes, what.moving, what.slots, strict=True
            )
        )
        ended = partial(self._ended, arena, what)
        known = arena.populated
        self.mover.submit(
            Job(what.kind, plans, arena.buffer, what.deadline_s, on_done=ended, populated=known)
        )

    def _ended(self, arena: ArenaLease, what: Transfer, done: Done) -> None:
        if self.alive:
            self._settle(what, done.ok)
        arena.close()
        what.report(self.rank, done.outcome)

    def _settle(self, what: Transfer, ok: bool) -> None:
        if what.kind == "load":
            self.client.release(what.boot, what.id)
        elif ok:
            self.client.commit(what.boot, what.id)
        else:
            self.client.abort(what.boot, what.id)

    def kill(self) -> None:
        """End as SIGKILL does: copies stop, nothing is settled, the daemon sees EOF."""
        self.alive = False
        self._end_copies()
        hang_up(self.client)

    def close(self) -> None:
        """End copies, then the session."""
        self._end_copies()
        self.client.close()

    def _end_copies(self) -> None:
        self.mover.close()
        self.mover.poll()  # or they would keep this rank's memory until garbage is collected


def hang_up(client: Endpoint) -> None:
    """Close a session as its process's death does: EOF, without a message, for good."""
    with client.lock:
        client._connection.closed = True
        if client.session is not None:
            client.session.channel._sock.shutdown(sockets.SHUT_RDWR)
    client.close()
