"""Retained rows: clients asked to keep them for a time (``kvass.ttl``).

Laws of this file:

- The retained rows of a tenant take at most ``share`` of the tenant's least share of L1
  (``Tenants.least_share``), after every event.
- A row is retained only by requests of the tenant that pays for it.
- A retained row is an ordinary row to all but eviction, which passes it over as long as anything
  else can go. It is retained until its time is over, and each use begins that time anew.

A row whose time is over counts until ``sweep`` or ``sweep_more`` sees it, about a second later. The
columns take 12 bytes a row, from the first retained row of a boot on.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.clients.tenants import Tenant
from kvass.core.rows.listeners import ClassesGone, Left, Listener, Used
from kvass.core.rows.tables import CoreTables
from kvass.types import I64Array

SHORTEST_S: Final = 1.0
LONGEST_S: Final = 86_400.0
"""Shorter and longer times become these."""
_SWEEP_S: Final = 1.0
_LOOK: Final = 1 << 16
"""How many rows one ``sweep_more`` looks at: 0.1 ms of work."""
_SLICE: Final = 8192
"""The most rows that it drops: 0.4 ms of work."""


class Retention(Listener):
    """The retained rows of ``tables``. ``share``: as of ``CoreConfig.keep_share``."""

    def __init__(self, tables: CoreTables, share: float) -> None:
        self._table, self._sets, self._tenants = tables.table, tables.sets, tables.tenants
        self.share = share
        self.releases = 0
        """How often rows that stay in L1 stopped being retained."""
        self._for_s: npt.NDArray[np.float32] = np.empty(0, np.float32)
        """For how long a use retains the row; 0: it is not retained."""
        self._until: npt.NDArray[np.float64] = np.empty(0)
        self._of_sets: I64Array = np.empty(0, np.int64)
        """How many rows of each extent set are retained."""
        self._swept = float("-inf")
        self._next = 0
        """The row with which a sweep goes on."""

    @property
    def any(self) -> bool:
        """Whether any row may be retained."""
        return len(self._for_s) > 0

    def cap(self, tenant: Tenant) -> int:
        """The most bytes of a tenant's rows that are retained."""
        return int(self.share * self._tenants.least_share(tenant))

    def of(self, rows: I64Array) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` are retained."""
        if not self.any:
            return np.zeros(len(rows), np.bool_)
        self._fit()
        kept: npt.NDArray[np.bool_] = self._for_s[rows] > 0
        return kept

    def keep(self, rows: I64Array, seconds: float, now: float) -> None:
        """Retain ``rows``, each named once. The caller has checked that they fit under the cap of
        their tenant."""
        if not len(rows):
            return
        self._fit()
        new = rows[self._for_s[rows] == 0]
        self._count(new, 1)
        self._for_s[rows] = min(max(seconds, SHORTEST_S), LONGEST_S)
        self._until[rows] = now + self._for_s[rows]

    def in_sets(self) -> I64Array:
        """How many rows of each extent set are retained, by the number of the set."""
        if len(self._of_sets) < (size := len(self._sets.owner)):
            grown = np.zeros(size, np.int64)
            grown[: len(self._of_sets)] = self._of_sets
            self._of_sets = grown
        return self._of_sets

    def used(self, told: Used) -> None:
        """The time of the rows that are retained begins anew."""
        if self.any and told.session is not None:
            rows = told.rows[self.of(told.rows)]
            self._until[rows] = told.now + self._for_s[rows]

    def left(self, told: Left) -> None:
        self.drop(told.rows)

    def gone(self, told: ClassesGone) -> None:
        """The rows of removed classes count no more. ``reclaimed`` drops them."""
        if self.any:
            counts, payers = self.in_sets()[told.sets], self._sets.tenant[told.sets]
            self._pay(payers, counts * self._sizes(told.sets), -1)
            self.in_sets()[told.sets] = 0

    def reclaimed(self, rows: I64Array) -> None:
        if self.any:
            self._fit()
            self._for_s[rows] = 0

    def drop(self, rows: I64Array) -> None:
        """``rows`` are not retained any more."""
        if self.any and len(rows := np.unique(rows[self.of(rows)])):
            self._drop(rows)

    def _drop(self, rows: I64Array) -> None:
        """``drop`` retained ``rows``, each of which is named once."""
        self._count(rows, -1)
        self._for_s[rows] = 0
        self.releases += 1

    def sweep(self, now: float) -> None:
        """Begin to look for rows whose time is over, unless the last look began within
        ``_SWEEP_S``."""
        if self.any and not self.sweeping and now >= self._swept + _SWEEP_S:
            self._swept = now
            self.sweep_more(now)

    def sweep_more(self, now: float) -> None:
        """Look at the next ``_LOOK`` rows, and drop at most ``_SLICE`` whose time is over."""
        part = slice(self._next, self._next + _LOOK)
        over = (self._for_s[part] > 0) & (self._until[part] <= now)
        rows = self._counted(self._next + np.flatnonzero(over))
        end = int(rows[_SLICE]) if len(rows) > _SLICE else part.stop
        if len(rows):
            self._drop(rows[:_SLICE])
        self._next = end if end < len(self._for_s) else 0

    @property
    def sweeping(self) -> bool:
        """Whether a look has begun that has not seen all rows: ``sweep_more`` goes on."""
        return self._next > 0

    def trim(self) -> None:
        """The shares of tenants have changed: drop what exceeds a cap, the rows whose time ends
        first."""
        for tenant in [t for t in self._tenants.all.values() if t.kept_bytes]:
            if (excess := tenant.kept_bytes - self.cap(tenant)) > 0:
                rows = self._counted(np.flatnonzero(self._for_s))
                rows = rows[self._sets.tenant[self._table.set_of[rows]] == tenant.id]
                rows = rows[np.argsort(self._until[rows], kind="stable")]
                sizes = self._sizes(self._table.set_of[rows])
                self._drop(rows[np.cumsum(sizes) - sizes < excess])

    # ------------------------------------------------------------ counting

    def _counted(self, rows: I64Array) -> I64Array:
        """Those of ``rows`` whose classes were not removed."""
        counted: I64Array = rows[self._sets.owner[self._table.set_of[rows]] >= 0]
        return counted

    def _sizes(self, sets: I64Array) -> I64Array:
        """The size of a row of each of ``sets``."""
        sizes: I64Array = self._sets.bytes[sets] // self._sets.slots[sets]
        return sizes

    def _count(self, rows: I64Array, sign: int) -> None:
        """Count ``rows``, which begin (1) or end (-1) to be retained."""
        counts = np.bincount(self._table.set_of[rows], minlength=len(self.in_sets()))
        self.in_sets()[:] += sign * counts
        sets = np.flatnonzero(counts)
        self._pay(self._sets.tenant[sets], counts[sets] * self._sizes(sets), sign)

    def _pay(self, payers: I64Array, sizes: I64Array, sign: int) -> None:
        """Retained rows of ``sizes`` begin (1) or end (-1) to count for ``payers``."""
        sums = np.bincount(payers, sizes).astype(np.int64)
        for tenant in self._tenants.all.values() if len(payers) else ():
            if tenant.id < len(sums):
                tenant.kept_bytes += sign * int(sums[tenant.id])

    def _fit(self) -> None:
        """Have an entry for each row of the table, which may have grown."""
        if (known := len(self._for_s)) < (size := len(self._table)):
            self._for_s = np.resize(self._for_s, size) if known else np.zeros(size, np.float32)
            self._until = np.resize(self._until, size) if known else np.zeros(size)
            self._for_s[known:] = self._until[known:] = 0
