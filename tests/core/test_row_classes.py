"""Row classes: their indexes' memory, their tenants, and what a clear does to them."""

from __future__ import annotations

import pytest

from kvass.core.rows import index, row_classes
from tests.core.rig import Rig


def test_a_new_index_is_warm_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "WARMED", 64)
    rig = Rig(pages=4096, extent=64)
    e = rig.engine()
    assert rig.finish() > 5
    assert not rig.machine.state.allocator.unfinished
    e.store("a")
    assert e.clear() == 1
    assert rig.finish() > 5
    assert e.holds("a") == 0


def test_all_indexes_together_begin_with_so_much_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand namespaces would take as many times the memory of one."""
    monkeypatch.setattr(row_classes, "INDEX_ROOM", 1030)
    rig = Rig(pages=400, extent=4, instance_write_share=1.0)
    engines = [rig.engine(f"e{i}", identity={"model": f"m{i}"}) for i in range(3)]
    classes = rig.machine.state.classes.by_id.values()
    assert [one.index.room >= 400 for one in classes] == [True, True, False]
    engines[2].store(*range(300))
    assert engines[2].holds(*range(300)) == 300
    engines[0].quit()
    rig.engine("new", identity={"model": "new"})
    assert [one.index.room >= 400 for one in classes] == [True, False, True]
