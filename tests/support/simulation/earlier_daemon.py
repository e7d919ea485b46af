"""A daemon before the first one fills the tiers. No faults happen here."""

from __future__ import annotations

from math import inf

from kvass import messages as m
from kvass.core.effects import Received, Send
from tests.support.simulation.clients import ClientConnection, SimulatedEngine
from tests.support.simulation.random_models import WIDTH
from tests.support.simulation.world import World
from tests.support.witness.records import list_places


def fill_tiers(sim: World) -> None:
    """Store the prompts of every model once, and flush them; what is not granted is skipped."""
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


def put_back_tiers(sim: World) -> None:
    """Clear everything, then restore the tiers from a snapshot taken before the clear. The daemon
    that cleared still runs, so the next daemon must not find the old records."""
    sim.tiers.take_snapshots()
    for engine in sim.engines:
        peer = engine.scheduler.peer
        if peer is not None and peer.connection in sim.peers:
            peer.ask(m.Clear())
            sim.deliver(peer)
    sim.catch_up(inf)
    for number in sim.tiers.used:
        sim.tiers.go_back(number)
    sim.catch_up(inf)


def register(sim: World, engine: SimulatedEngine) -> list[bool]:
    """Connect all processes of an engine; for each whether the daemon kept its connection."""
    alive = []
    for process in [*engine.workers, engine.scheduler]:
        peer = engine.connect(process)
        while peer.sent and peer.connection in sim.peers:
            sim.deliver(peer)
        alive.append(not peer.hung_up)
    return alive


def store(sim: World, engine: SimulatedEngine, keys: list[bytes]) -> m.Grant | None:
    """Store a prompt; the grant, or None if nothing was granted."""
    peer, boot = engine.scheduler.peer, sim.memory.boot
    assert peer is not None
    every = (1 << engine.model.groups) - 1
    item = m.ReserveItem(request="r", digests=b"".join(keys), groups=every)
    granted = ask(sim, peer, m.Reserve(items=[item], width=WIDTH))
    if not isinstance(granted, m.Granted) or not granted.grants[0].reservation:
        return None
    number = granted.grants[0].reservation
    sim.step(Received(peer.connection, m.HandedOver(boot=boot, reservations=(number,))))
    _write(sim, engine, granted.grants[0])
    for rank in engine.model.world.writers:
        worker = engine.workers[rank].peer
        assert worker is not None
        commit = m.Commit(boot=boot, reservation=number, rank=rank)
        sim.step(Received(worker.connection, commit))
    return granted.grants[0]


def _write(sim: World, engine: SimulatedEngine, grant: m.Grant) -> None:
    """Write every page of the grant."""
    at = 0
    for group, slots in enumerate(grant.slots):
        for place in list_places(slots, engine.model.shard_bytes(group)):
            for shard, run in enumerate(place):
                for page in run:
                    sim.land(sim.memory, page, (sim.memory.boot, grant.reservation, at, shard))
            at += 1


def ask(sim: World, peer: ClientConnection, message: m.Request) -> m.FromDaemon:
    """Send a request; its reply, which comes in the same step."""
    peer.seq = message.seq = peer.seq + 1
    effects = sim.step(Received(peer.connection, message))
    return next(
        e.message for e in effects if isinstance(e, Send) and e.connection == peer.connection
    )
