"""An idle arena has room for any namespace (laws 6 and 12), whatever filled it before.

Nothing random happens here, so every refusal is starvation.
"""

from __future__ import annotations

from math import inf

from kvass import messages as m
from kvass.client.parallel import ParallelStrategy
from kvass.core.effects import Received
from kvass.types import PAGE
from tests.support.simulation.clients import SimulatedEngine
from tests.support.simulation.earlier_daemon import ask, register, store
from tests.support.simulation.random_models import WIDTH, even_model
from tests.support.simulation.world import World
from tests.support.witness.records import BrokenLawError


def check_no_starvation(sim: World) -> None:
    """A new instance fills the arena several times, then one with another layout does."""
    pair = ParallelStrategy(tp=2, replicas=sim.rng.choice([1, 2]))
    for i, groups, world in ((0, 1, ParallelStrategy()), (1, 2, pair)):
        pages = sim.arena_bytes // PAGE // sim.rng.choice([16, 25, 33])
        shard_pages = max(1, pages // groups // world.world_size)
        model = even_model(f"room{i}", groups, world, shard_pages * PAGE)
        step = int(sim.arena_bytes * sim.limits.instance_write_share) // model.row_bytes
        step = min(step, sim.limits.keys_per_message // groups)
        if not step:
            continue  # one row exceeds the instance's quota
        engine = SimulatedEngine(f"room{i}", model, sim)
        register(sim, engine)
        for n in range(0, (1 - i) * sim.arena_bytes // model.row_bytes + 2 * step, step):
            sim.pass_time(0.01)
            sim.catch_up(inf)  # tiers end what they do
            _store(sim, engine, [b"room%04d" % (n + i) for i in range(step)])


def _store(sim: World, engine: SimulatedEngine, keys: list[bytes]) -> None:
    """Store a prompt, then look it up."""
    peer, boot = engine.scheduler.peer, sim.memory.boot
    assert peer is not None
    granted = store(sim, engine, keys)
    if granted is None or len(granted.chunks) != len(keys):
        raise BrokenLawError(f"law 6: {engine.name} was refused room in an idle arena")
    found = ask(sim, peer, m.Lookup(request="r", digests=b"".join(keys), width=WIDTH))
    if not isinstance(found, m.Matched) or found.chunks != len(keys):
        raise BrokenLawError(f"stored and not found: {found}")
    sim.step(Received(peer.connection, m.Release(boot=boot, lease=found.lease)))
