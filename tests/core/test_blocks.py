"""Rows that are used in part, of hashes that no engine has."""

from __future__ import annotations

from tests.core.rig import Rig, digests
from tests.core.spelling import groups


def test_a_hostile_reserve_of_rows_that_begin_alike_stays_consistent(rig: Rig) -> None:
    """Equal first blocks under all chunks."""
    engine = rig.engine(layout=groups("full@4"))
    names = [f"c{i}" for i in range(40)]
    blocks = digests(*(x for name in names for x in ("same", "b", "c", name)))
    for _ in range(2):
        grant = engine.reserve(*names, blocks=blocks)
        if grant.reservation:
            engine.commit(grant.reservation)
    assert engine.lookup("c0", blocks=digests("same", "b")).blocks == 2
