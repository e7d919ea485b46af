"""Whose extent sets may go: of tenants with too much first, and nobody's reserve."""

from __future__ import annotations

import numpy as np

from kvass.core.rows.row_class import RowClass
from kvass.core.rows.shares import Shares
from kvass.types import Quota
from tests.core.rows import Rows, spec

CAP = 1 << 40


class Divided(Rows):
    """16 bytes, of which the tenant ``x`` has 12 and the tenant ``y`` 4."""

    def __init__(self, reserved: int) -> None:
        super().__init__()
        self.classes.tenants.set(Quota("x", CAP, reserved))
        self.classes.tenants.set(Quota("y", CAP, 0))
        self.row_class = self.classes.add(spec(), namespace=1)
        self.other = self.classes.add(spec(1), namespace=1)
        self.store(self.row_class, *range(1, 13), tenant="x")
        self.store(self.row_class, *range(21, 25), tenant="y")

    def may_go(self, asker: RowClass) -> list[list[str]]:
        """Whose sets may go, in each turn."""
        ranks, clock = self.followers.policy.ranks(last=False), self.rows.table.clock
        names = [self.classes.tenants.named(n) for n in self.classes.sets.tenant.tolist()]
        sets = Shares(self.tables).may_go(asker, ranks, clock, clock, alone=True)
        return [[names[n] for n in np.flatnonzero(each).tolist()] for each in sets]


def test_who_has_more_than_its_share_pays_first() -> None:
    core = Divided(reserved=0)
    asker = core.classes.paid_by(core.other, core.classes.tenants.default)
    assert core.may_go(asker) == [["x"] * 3, ["x"] * 3 + ["y"]]


def test_what_is_reserved_for_a_tenant_goes_to_nobody() -> None:
    core = Divided(reserved=8)
    asker = core.classes.paid_by(core.other, core.classes.tenants.default)
    assert core.may_go(asker) == [["x", "y"], ["x", "y"]]


def test_without_quotas_any_other_class_pays() -> None:
    core = Rows()
    one, other = (core.classes.add(spec(n), namespace=1) for n in range(2))
    core.store(one, 1)
    ranks, clock = core.followers.policy.ranks(last=False), core.rows.table.clock
    (sets,) = Shares(core.tables).may_go(other, ranks, clock, clock, alone=True)
    assert np.flatnonzero(sets).tolist() == [0]
    (sets,) = Shares(core.tables).may_go(one, ranks, clock, clock, alone=True)
    assert not sets.any()
