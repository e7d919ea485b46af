"""Proof that an idle arena has room for anybody (laws 6 and 12), whatever filled it before.

Law of this file: nothing random is in the way, so whoever is refused was starved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvass import messages as m
from kvass.client.parallel import ParallelStrategy
from kvass.core.effects import Received, Send
from kvass.testing.actors import Engine, Peer
from kvass.testing.books import BrokenLawError
from kvass.testing.layouts import WIDTH, even_model
from kvass.types import PAGE

if TYPE_CHECKING:
    from kvass.testing.simulator import Simulation


def prove_room(sim: Simulation) -> None:
    """A newcomer fills the arena over and over, then one of another layout."""
    pair = ParallelStrategy(tp=2, replicas=sim.rng.choice([1, 2]))
    for i, groups, world in ((0, 1, ParallelStrategy()), (1, 2, pair)):
        pages = sim.arena_bytes // PAGE // sim.rng.choice([16, 25, 33])
        shard_pages = max(1, pages // groups // world.world_size)
        model = even_model(f"room{i}", groups, world, shard_pages * PAGE)
        step = int(sim.arena_bytes * sim.limits.instance_write_share) // model.row_bytes
        step = min(step, sim.limits.keys_per_message)
        if not step:
            continue  # not even one row may be written at a time
        engine = Engine(f"room{i}", model, sim)
        for process in engine.processes:
            peer = engine.connect(process)
            while peer.sent:
                sim.deliver(peer)
        for n in range(0, (1 - i) * sim.arena_bytes // model.row_bytes + 2 * step, step):
            sim.pass_time(0.01)
            _store(sim, engine, [b"room%04d" % (n + i) for i in range(step)])


def _store(sim: Simulation, engine: Engine, keys: list[bytes]) -> None:
    """Store a prompt and find it again."""
    peer, boot = engine.scheduler.peer, sim.memory.boot
    assert peer is not None
    digests, every = b"".join(keys), (1 << engine.model.groups) - 1
    item = m.ReserveItem(request="r", digests=digests, groups=every)
    granted = _ask(sim, peer, m.Reserve(seq=9, items=[item], width=WIDTH))
    assert isinstance(granted, m.Granted), granted
    if len(granted.grants[0].chunks) != len(keys):
        raise BrokenLawError(f"law 6: {engine.name} was refused room in an idle arena")
    number = granted.grants[0].reservation
    sim.step(Received(peer.session, m.HandedOver(boot=boot, reservations=(number,))))
    for rank in engine.model.world.writers:
        worker = engine.workers[rank].peer
        assert worker is not None
        commit = m.Commit(boot=boot, reservation=number, rank=rank)
        sim.step(Received(worker.session, commit))
    found = _ask(sim, peer, m.Lookup(seq=10, request="r", digests=digests, width=WIDTH))
    if not isinstance(found, m.Matched) or found.chunks != len(keys):
        raise BrokenLawError(f"stored and not found: {found}")
    sim.step(Received(peer.session, m.Release(boot=boot, lease=found.lease)))


def _ask(sim: Simulation, peer: Peer, message: m.Request) -> m.FromDaemon:
    effects = sim.step(Received(peer.session, message))
    return next(e.message for e in effects if isinstance(e, Send))
