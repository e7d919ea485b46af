"""Whose extent sets pay for a new row: those of tenants that have more than their share go first.

Law of this file: a tenant that has no more than is reserved for it loses no set to another tenant
(law 6). In which order the sets of a tenant go is decided elsewhere (``policy.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvass.core.rows.extents import STAYS
from kvass.core.rows.row_class import RowClass
from kvass.core.rows.sets import CLEARED
from kvass.core.rows.tables import CoreTables
from kvass.types import I64Array

Sets = npt.NDArray[np.bool_]
"""By extent set, whether it may go."""


class Shares:
    """The shares of all tenants of ``tables``. ``ranks``: as ``Policy.ranks``."""

    def __init__(self, tables: CoreTables) -> None:
        self._sets, self._tenants = tables.sets, tables.tenants

    def own(self, asker: RowClass, ranks: I64Array, rank: int) -> Sets:
        """The sets of other classes of the tenant of ``asker`` whose rank is below ``rank``."""
        theirs: Sets = self._sets.tenant == asker.tenant.id
        return self._others(asker) & theirs & (ranks < rank)

    def may_go(
        self, asker: RowClass, ranks: I64Array, rank: int, protect: int, alone: bool
    ) -> Iterator[Sets]:
        """The sets that may go for a set of ``asker``: those that go first, then others.

        Cleared sets may go, and sets of other classes whose rank is below ``rank``. Sets of tenants
        that have too much may go if their rank is below ``protect``. ``alone``: ``asker`` has no
        row of its own that could go.
        """
        sets, tenant = self._sets, asker.tenant
        cleared = (ranks < STAYS) & (sets.owner == CLEARED)
        others = self._others(asker)
        if not self._tenants.divided:
            yield cleared | (others & (ranks < rank))
            return
        own = self.own(asker, ranks, rank)
        foreign = self._may_lose(others & (sets.tenant != tenant.id) & (ranks < protect), ranks)
        shares, taken = self._tenants.shares(tenant), self._tenants.taken()
        over = foreign & (taken > shares)[sets.tenant]
        wants = tenant.taken_bytes + asker.slots_per_set * asker.spec.row_bytes
        entitled = wants <= shares[tenant.id] or tenant.taken_bytes < tenant.reserved_bytes
        if not entitled:
            over = own | (over & (ranks < rank))
        yield cleared | over
        if entitled or alone:
            yield own | (foreign & (ranks < rank))

    def _others(self, asker: RowClass) -> Sets:
        others: Sets = (self._sets.owner >= 0) & (self._sets.owner != asker.id)
        return others

    def _may_lose(self, sets: Sets, ranks: I64Array) -> Sets:
        """Those of ``sets`` that can go while their tenants keep what is reserved for them."""
        for tenant in self._tenants.all.values():
            if tenant.reserved_bytes:
                theirs = np.flatnonzero(sets & (self._sets.tenant == tenant.id))
                theirs = theirs[np.argsort(ranks[theirs], kind="stable")]
                spare = tenant.taken_bytes - tenant.reserved_bytes
                sets[theirs[np.cumsum(self._sets.bytes[theirs]) > spare]] = False
        return sets
