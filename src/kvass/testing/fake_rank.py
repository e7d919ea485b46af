"""A rank of a fake engine, and the transfers that it gets from the scheduler.

A rank settles a transfer on the copy thread, right after the last byte. A dead rank settles
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
from kvass.wire.channel import Channel

MakeMover = Callable[[Sequence[U8Array], Sequence[GroupPlanes]], Mover]


@dataclass(eq=False, slots=True)
class Transfer:
    """The store of a grant, or the load of a match.

    ``keys``: the keys of its chunks. ``tables[g]``: their blocks in group ``g``.
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
    """By group: which chunks are copied, as indices in ``keys``. Empty: all chunks in every
    group."""
    outcomes: dict[int, str] = field(default_factory=dict)
    """By rank: the outcome of its copy; ``done`` is success."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def report(self, rank: int, outcome: str) -> None:
        """Set the outcome of a rank's copy. If there are several reports, the first counts."""
        with self.changed:
            self.outcomes.setdefault(rank, outcome)
            self.changed.notify_all()

    @property
    def moving(self) -> tuple[I64Array, ...]:
        """The blocks that are copied, by group."""
        if not self.which:
            return self.tables
        return tuple(t[list(w)] for t, w in zip(self.tables, self.which, strict=True))

    @property
    def whole(self) -> bool:
        """Whether every rank copied its part in time."""
        return all(self.outcomes.get(rank) == "done" for rank in self.ranks)


class FakeRank:
    """A rank with ``blocks`` blocks of KV memory, a mover and a connection.

    ``mover`` is a function that makes the mover, for host memory or for a fake GPU.
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
        """Start this rank's copy. The copy thread settles it."""
        if not self.alive:
            what.report(self.rank, "dead")
            return
        self.mover.poll()  # or the mover keeps jobs that have ended, and with them old arenas
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
        """End the rank as SIGKILL does: copies stop, nothing is settled, and the daemon sees
        EOF."""
        self.alive = False
        self._end_copies()
        hang_up(self.client)

    def close(self) -> None:
        """End the copies, then the connection."""
        self._end_copies()
        self.client.close()

    def _end_copies(self) -> None:
        self.mover.close()
        self.mover.poll()  # or the ended jobs keep this rank's memory until garbage is collected


def hang_up(client: Endpoint) -> None:
    """Close a connection as the death of its process does: by EOF, without a message. It does not
    reconnect."""
    with client.lock:
        client.closed = True
        if client.connection is not None:
            channel = client.connection.channel
            assert isinstance(channel, Channel)
            channel._sock.shutdown(sockets.SHUT_RDWR)
    client.close()
