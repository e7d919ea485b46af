"""A row class: the rows of one layer group of a namespace that one tenant pays for.

Law of this file: it is a record. ``RowClasses`` creates and removes them, ``RowStates`` counts.
"""

from __future__ import annotations

import msgspec

from kvass.core.clients.registry import RowClassSpec
from kvass.core.clients.tenants import Tenant
from kvass.core.rows.blocks import BlockIndex
from kvass.core.rows.index import KeyIndex
from kvass.core.rows.order import Order
from kvass.core.rows.row_table import STATE_NAMES
from kvass.core.rows.sets import FreeSlots
from kvass.core.saved.directory import SavedClass


class RowClass(msgspec.Struct, eq=False):
    """The rows of one (namespace, group) that one tenant pays for. All have the same size.

    ``index``: finds rows by key. ``blocks``: finds rows by their first blocks; ``None`` if hits end
    at chunks. The classes of all tenants of a (namespace, group) share both indexes.
    ``order``: in which its rows go. ``free``: its free slots. ``slots``: the slots of its extent
    sets. ``rows``: the number of its rows by state, except FREE.
    ``of_tenants``: the classes of the same namespace and group by tenant id. The default tenant's
    class always exists, and ``Namespace.classes`` names that one. Another tenant's class exists
    while it has an extent set.
    """

    id: int
    namespace: int
    spec: RowClassSpec
    order: Order
    slots_per_set: int
    index: KeyIndex
    blocks: BlockIndex | None
    tenant: Tenant
    of_tenants: dict[int, RowClass]
    free: FreeSlots = msgspec.field(default_factory=FreeSlots)
    rows: list[int] = msgspec.field(default_factory=lambda: [0] * len(STATE_NAMES))
    slots: int = 0

    @property
    def saved(self) -> SavedClass:
        """What the next life of the daemon must know of it."""
        return SavedClass(self.id, self.namespace, self.tenant.name, self.spec)

    @property
    def undivided(self) -> bool:
        """Whether no other tenant has a class of this namespace and group."""
        return len(self.of_tenants) < 2

    @property
    def in_use(self) -> bool:
        """Whether any row of this namespace and group, of any tenant, is not FREE."""
        return any(c.slots != len(c.free) for c in self.of_tenants.values())

    @property
    def within_cap(self) -> int:
        """How many more slots of this class fit under its tenant's cap."""
        left = self.tenant.cap_bytes - self.tenant.taken_bytes
        return max(0, left // self.spec.row_bytes)
