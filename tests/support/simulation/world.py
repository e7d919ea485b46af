"""A simulated world around one core: engines, strangers, tiers, a clock, and an arena.

A world is a function of its seed: all chance comes from one generator. The arena remembers which
writer last wrote each page. After every event the core's ``validate()`` and the witness check the
laws. ``simulator`` decides what happens in a world.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial

from kvass import messages as m
from kvass.core import effects as fx
from kvass.core.machine import CacheMachine, CoreConfig
from kvass.core.pending.tier_state import FlushMode
from kvass.types import Limits, Timing
from tests.support.simulation.clients import ArenaContents, ClientConnection, SimulatedEngine
from tests.support.simulation.quotas import Quotas, TenantWitness
from tests.support.simulation.random_models import random_model
from tests.support.simulation.segments import SegmentUser
from tests.support.simulation.sessions import ClientSessions
from tests.support.simulation.tiers import SimTiers
from tests.support.witness.records import Archive, Tag
from tests.support.witness.witness import Witness

OWN_UID = 1
"""The user of the daemon and of the engines."""


class World:
    """One seed's engines, tiers, strangers, clock and daemon. No daemon runs before ``boot``.

    ``trace`` holds the events that the core of the current boot has seen, with their times.
    """

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.now = 1000.0
        self.timing = Timing(lease_s=4.0, reserve_s=4.0, lost_engine_grace_s=0.5)
        self.mischief = rng.choice([0.0, 0.02, 0.05, 0.15])
        self.stalls = rng.choice([0.0, 0.005, 0.02])
        name = rng.choice(["m{}", "m"])  # with one name, layouts alone tell namespaces apart
        self.models = [random_model(rng, name.format(i)) for i in range(rng.choice([2, 2, 3]))]
        self.roomy = rng.random() < 0.3
        rows = 5_000 if self.roomy else rng.choice([4, 5, 8, 12, 25])
        self.chunk_bytes = max(model.row_bytes for model in self.models)
        self.arena_bytes = rows * self.chunk_bytes
        parts = rng.choice([64, 32, 20])
        if self.roomy:  # small extents: a cleared one that is still written to is lost room
            parts = 1_000
        self.extent_bytes = None if parts == 64 else self.arena_bytes // parts
        self.engines = [
            SimulatedEngine(f"e{i}", self.models[i % len(self.models)], self)
            for i in range(rng.choice([2, 3, 4]))
        ]
        chance = random.Random(
            f"weights {seed}"
        )  # a generator of its own keeps other seeds' histories
        if chance.random() < 0.2:
            for engine in self.engines:
                engine.trainer = chance
        for engine in self.engines:
            shared = [x for x in self.models if x.identity == engine.model.identity]
            user = SegmentUser(chance, engine.model, shared)
            engine.segments = user if user.able else None
        crowd = sum(len(engine.processes) for engine in self.engines)
        self.crowd = rng.choice([3, 3, 3, 40])
        """The most strangers at a time."""
        self.limits = Limits(
            leases_per_instance=rng.choice([4, 1000]),
            reservations_per_instance=rng.choice([4, 1000]),
            sessions=rng.choice([max(12, crowd - 2), *(100 + 2 * crowd,) * 3]),
            sessions_per_uid=rng.choice([max(12, crowd - 2), *(100 + 2 * crowd,) * 3]),
            keys_per_message=rng.choice([8, 1000]),
            waiting_bytes=rng.choice([9_000, 30_000, 1 << 20]),
            segment_index_bytes=chance.choice([100, *[1_000] * 4, *[20_000] * 5]),
        )
        self.strangers: list[ClientConnection] = []
        self.said: list[tuple[int, m.FromClient]] = []
        """Every message that the daemon of this boot has read, with its connection."""
        modes: list[FlushMode] = ["write_through", "write_through", "on_evict", "none"]
        self.tiers = SimTiers(self, seed, rng.choice([0, 1, 1, 2]), rng.random() < 0.4)
        self.flush: FlushMode = rng.choice(modes)
        self.filled = rng.random() < 0.8
        """Whether an earlier daemon has filled the tiers."""
        self.retain, self.weigh = rng.random() < 0.7, rng.random() < 0.5
        self.reboots = rng.choice([0.0, 0.002, 0.01]) if self.tiers.names else 0.0
        self.clears = rng.choice([0.0, 0.01, 0.03]) if self.tiers.names else 0.0
        self.slice_slots = (1, 5, 2048)[seed % 3]
        self.slice_ends = (64, 1, 3)[seed // 3 % 3]
        self.quotas = Quotas(seed, self.arena_bytes, self.roomy)
        self.sessions = ClientSessions(seed)
        self.archive = Archive()
        self.boots = 0

    # ------------------------------------------------------------ what engines and tiers see

    def connect(self, uid: int = OWN_UID) -> ClientConnection:
        self.connections += 1
        peer = self.peers[self.connections] = ClientConnection(
            self.connections, visible=self.rng.random() < 0.6
        )
        self.step(fx.Opened(peer.connection, uid, own=uid == OWN_UID))
        return peer

    def expected(self, lease: int) -> dict[int, Tag | None]:
        return self.witness.state.expected(lease)

    def land(self, memory: ArenaContents, page: int, tag: Tag | None) -> None:
        if memory is self.memory and tag is not None:
            self.witness.state.landing(tag[1], page, self.now)
        memory.pages[page] = tag

    def straggle(
        self, memory: ArenaContents, left: list[tuple[int, Tag | None]], until: float
    ) -> None:
        for page, tag in left:
            when = self.now + self.rng.random() * (until - self.now)
            self.later(when, partial(self.land, memory, page, tag))

    def later(self, when: float, action: Callable[[], None]) -> None:
        self.laters += 1
        heapq.heappush(self.late, (when, self.laters, action))

    # ------------------------------------------------------------ the daemon

    def boot(self) -> None:
        """A daemon starts with an empty arena; every old connection is broken."""
        self.boots += 1
        boot = b"%016d" % self.boots
        config = CoreConfig(
            boot=boot,
            arena_bytes=self.arena_bytes,
            extent_bytes=self.extent_bytes,
            timing=self.timing,
            limits=self.limits,
            tiers=self.tiers.names,
            flush=self.flush,
            keep_loaded=self.retain,
            skip_slow_loads=self.weigh,
            slice_slots=self.slice_slots,
            slice_ends=self.slice_ends,
            quotas=self.quotas.at_start,
        )
        self.machine = CacheMachine(config)
        holds = self.tiers.holds if self.tiers.healthy else None
        self.witness = Witness(config, self.roomy, self.archive, holds)
        self.tenants = TenantWitness(self.machine)
        self.tiers.boot()
        gone: ArenaContents | None = getattr(self, "memory", None)
        self.memory = ArenaContents(boot)
        self.peers: dict[int, ClientConnection] = {}
        self.connections = self.laters = 0
        self.late: list[tuple[float, int, Callable[[], None]]] = []
        self.trace: list[tuple[float, fx.Event]] = []
        self.strangers.clear()
        self.said.clear()
        for engine in self.engines:
            engine.daemon_gone(gone)

    def step(self, event: fx.Event) -> list[fx.Effect]:
        """Give the core one event, deliver its effects, check every law."""
        self.trace.append((self.now, event))
        effects = self.machine.step(event, self.now)
        self.machine.validate()
        self.witness.observe(event, effects, self.now, self.machine.next_deadline())
        self.tenants.observe(event)
        if len(self.trace) % 8 == 0:
            self.witness.state.compare(self.machine.status())
        for effect in effects:
            if isinstance(effect, fx.Watch):
                continue
            if isinstance(effect, fx.ToTier):
                self.tiers.take(effect)
                continue
            peer = self.peers.get(effect.connection)
            if peer is None:
                continue
            if isinstance(effect, fx.Send):
                peer.inbox.append(effect.message)
            else:
                peer.hung_up = True
                peer.sent.clear()
                if isinstance(effect, fx.Close):
                    del self.peers[effect.connection]
        return effects

    def pass_time(self, seconds: float) -> None:
        """Advance the clock. What was scheduled happens; a due tick comes now or later."""
        until = self.now + seconds
        self.catch_up(until)
        self.now = until
        due = self.machine.next_deadline()
        if due is not None and due <= until and self.rng.random() < 0.7:
            self.step(fx.Tick())

    def catch_up(self, until: float) -> None:
        """Do what was scheduled (``later``) for up to this time."""
        while self.late and self.late[0][0] <= until:
            when, _, action = heapq.heappop(self.late)
            self.now = max(self.now, when)
            action()

    def deliver(self, peer: ClientConnection) -> None:
        """The daemon reads the next message of a connection, or its EOF."""
        if not peer.sent:
            del self.peers[peer.connection]
            effects = self.step(fx.Lost(peer.connection, exiting=peer.visible and peer.exits))
            if peer.visible:
                self.watch(peer, effects)
            return
        message = peer.sent.popleft()
        if message is None:
            self.step(fx.Faulted(peer.connection, "bad_frame", "garbage"))
        elif not peer.hung_up:
            self.said.append((peer.connection, message))
            self.step(fx.Received(peer.connection, message))

    def watch(self, peer: ClientConnection, effects: list[fx.Effect]) -> None:
        """Report the end of a lost client's process, if the core asked and it is soon enough."""
        for effect in effects:
            if isinstance(effect, fx.Watch) and peer.ends < effect.until:
                ended = partial(self._process_ended, effect.connection)
                self.later(max(self.now, peer.ends), ended)

    def _process_ended(self, connection: int) -> None:
        self.step(fx.ProcessEnded(connection))
