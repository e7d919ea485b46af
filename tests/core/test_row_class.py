"""What a row class says of itself."""

from __future__ import annotations

from kvass.types import Quota
from tests.core.rows import Rows, spec


def test_a_class_is_undivided_and_within_its_cap_while_its_tenant_is_alone_and_has_room() -> None:
    core = Rows()
    row_class = core.classes.add(spec(row_bytes=2), namespace=1)
    assert (row_class.undivided, row_class.in_use) == (True, False)
    core.classes.tenants.set(Quota("x", 9, 0))
    theirs = core.classes.paid_by(row_class, core.classes.tenants.payer("x"))
    assert (row_class.undivided, row_class.in_use) == (False, False)
    assert theirs.within_cap == 4
    core.store(row_class, 1, 2, tenant="x")
    assert row_class.in_use
    assert theirs.within_cap == 4 - theirs.slots
    assert theirs.saved.tenant == "x"
