"""Tenants, which pay for rows, and their quotas of L1.

Law of this file: there are at most ``MOST`` tenants, whatever names clients invent (law 12).

The tenant whose request stored a row first pays for it. Lookups of all tenants find it. A tenant
with a quota has extent sets of its own. The tenant ``DEFAULT`` pays for the requests of all tenants
without a quota. Only the first ``SHOWN`` of these tenants have counts of their own; the requests of
the others are counted for the tenant ``OTHER``.

A tenant's *share* is what is reserved for it plus an equal part of what is reserved for nobody, but
at most its cap. When room is needed, tenants that have more than their share lose extent sets
first.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from kvass.core.clients.traffic import Traffic
from kvass.errors import Refused
from kvass.types import DEFAULT_TENANT, MOST_QUOTAS, NO_CAP, I64Array, Quota, is_tenant_name

DEFAULT: Final = DEFAULT_TENANT
OTHER: Final = "other"
SHOWN: Final = 32
MOST: Final = 128
"""The most tenants: those with a quota, those with counts only, and those whose quota was
removed."""


class Tenant(msgspec.Struct, eq=False):
    """A tenant. ``listed``: it has a quota. ``taken_bytes``: the size of its extent sets.
    ``kept_bytes``: the size of its retained rows (``rows/retention.py``).
    ``evicted_bytes``: the size of its rows that were evicted so far."""

    id: int
    name: str
    listed: bool = False
    cap_bytes: int = NO_CAP
    reserved_bytes: int = 0
    taken_bytes: int = 0
    kept_bytes: int = 0
    evicted_bytes: int = 0
    traffic: Traffic = msgspec.field(default_factory=Traffic)

    @property
    def quota(self) -> Quota:
        return Quota(self.name, self.cap_bytes, self.reserved_bytes)


class Tenants:
    """All tenants of an arena of ``arena_bytes``. Their ids are array indexes below ``MOST``."""

    def __init__(self, arena_bytes: int) -> None:
        self._arena_bytes = arena_bytes
        self.default, self._other = Tenant(0, DEFAULT), Tenant(1, OTHER)
        self.all = {DEFAULT: self.default, OTHER: self._other}
        self.divided = False
        """Whether any quota was set in this boot. If not, the default tenant has all of L1."""

    def of(self, name: str) -> Tenant:
        """The tenant for which a request of ``name`` is counted. A new name is added, or counts for
        ``OTHER`` if there are too many."""
        tenant = self.all.get(name or DEFAULT)
        if tenant is None:
            unlisted = sum(not each.listed for each in self.all.values())
            if unlisted >= SHOWN + 2 or len(self.all) >= MOST or not is_tenant_name(name):
                return self._other
            tenant = self._add(name)
        return tenant

    def payer(self, name: str) -> Tenant:
        """The tenant that pays for the rows that a request of ``name`` stores."""
        tenant = self.all.get(name)
        return tenant if tenant is not None and tenant.listed else self.default

    def named(self, number: int) -> str:
        return next(t.name for t in self.all.values() if t.id == number)

    def _add(self, name: str) -> Tenant:
        used = {tenant.id for tenant in self.all.values()}
        number = next(i for i in range(MOST) if i not in used)
        self.all[name] = tenant = Tenant(number, name)
        return tenant

    # ------------------------------------------------------------ quotas

    def set(self, quota: Quota) -> None:
        """Set or change a quota.

        Raises:
            Refused: ``bad_value`` or ``limit``.
        """
        if wrong := quota.wrong():
            raise Refused("bad_value", wrong)
        others = sum(t.reserved_bytes for t in self.all.values() if t.name != quota.tenant)
        if others + quota.reserved_bytes > self._arena_bytes:
            what = f"{quota.tenant}: {quota.reserved_bytes} bytes reserved, {others} for others"
            raise Refused("bad_value", f"quota {what}: L1 has {self._arena_bytes}")
        listed = sum(t.listed for t in self.all.values() if t.name != quota.tenant)
        if listed >= MOST_QUOTAS:
            raise Refused("limit", f"{listed} tenants have quotas: take one away first")
        if quota.tenant not in self.all and len(self.all) >= MOST:
            self._forget_idle()
        tenant = self.all.get(quota.tenant) or self._add(quota.tenant)
        tenant.cap_bytes, tenant.reserved_bytes = quota.cap_bytes, quota.reserved_bytes
        tenant.listed = self.divided = True

    def _forget_idle(self) -> None:
        """Drop the tenants that have neither a quota nor an extent set.

        Raises:
            Refused: ``limit``, if there is none.
        """
        known = len(self.all)
        for t in [*self.all.values()]:
            if not (t.listed or t.taken_bytes or t in (self.default, self._other)):
                del self.all[t.name]
        if len(self.all) == known:
            raise Refused("limit", f"at most {MOST} tenants: remove the quota of another one")

    def remove(self, name: str) -> None:
        """Remove a quota. The tenant keeps its extent sets until others need the room.

        Raises:
            Refused: ``bad_value``, if the tenant has no quota.
        """
        tenant = self.all.get(name)
        if tenant is None or not tenant.listed:
            raise Refused("bad_value", f"quota {name[:64]!r}: there is none")
        tenant.listed, tenant.cap_bytes, tenant.reserved_bytes = False, NO_CAP, 0

    def replace(self, quotas: tuple[Quota, ...]) -> None:
        """Replace all quotas. Nothing changes if the new ones cannot be set, for example because
        there would be more than ``MOST`` tenants."""
        before = [t.quota for t in self.all.values() if t.listed]
        for quota in before:
            self.remove(quota.tenant)
        try:
            for quota in quotas:
                self.set(quota)
        except Refused:
            self.replace(tuple(before))

    # ------------------------------------------------------------ who makes room

    def shares(self, asker: Tenant) -> I64Array:
        """The share of each tenant in bytes, by id. Memory that is reserved for nobody is divided
        equally among ``asker``, which needs room, and all tenants with extent sets."""
        paying = [t for t in self.all.values() if t.listed or t is self.default]
        active = sum(t is asker or t.taken_bytes > 0 for t in paying)
        spare = self._arena_bytes - sum(t.reserved_bytes for t in paying)
        shares = np.zeros(MOST, np.int64)
        for t in paying:
            shares[t.id] = min(t.cap_bytes, t.reserved_bytes + spare // active)
        return shares

    def least_share(self, tenant: Tenant) -> int:
        """The share of ``tenant`` when all tenants that may have extent sets have some. Only
        quotas change it. A tenant whose quota was removed has none."""
        may = [each for each in self.all.values() if each.listed or each is self.default]
        if tenant not in may:
            return 0
        spare = self._arena_bytes - sum(each.reserved_bytes for each in may)
        return min(tenant.cap_bytes, tenant.reserved_bytes + spare // len(may))

    def taken(self) -> I64Array:
        """The size of each tenant's extent sets, by id."""
        taken = np.zeros(MOST, np.int64)
        for t in self.all.values():
            taken[t.id] = t.taken_bytes
        return taken
