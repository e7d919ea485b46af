"""A machine with a clock one can turn: what the core's tests speak through.

Law of this file: ``validate()`` runs after every event, whatever a test looks at.
"""

from __future__ import annotations

from typing import Any

from kvass import messages as m
from kvass.core.effects import Close, Effect, Event, HalfClose, Lost, Opened, Received, Send, Tick
from kvass.core.machine import CacheMachine, CoreConfig
from kvass.types import PAGE, GroupLayout, Limits, RankLayout, Timing

BOOT = b"0123456789abcdef"
WIDTH = 8
LEASE_S, RESERVE_S, GRACE_S = 10.0, 20.0, 1.0


def key(name: object) -> bytes:
    """A digest ending in zeros, as real ones may."""
    return str(name).encode().ljust(WIDTH, b"\0")


def digests(*names: object) -> bytes:
    return b"".join(map(key, names))


def layout(*group_pages: int) -> RankLayout:
    """One ``full`` group per argument, whose shard of a chunk takes that many pages."""
    return RankLayout(
        groups=tuple(
            GroupLayout(kind="full", block_tokens=16, layers=("a",), page_bytes=(n * PAGE,))
            for n in group_pages
        )
    )


class Rig:
    """An arena of ``pages`` pages in extents of ``extent`` pages. Time starts at 100.

    ``core``: more fields of ``CoreConfig``. ``index``: what outlives the machine. ``now``: another
    time.
    """

    def __init__(self, pages: int = 64, extent: int = 4, **limits: Any) -> None:
        core, index = limits.pop("core", {}), limits.pop("index", None)
        self.now = limits.pop("now", 100.0)
        self.machine = CacheMachine(
            CoreConfig(
                **{
                    "boot": BOOT,
                    "arena_bytes": pages * PAGE,
                    "extent_bytes": extent * PAGE,
                    "timing": Timing(
                        lease_s=LEASE_S, reserve_s=RESERVE_S, lost_engine_grace_s=GRACE_S
                    ),
                    "limits": Limits(**{"segment_index_bytes": 1 << 16, **limits}),
                    "version": "test",
                    **core,
                }
            ),
            index,
        )
        self.last: list[Effect] = []
        self.promoting: list[m.Promoting] = []
        """What the last message was told of promotions."""
        self._connections = 0

    # ------------------------------------------------------------ events

    def step(self, event: Event) -> list[Effect]:
        self.last = self.machine.step(event, self.now)
        self.machine.validate()
        return self.last

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.step(Tick())

    def finish(self) -> int:
        """Do the work that was left for later steps; how many steps that took."""
        steps = 0
        while (due := self.machine.next_deadline()) is not None and due <= self.now:
            self.wait(0)
            steps += 1
            assert steps < 1000
        return steps

    def open(
        self, hello: bool = True, uid: int = 0, own: bool = False, pid: int = 0, **fields: Any
    ) -> int:
        self._connections += 1
        self.step(Opened(self._connections, uid, own, pid=pid, start=pid))
        if hello:
            self.say(self._connections, m.Hello(seq=1, **{"clock_s": self.now, **fields}))
        return self._connections

    def lose(self, *connections: int, exiting: bool = False) -> None:
        for connection in connections:
            self.step(Lost(connection, exiting))

    def say(self, connection: int, message: m.FromClient) -> list[Any]:
        """The messages that come back to ``connection``, but for ``promoting``."""
        effects = self.step(Received(connection, message))
        sent = [e.message for e in effects if isinstance(e, Send) and e.connection == connection]
        self.promoting = [each for each in sent if isinstance(each, m.Promoting)]
        return [each for each in sent if not isinstance(each, m.Promoting)]

    def ask(self, connection: int, message: m.FromClient) -> Any:
        """The one reply to a request, or the one error to a one-way message."""
        (reply,) = self.say(connection, message)
        return reply

    def code(self, connection: int, message: m.FromClient) -> str:
        """The code with which ``message`` is refused."""
        reply = self.ask(connection, message)
        assert isinstance(reply, m.Error), reply
        assert reply.seq == message.seq
        return reply.code

    def ended(self) -> list[str]:
        """How the last event ended connections."""
        return [type(e).__name__ for e in self.last if isinstance(e, Close | HalfClose)]

    # ------------------------------------------------------------ engines

    def register(self, connection: int, instance: str = "e", **fields: Any) -> Any:
        terms = {"identity": {"model": "m"}, "chunk_tokens": 16, **fields}
        if terms.get("rank", -1) >= 0 and "layout" not in terms:
            terms["layout"] = layout(1)
        return self.ask(connection, m.Register(seq=2, instance=instance, **terms))

    def engine(
        self,
        instance: str = "e",
        ranks: int = 1,
        uid: int = 0,
        own: bool = False,
        pid: int = 0,
        **fields: Any,
    ) -> Engine:
        """A complete instance: its scheduler, and ``ranks`` ranks, each with a shard of its own.
        ``pid``: of the first rank; 0: no process is known."""
        common = {"ranks": ranks, "world_size": ranks, **fields}
        shape = common.pop("layout", layout(1))
        scheduler = self.open(uid=uid, own=own)
        self.register(scheduler, instance, **common)
        pids = [pid + rank if pid else 0 for rank in range(ranks)]
        workers = [self.open(uid=uid, own=own, pid=each) for each in pids]
        for rank, connection in enumerate(workers):
            mine = {"rank": rank, "shard": rank % common["world_size"], "layout": shape}
            reply = self.register(connection, instance, **{**common, **mine})
        return Engine(self, scheduler, workers, reply.namespace)

    @property
    def status(self) -> dict[str, Any]:
        return self.machine.status()

    def gauge(self, *names: str) -> tuple[Any, ...]:
        return tuple(self.status[n] for n in names)

    def count(self, name: str) -> int:
        return int(self.status["counters"].get(name, 0))


class Engine:
    """What a scheduler and its workers say, in one place."""

    def __init__(self, rig: Rig, scheduler: int, workers: list[int], namespace: bytes) -> None:
        self.rig = rig
        self.scheduler = scheduler
        self.workers = workers
        self.namespace = namespace

    # ------------------------------------------------------------ reading

    def lookup(self, *names: object, **fields: Any) -> Any:
        blob = digests(*names)
        message = m.Lookup(seq=7, request="r", digests=blob, width=WIDTH, **fields)
        return self.rig.ask(self.scheduler, message)

    def holds(self, *names: object) -> int:
        """How many chunks of a prompt match; the match is given back."""
        found = self.lookup(*names)
        if found.lease:
            self.give_back(found.lease)
        return int(found.chunks)

    def release(self, lease: int, rank: int = 0) -> list[Any]:
        return self.rig.say(self.workers[rank], m.Release(boot=BOOT, lease=lease, rank=rank))

    def give_back(self, lease: int) -> list[Any]:
        return self.rig.say(self.scheduler, m.Release(boot=BOOT, lease=lease))

    # ------------------------------------------------------------ writing

    def reserve(self, *names: object, **item: Any) -> Any:
        """The grant of one item."""
        return self.reserve_items(m.ReserveItem(request="r", digests=digests(*names), **item))[0]

    def begin(self, *names: object, **item: Any) -> Any:
        """Reserve and hand over; the grant."""
        grant = self.reserve(*names, **item)
        self.hand_over(reservations=(grant.reservation,))
        return grant

    def reserve_items(self, *items: m.ReserveItem) -> list[Any]:
        message = m.Reserve(seq=9, items=list(items), width=WIDTH)
        return list(self.rig.ask(self.scheduler, message).grants)

    def hand_over(
        self, leases: tuple[int, ...] = (), reservations: tuple[int, ...] = ()
    ) -> list[Any]:
        message = m.HandedOver(boot=BOOT, leases=leases, reservations=reservations)
        return self.rig.say(self.scheduler, message)

    def commit(self, reservation: int, rank: int = 0) -> list[Any]:
        message = m.Commit(boot=BOOT, reservation=reservation, rank=rank)
        return self.rig.say(self.workers[rank], message)

    def abort(self, reservation: int, rank: int = -1) -> list[Any]:
        connection = self.scheduler if rank < 0 else self.workers[rank]
        return self.rig.say(connection, m.Abort(boot=BOOT, reservation=reservation, rank=rank))

    def store(self, *names: object, **item: Any) -> Any:
        """Reserve, hand over, and commit by every rank; the grant."""
        grant = self.begin(*names, **item)
        assert grant.reservation, "nothing was granted"
        for rank in range(len(self.workers)):
            self.commit(grant.reservation, rank)
        return grant

    def clear(self) -> int:
        return int(self.rig.ask(self.scheduler, m.Clear(seq=11)).rows)

    def quit(self) -> None:
        self.rig.lose(self.scheduler, *self.workers)
