"""The tables that the files of ``core/rows`` share."""

from __future__ import annotations

import pytest

from kvass.core.rows.tables import ROOM, TYPICAL_ROW, CoreTables


@pytest.mark.parametrize(("rows", "room"), [(0, 0), (64, 64), (2 * ROOM, ROOM)])
def test_there_is_room_for_typical_rows_at_the_start(rows: int, room: int) -> None:
    tables = CoreTables(rows * TYPICAL_ROW)
    assert len(tables.table) == room
    assert tables.extents.size == rows * TYPICAL_ROW
    assert not len(tables.sets.owner)
