"""Engines over many nodes, simulated: the scheduler's client, agents and ranks are real, so are the
cores of the daemons. Sockets, steps, clocks and pages are not.

Laws of this file, which each step checks:

- A rank reads only what the key says, under a lease that its daemon has open for it.
- All ranks get the same tokens of a load.
- Without faults, no load that was handed over fails.
- A node is all ranks of a machine, also while its daemon is restarted.
- A lookup or a reserve whose step lost its report ends.
- When all requests have ended, no daemon has a lease, a reservation or a pin left, long before the
  deadlines.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from kvass.client.connection import DaemonConnection
from kvass.client.lookups import Match, Pending
from kvass.client.nodes import NodesClient
from kvass.client.parallel import ParallelStrategy
from kvass.client.reached import RankNews
from kvass.client.reconnecting import Reconnecting
from kvass.client.steps import Relay
from kvass.client.worker import WorkerClient
from kvass.core.effects import Close, Effect, Event, HalfClose, Lost, Received, Send, Tick
from kvass.engine import node_rank
from kvass.engine.boundary import Boundary
from kvass.engine.node_rank import NodeRank
from kvass.engine.nodes import SharedWork, share_out, to_send
from kvass.engine.step_work import Load, Store
from kvass.errors import Unavailable
from kvass.messages import Clear, Granted, Hello, Register, ReserveItem, Welcome
from kvass.types import PAGE, SCHEDULER
from tests.core.rig import Rig, layout

CHUNK: Final = 16
WIDTH: Final = 8
LAYOUT: Final = layout(1)
STEP_S: Final = 0.005
LATE_S: Final = 2.5
"""How long after its daemon a late rank comes back."""


class Clock:
    """What ``time.monotonic`` says: on each machine another time."""

    def __init__(self, offsets: list[float]) -> None:
        self.now, self.machine, self._offsets = 1000.0, 0, offsets

    def monotonic(self) -> float:
        self.now += 1e-7  # whoever polls goes on
        return self.now + self._offsets[self.machine]

    @contextmanager
    def at(self, machine: int) -> Iterator[None]:
        before, self.machine = self.machine, machine
        yield
        self.machine = before


class Machine:
    """A daemon, life after life. ``pages[at]``: what key the page at that offset holds."""

    def __init__(self, number: int, clock: Clock, pages: int) -> None:
        self.number, self._clock, self._size, self.life = number, clock, pages, 0
        self.alive = False
        self.channels: dict[int, RigChannel] = {}
        self.start()

    def start(self) -> None:
        self.life, self.alive = self.life + 1, True
        boot = bytes([self.number, self.life]) * 8
        with self._clock.at(self.number):
            self.rig = Rig(self._size, core={"boot": boot}, now=time.monotonic())
        self.pages: dict[int, int] = {}

    def kill(self) -> None:
        self.alive = False
        for channel in self.channels.values():
            channel.closed = True
        self.channels.clear()

    def turn(self, effects: list[Effect]) -> None:
        """Carry out what the core wants."""
        for effect in effects:
            if isinstance(effect, Send) and effect.connection in self.channels:
                self.channels[effect.connection].inbox.append(effect.message)
            elif isinstance(effect, Close | HalfClose) and effect.connection in self.channels:
                self.channels[effect.connection].closed = True

    def tick(self) -> None:
        with self._clock.at(self.number):
            self.rig.now = time.monotonic()
        while (due := self.rig.machine.next_deadline()) is not None and due <= self.rig.now:
            self.step(Tick())

    def step(self, event: Event) -> None:
        """``Rig.step``, which would also validate each event."""
        self.turn(self.rig.machine.step(event, self.rig.now))

    def connect(self, registration: Register) -> DaemonConnection | None:
        """A connection that is registered; None: the daemon refused it, or is dead."""
        if not self.alive:
            return None
        self.tick()
        number = self.rig.open(hello=False)
        channel = self.channels[number] = RigChannel(self, number)
        channel.send(Hello(seq=1, clock_s=self.rig.now))
        registration.seq = 2
        channel.send(registration)
        welcome, registered = channel.receive(0.0)[:2]
        assert isinstance(welcome, Welcome)
        if type(registered).__name__ != "Registered":
            channel.close()
            return None
        connection = DaemonConnection(channel, f"machine {self.number}")
        connection.welcome, connection.registration = welcome, registration
        connection.registered_s = self.rig.now
        return connection


class RigChannel:
    """A socket of a ``Machine``."""

    waits, wants_write = False, False

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number, self.closed = machine, number, False
        self.inbox: list[Any] = []

    def send(self, message: Any) -> None:
        if self.closed:
            raise Unavailable("closed")
        self.machine.tick()
        self.machine.step(Received(self.number, copy.copy(message)))

    def receive(self, timeout_s: float) -> list[Any]:
        said, self.inbox = self.inbox, []
        if self.closed and not said:
            raise Unavailable("closed")
        return said

    @property
    def of_scheduler(self) -> bool:
        """A daemon never ends the connection of a rank that may write."""
        terms = self.machine.rig.machine.state.connections[self.number].registered
        return terms is not None and terms.rank == SCHEDULER

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        if self.machine.channels.get(self.number) is self:  # else it is of an earlier life
            del self.machine.channels[self.number]
            self.closed = True
            self.machine.step(Lost(self.number))

    drop = close


class OnMachine(Reconnecting):
    """A client whose daemon is a ``Machine``: ``start`` tries once to connect."""

    machine: Machine

    def start(self) -> None:
        machine = getattr(self, "machine", None)
        before = self.connection
        if before is not None and getattr(before.channel, "closed", False):
            with self.lock:
                self.lose(before, Unavailable("closed"))
        if machine is None or self.connection is not None or self.closed:
            return
        assert self.registration is not None
        if (connection := machine.connect(self.registration)) is not None:
            self._connected(connection)

    def lose(self, connection: DaemonConnection, error: Any) -> None:
        super().lose(connection, error)
        connection.channel.close()

    def close(self) -> None:
        with self.lock:
            self.closed = True
            if self.connection is not None:
                self.lose(self.connection, None)


class OwnClient(OnMachine, NodesClient):
    pass


class SimRelay(OnMachine, Relay):
    pass


class RankClient(OnMachine, WorkerClient):
    """``random``: of the world. It may come back later than its daemon."""

    random: Random
    _back_s = 0.0

    def start(self) -> None:
        if not self.machine.alive:
            self._back_s = time.monotonic() + self.random.choice([0.0, 0.0, LATE_S])
        if self.connection is not None or time.monotonic() >= self._back_s:
            super().start()


@dataclass
class Asked:
    """A request for the chunks ``keys``. ``found``: how many it loads; None: it is looked up."""

    name: str
    keys: list[int]
    found: int | None = None
    stored: bool = False
    reserving: Any = None

    @property
    def digests(self) -> bytes:
        return b"".join(key.to_bytes(WIDTH, "big") for key in self.keys)


class SimRank:
    """A rank. Its copies end some steps after they begin."""

    def __init__(self, world: NodesWorld, rank: int) -> None:
        self.world, self.rank, self.machine = world, rank, world.machine_of(rank)
        terms = world.strategy.at(rank).register("engine", {"model": "m"}, CHUNK, LAYOUT)
        client = RankClient("", terms, wants_arena=False)
        client.machine, client.random = self.machine, world.random
        self.copier = SimpleNamespace(
            client=client, strategy=world.strategy.at(rank), daemon=(self.machine, None)
        )
        self.node = NodeRank(self.copier, Boundary())  # type: ignore[arg-type]
        self.copies: list[Load | Store] = []

    def run(self, work: SharedWork) -> RankNews | None:
        self.copier.client.start()
        mine = self.node.own_part(work)
        for load in mine.loads:
            self._begin(load, bool(load.lease))
        for store in mine.stores if self.copier.strategy.writes else ():
            self._begin(store, True)
        while self.copies and self.world.random.random() < 0.6:
            self._end(self.copies.pop(0))
        if self.node._relay is not None:
            self.node._relay.start()
        return self.node.news()

    def _valid(self, one: Load | Store) -> bool:
        connection = self.copier.client.connection
        return (
            connection is not None
            and not connection.channel.closed
            and connection.boot == one.boot
            and connection.registered_s <= one.given_s
        )

    def _begin(self, one: Load | Store, good: bool) -> None:
        if good and self._valid(one):
            self.copies.append(one)
            return
        if isinstance(one, Load):
            self.world.loaded(one.request, self.rank, None)
        self._settle(one, False)

    def _end(self, one: Load | Store) -> None:
        good = self._valid(one) and time.monotonic() < one.deadline_s
        offsets = list[int]()
        if good:  # else the slots may be those of a node that had other shards
            offsets = one.slots[0].offsets(self.copier.strategy.shard, PAGE).tolist()
            assert len(offsets) == len(one.blocks[0]), (one, offsets)
        state, number = self.machine.rig.machine.state, self.copier.strategy.number
        if isinstance(one, Store):
            if good:
                entry = state.reservations.all[one.reservation]
                assert number in entry.owing, "the reservation was ended"
                self.machine.pages.update(zip(offsets, one.blocks[0], strict=True))
        else:
            if good:
                lease = state.leases.all.get(one.lease)
                assert lease is not None, "the lease was ended"
                assert number in lease.owing, "it was released before"
                read = [self.machine.pages.get(at) for at in offsets]
                assert read == list(one.blocks[0]), (read, one.blocks)
            self.world.loaded(one.request, self.rank, len(offsets) if good else None)
        self._settle(one, good)

    def _settle(self, one: Load | Store, good: bool) -> None:
        client = self.copier.client
        if isinstance(one, Load):
            if one.lease:
                client.release(one.boot, one.lease)
        elif good:
            client.commit(one.boot, one.reservation)
        else:
            client.abort(one.boot, one.reservation)


class NodesWorld:
    """An engine of ``ranks`` ranks on ``machines`` machines. ``faults``: daemons are killed,
    and connections and reports of steps are lost."""

    def __init__(self, seed: int, machines: int, ranks: int, *, faults: bool = True) -> None:
        self.random = random = Random(seed)
        self.clock = Clock([0.0, *(random.uniform(-500, 1e6) for _ in range(machines - 1))])
        self.faults = faults
        replicas = random.choice([1, ranks // machines])
        self.strategy = ParallelStrategy(tp=ranks, replicas=replicas)
        self.spread = [rank * machines // ranks for rank in range(ranks)]
        self.nodes = {
            machine: tuple(rank for rank, at in enumerate(self.spread) if at == machine)
            for machine in range(machines)
        }
        self.time = mock.patch.object(time, "monotonic", self.clock.monotonic)
        self.time.start()
        sizes = [random.choice([24, 48, 96]) * len(self._shards(m)) for m in range(machines)]
        self.machines = [Machine(m, self.clock, size) for m, size in enumerate(sizes)]
        self.client = self._scheduler()
        with mock.patch.object(node_rank, "Relay", self._relay):
            self.ranks = [SimRank(self, rank) for rank in range(ranks)]
        self.requests: dict[str, Asked] = {}
        self.loads: dict[str, dict[int, int | None]] = {}
        self.steps: deque[SharedWork] = deque()
        self.reports: deque[dict[int, RankNews]] = deque()
        self.hits = self.hit_chunks = self.failed = 0
        self.quiet = False
        self._number = 0

    def close(self) -> None:
        self.time.stop()

    def machine_of(self, rank: int) -> Machine:
        return self.machines[self.spread[rank]]

    def _shards(self, machine: int) -> set[int]:
        return {rank // self.strategy.replicas for rank in self.nodes[machine]}

    def _relay(self, machine: Machine, uid: None, registration: Register) -> SimRelay:
        relay = SimRelay("", uid, registration)
        relay.machine = machine
        relay.start()
        return relay

    def _scheduler(self) -> OwnClient:
        def registered(ranks: Any, daemons: int) -> Any:
            here = self.strategy.on(ranks, daemons)
            return here.register("engine", {"model": "m"}, CHUNK), here.readers

        client = OwnClient(
            "",
            self.strategy.register("engine", {"model": "m"}, CHUNK),
            ranks=self.strategy.ranks,
            registered=registered,
            cuts=True,
            tokens=lambda chunks, blocks: chunks * CHUNK,
        )
        client.machine = self.machines[0]
        client._incomplete = False
        client._reserve_wait_s = client.step.wait_s = 0.0
        return client

    # ------------------------------------------------------------ a step

    def step(self) -> None:
        self.clock.now += STEP_S * self.random.random()
        for machine in self.machines:
            if machine.alive:
                machine.tick()
        if not self.quiet:
            self._new_requests()
            self._fault()
        with self.clock.at(0):
            self.steps.append(copy.deepcopy(self._plan()))
        while self.steps and (self.quiet or self.random.random() < 0.7 or len(self.steps) > 2):
            self._compute(self.steps.popleft())
        while self.reports and (self.quiet or self.random.random() < 0.7 or len(self.reports) > 2):
            with self.clock.at(0):
                if self.quiet or not self.faults or self.random.random() > 0.02:
                    self.client.reported(self.reports[0])
                self.reports.popleft()
                self.client.step_ended()

    def _compute(self, work: SharedWork) -> None:
        news = dict[int, RankNews]()
        with mock.patch.object(node_rank, "Relay", self._relay):
            for rank in self.ranks:
                with self.clock.at(self.spread[rank.rank]):
                    if (said := rank.run(work)) is not None:
                        news[rank.rank] = copy.deepcopy(said)
        self.reports.append(news)

    def _new_requests(self) -> None:
        random = self.random
        if len(self.requests) < 6 and random.random() < 0.5:
            self._number += 1
            stem, length, own = random.randrange(4), random.randint(1, 8), random.randint(0, 2)
            keys = [1 + stem * 100 + i for i in range(length)]
            keys += [10_000 + self._number * 10 + i for i in range(own)]
            self.requests[str(self._number)] = Asked(str(self._number), keys)
        if self.requests and random.random() < 0.1:
            self.end(random.choice(list(self.requests)))

    def end(self, name: str) -> None:
        """A request is aborted, or ended."""
        with self.clock.at(0):
            one = self.requests.pop(name)
            self.client.give_back(name)
            if one.reserving is not None:
                self.client.give_up(one.reserving)

    def _fault(self) -> None:
        random = self.random
        machine = random.choice(self.machines)
        if random.random() < 0.02 and machine.alive:
            with self.clock.at(machine.number):
                number = machine.rig.open(clock_s=machine.rig.now)
                machine.step(Received(number, Clear(seq=5, everything=True)))
                machine.step(Lost(number))
        if not self.faults:
            return
        if random.random() < 0.02:  # the engine idles
            self.clock.now += 1.2
        if not machine.alive and random.random() < 0.3:
            machine.start()
        elif machine.alive and random.random() < 0.01:
            machine.kill()
        elif machine.alive and random.random() < 0.02:  # a connection is lost, its daemon lives
            for channel in [one for one in machine.channels.values() if one.of_scheduler]:
                channel.close()

    def _plan(self) -> SharedWork:
        work, client = SharedWork(computes=self.random.random() < 0.5), self.client
        client.start()
        for one in list(self.requests.values()):
            if one.found is None:
                self._look_up(one, work)
            elif not one.stored and one.name not in self.loads:
                self._store(one, work)
            elif one.stored and self.random.random() < 0.3:
                self.end(one.name)
        setup: Any = SimpleNamespace(
            spans=SimpleNamespace(row_blocks=lambda: (1,)),
            instance="engine",
            hits_whole_prompts=True,
        )
        share_out(client, setup, work)
        leases, reservations, boots = work.lent()
        handed = not boots or (
            len(boots) == 1 and client.handed_over(leases, reservations, boots.pop())
        )
        client.new_step()
        assert {self.spread[ranks[0]]: ranks for ranks in client.nodes} in ({}, self.nodes)
        if not handed:
            for load in work.loads:
                client.release(load.boot, load.lease)
            for store in work.stores:
                client.abort(store.boot, store.reservation)
            work.loads = [Load(load.request) for load in work.loads]
            work.stores = []
        work.nodes = to_send(client, setup, work)
        if work.nodes is None:
            work.loads, work.stores = [Load(load.request) for load in work.loads], []
        return work

    def _look_up(self, one: Asked, work: SharedWork) -> None:
        client = self.client
        found = client.look_up(one.name, one.digests, WIDTH, 0).match
        if isinstance(found, Pending):
            return
        one.found = 0
        if not isinstance(found, Match) or self.random.random() < 0.1:  # it gets no blocks
            client.give_back(one.name)
            return
        match = client.take(one.name)
        assert match is not None
        one.found = match.chunks
        self.hits, self.hit_chunks = self.hits + 1, self.hit_chunks + match.chunks
        self.loads[one.name] = {}
        blocks = (tuple(one.keys[: match.chunks]),)
        times = match.given_s, match.deadline_s
        work.loads.append(Load(one.name, match.boot, match.lease, *times, match.slots, blocks))

    def _store(self, one: Asked, work: SharedWork) -> None:
        client = self.client
        if one.reserving is None:
            if client.answering:
                item = ReserveItem(one.name, one.digests)
                one.reserving = client.begin_reserve([item], WIDTH)
            if one.reserving is None:
                one.stored = self.random.random() < 0.2
                return
        answer = client.granted(one.reserving)
        if isinstance(answer, Pending):
            return
        one.reserving, one.stored = None, True
        if not isinstance(answer, Granted):
            return
        (grant,) = answer.grants
        if grant.reservation:
            work.stores.append(
                Store(
                    1,
                    answer.boot,
                    grant.reservation,
                    answer.given_s,
                    answer.deadline_s,
                    grant.slots,
                    (tuple(one.keys[chunk] for chunk in grant.chunks),),
                )
            )

    def loaded(self, request: str, rank: int, chunks: int | None) -> None:
        """A rank has ended its part of a load; None: it failed."""
        if (parts := self.loads.get(request)) is None:
            return
        parts[rank] = chunks
        if len(parts) == len(self.ranks):
            del self.loads[request]
            self.failed += None in parts.values()
            assert len(set(parts.values()) - {None}) <= 1, parts
            assert self.faults or None not in parts.values(), "a load failed without a fault"

    # ------------------------------------------------------------ the end

    def rest(self) -> None:
        """All requests end, and everything comes back: then nothing is held."""
        self.quiet = True
        for machine in self.machines:
            if not machine.alive:
                machine.start()
        for _ in range(100):
            self.step()
        pending = [one.name for one in self.requests.values() if one.found is None or one.reserving]
        assert not pending, "neither a match nor a miss"
        for name in list(self.requests):
            self.end(name)
        for _ in range(100):
            self.step()
        self.clock.now += LATE_S
        for _ in range(100):
            self.step()
        for machine in self.machines:
            machine.rig.machine.validate()
            state = machine.rig.machine.state
            # A rank that registered anew amid a copy may still write: its slots rest for a while.
            writing = [each for each in state.reservations.all.values() if each.owing]
            writing += [each for each in state.reservations.all.values() if not each.writing_until]
            assert (state.leases.all, writing) == ({}, []), (machine.number, writing)
        assert self.client.answering
        connected = [rank.copier.client.connected for rank in self.ranks]
        assert all(connected), "a daemon refuses a rank for ever"


def play(seed: int, machines: int, ranks: int, steps: int = 400, **options: Any) -> NodesWorld:
    """Run one world to its end."""
    with ExitStack() as stack:
        world = NodesWorld(seed, machines, ranks, **options)
        stack.callback(world.close)
        for _ in range(steps):
            world.step()
        world.rest()
        return world
