"""A life before the first: tiers get to hold what a daemon of before was given.

Law of this file: nothing goes wrong in it. What does not fit at once is left out.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from kvass import messages as m
from kvass.core.effects import Received, Send
from tests.support.simulation.clients import ClientConnection, SimulatedEngine
from tests.support.simulation.random_models import WIDTH
from tests.support.witness.records import list_places

if TYPE_CHECKING:
    from tests.support.simulation.simulator import Simulation


def warm_tiers(sim: Simulation) -> None:
    """Every model's prompts are stored once, and flushed."""
    seen = set[int]()
    for engine in sim.engines:
        if id(engine.model) in seen:
            continue
        seen.add(id(engine.model))
        if all(register(sim, engine)):
            for prompt in engine.model.prompts:
                store(sim, engine, list(prompt))
                sim.pass_time(0.01)
                sim.catch_up(inf)


def put_back_tiers(sim: Simulation) -> None:
    """All is cleared, and then the tiers go back to what they were before that. The daemon that
    cleared lives, so the next one must find nothing of before."""
    sim.tiers.take_snapshots()
    for engine in sim.engines:
        peer = engine.scheduler.peer
        if peer is not None and peer.session in sim.peers:
            peer.ask(m.Clear())
            sim.deliver(peer)
    sim.catch_up(inf)
    for number in range(len(sim.tiers.tiers)):
        sim.tiers.go_back(number)
    sim.catch_up(inf)


def register(sim: Simulation, engine: SimulatedEngine) -> list[bool]:
    """Connect all of an engine; which of its processes are heard."""
    alive = []
    for process in [*engine.workers, engine.scheduler]:
        peer = engine.connect(process)
        while peer.sent and peer.session in sim.peers:
            sim.deliver(peer)
        alive.append(not peer.hung_up)
    return alive


def store(sim: Simulation, engine: SimulatedEngine, keys: list[bytes]) -> m.Grant | None:
    """Store what is granted of a prompt."""
    peer, boot = engine.scheduler.peer, sim.memory.boot
    assert peer is not None
    every = (1 << engine.model.groups) - 1
    item = m.ReserveItem(request="r", digests=b"".join(keys), groups=every)
    granted = ask(sim, peer, m.Reserve(items=[item], width=WIDTH))
    if not isinstance(granted, m.Granted) or not granted.grants[0].reservation:
        return None
    number = granted.grants[0].reservation
    sim.step(Received(peer.session, m.HandedOver(boot=boot, reservations=(number,))))
    _write(sim, engine, granted.grants[0])
    for rank in engine.model.world.writers:
        worker = engine.workers[rank].peer
        assert worker is not None
        commit = m.Commit(boot=boot, reservation=number, rank=rank)
        sim.step(Received(worker.session, commit))
    return granted.grants[0]


def _write(sim: Simulation, engine: SimulatedEngine, grant: m.Grant) -> None:
    """Every writer's bytes land."""
    at = 0
    for group, slots in enumerate(grant.slots):
        for place in list_places(slots, engine.model.shard_bytes(group)):
            for shard, run in enumerate(place):
                for page in run:
                    sim.land(sim.memory, page, (sim.memory.boot, grant.reservation, at, shard))
            at += 1


def ask(sim: Simulation, peer: ClientConnection, message: m.Request) -> m.FromDaemon:
    """What is answered at once."""
    peer.seq = message.seq = peer.seq + 1
    effects = sim.step(Received(peer.session, message))
    return next(e.message for e in effects if isinstance(e, Send) and e.session == peer.session)
