"""Tenants in a simulated world: quotas that change, and a witness of what each tenant has.

Chance comes from a generator of its own, so worlds without quotas have the histories they had.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

from kvass import messages as m
from kvass.core import effects as fx
from kvass.types import NO_CAP, Quota
from tests.support.witness.records import BrokenLawError

if TYPE_CHECKING:
    from kvass.core.machine import CacheMachine
    from tests.support.simulation.world import World

NAMES: Final = ("a", "b", "default")


class Quotas:
    """The quotas that a daemon starts with: in three of ten worlds whose arena is small."""

    def __init__(self, seed: int, arena_bytes: int, roomy: bool) -> None:
        self._chance = random.Random(f"tenants {seed}")
        self._clears = random.Random(f"clears of tenants {seed}")
        self._arena_bytes = arena_bytes
        self.at_start: tuple[Quota, ...] = ()
        if not roomy and self._chance.random() < 0.3:
            self.at_start = tuple(self._quota(name) for name in NAMES[:2])

    def _quota(self, name: str) -> Quota:
        """Reserves a third of L1 at most, so that all three have room."""
        arena, chance = self._arena_bytes, self._chance
        reserved = int(arena * chance.choice([0, 0, 0.1, 0.2, 0.33]))
        cap = chance.choice([NO_CAP, max(1, reserved), reserved + arena // 5])
        return Quota(name, max(1, cap), reserved)

    def tenant(self) -> str:
        """Whose a request is: often one with a quota, now and then an invented one."""
        if not self.at_start:
            return ""
        invented = f"invented{self._chance.randrange(60)}"
        return self._chance.choice(["", "a", "a", "b", "b", "b", invented])

    def change(self, world: World) -> None:
        """Now and then an operator connects, changes a quota or takes one away, and leaves."""
        if not self.at_start or self._chance.random() > 0.02:
            return
        name, remove = self._chance.choice(NAMES), self._chance.random() < 0.3
        say(world, m.SetQuota(quota=self._quota(name), remove=remove))

    def clear(self, world: World) -> None:
        """Now and then an operator clears a tenant, in one slice. Nobody is storing then, because
        the witness does not know whose the reservations are."""
        if not self.at_start or world.slice_slots < 1000 or self._clears.random() > 0.02:
            return
        if not any(w.holds(world.now) for w in world.witness.state.reservations.values()):
            say(world, m.ClearTenant(tenant=self._clears.choice(NAMES)))

    def end(self, world: World) -> None:
        """No tenant has a quota any more: what they have makes room first."""
        for name in NAMES if self.at_start else ():
            say(world, m.SetQuota(quota=Quota(name), remove=True))


def say(world: World, message: m.SetQuota | m.ClearTenant) -> None:
    """From a connection of its own, if the daemon lets it in."""
    peer = world.connect()
    peer.sent.append(m.Hello(seq=1, clock_s=world.now))
    peer.ask(message)
    peer.closing = True
    while peer.connection in world.peers:
        world.deliver(peer)


class TenantWitness:
    """What each tenant has before and after each event.

    A tenant takes nothing beyond its cap. Nobody but itself, or a clear, takes what is reserved.
    """

    def __init__(self, machine: CacheMachine) -> None:
        self._state = machine.state
        self._before = self._look()

    def _look(self) -> tuple[dict[str, int], dict[bytes | str, Any], set[str]]:
        tenants, promotions = self._state.tenants, self._state.promotions.all.values()
        taken = {t.name: t.taken_bytes for t in tenants.all.values()}
        epochs: dict[bytes | str, Any] = {
            ns.digest: ns.epoch for ns in self._state.namespaces.values()
        }  # a change of any of these may discard rows, or what an engine was writing
        epochs |= {one.id: one.generation for one in self._state.instances.values()}
        return taken, epochs, {tenants.payer(p.context.tenant).name for p in promotions}

    def observe(self, event: fx.Event) -> None:
        """After each event."""
        (before, epochs, asked), self._before = self._before, self._look()
        taken, epochs_now, asking = self._before
        asking = asked | asking
        if isinstance(event, fx.Received) and isinstance(event.message, m.Reserve):
            payer = self._state.tenants.payer
            asking = asking | {payer(item.tenant).name for item in event.message.items}
        if isinstance(event, fx.Received) and isinstance(event.message, m.Lookup):
            asking = asking | {self._state.tenants.payer(event.message.tenant).name}
        cleared = any(epochs_now.get(ns) != epoch for ns, epoch in epochs.items())
        cleared |= isinstance(event, fx.Received) and isinstance(event.message, m.ClearTenant)
        for tenant in self._state.tenants.all.values():
            had, has = before.get(tenant.name, 0), taken[tenant.name]
            if has > max(had, tenant.cap_bytes):
                raise BrokenLawError(f"law 12: {tenant.name} has {has} of {tenant.cap_bytes}")
            if has > had and tenant.name not in asking:
                raise BrokenLawError(f"{tenant.name} pays for what others store: {had}, {has}")
            kept = min(had, tenant.reserved_bytes)
            if has < kept and not cleared and tenant.name not in asking:
                raise BrokenLawError(f"law 6: {tenant.name} had {had}, has {has}, {kept} reserved")
