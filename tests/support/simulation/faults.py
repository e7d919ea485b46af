"""Faults of a simulated world: processes die, clients send wrong messages, strangers connect.

Every fault is something that a real process can do to a daemon. The laws must hold all the same.
"""

from __future__ import annotations

import msgspec

from kvass import messages as m
from kvass.core.effects import PopulatedTo
from tests.support.simulation.clients import ClientConnection, Process, SimulatedEngine
from tests.support.simulation.random_messages import any_message
from tests.support.simulation.world import World
from tests.support.witness.records import Lease, Reservation


def inject_fault(sim: World) -> None:
    """One random fault."""
    rng = sim.rng
    what = rng.random()
    engine = rng.choice(sim.engines)
    process = rng.choice(engine.processes)
    if what < 0.25:
        engine.die(process)
    elif what < 0.3:
        for process in engine.processes:
            engine.die(process)
    elif what < 0.33:
        sim.boot()
    elif what < 0.38 and process.peer is not None:
        process.peer.sent.append(None)
        if process is engine.scheduler:
            engine.die(process)  # the daemon reads no HandedOver after the garbage
    elif what < 0.45 and process.peer is not None:
        mine = (x for connection, x in sim.said if connection == process.peer.connection)
        if sent := [x for x in mine if isinstance(x, m.OneWay)]:
            process.peer.sent.append(rng.choice(sent))
    elif what < 0.55 and process.peer is not None:
        _settle_wrongly(sim, engine, process, process.peer)
    elif what < 0.58:
        sim.step(PopulatedTo(rng.randint(0, sim.arena_bytes)))
    else:
        _act_as_stranger(sim)


def _settle_wrongly(
    sim: World, engine: SimulatedEngine, process: Process, peer: ClientConnection
) -> None:
    """Settle a lease or reservation of another instance, rank or boot."""
    rng, boot, rank = sim.rng, sim.memory.boot, process.rank
    held: list[Lease | Reservation] = [*sim.witness.state.leases.values()]
    held += sim.witness.state.reservations.values()
    held = [h for h in held if h.owing]
    if not held:
        return
    one = rng.choice(held)
    if one.instance.name == engine.name:
        if rng.random() < 0.5:
            boot = b"another boot"
        else:
            rank = rng.choice([r for r in range(-1, engine.model.ranks + 1) if r != rank])
    if isinstance(one, Lease):
        peer.sent.append(m.Release(boot=boot, lease=one.id, rank=rank))
    elif rng.random() < 0.5:
        peer.sent.append(m.Commit(boot=boot, reservation=one.id, rank=rank))
    else:
        peer.sent.append(m.Abort(boot=boot, reservation=one.id, rank=rank))


def _act_as_stranger(sim: World) -> None:
    """A client that is no engine connects, sends anything, or leaves."""
    rng = sim.rng
    sim.strangers = [s for s in sim.strangers if s.connection in sim.peers]
    if len(sim.strangers) < sim.crowd and rng.random() < 0.4:
        sim.strangers.append(sim.connect(uid=rng.choice([1, 2])))
        if rng.random() < 0.9:
            sim.strangers[-1].sent.append(m.Hello(seq=1, clock_s=sim.now))
    if not sim.strangers:
        return
    peer = rng.choice(sim.strangers)
    peer.inbox.clear()
    what = rng.random()
    if what < 0.05 or peer.hung_up:
        peer.closing = True
    elif what < 0.1:
        peer.sent.append(None)
    elif what < 0.2 and sim.said:
        _, replayed = rng.choice(sim.said)
        peer.seq += 1
        replayed = msgspec.structs.replace(replayed, seq=peer.seq)
        if not isinstance(replayed, m.Register):
            peer.sent.append(replayed)
    else:
        for _ in range(rng.choice([1, 3, 6])):
            peer.seq += 1
            message = any_message(rng, sim.memory.boot, sim.models, peer.seq)
            digests = list(sim.witness.state.by_digest)
            if getattr(message, "namespace", b"") and digests:
                message = msgspec.structs.replace(message, namespace=rng.choice(digests))
            peer.sent.append(message)
