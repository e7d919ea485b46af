"""Rows that many steps clear or add: what is cleared has no hits before its memory comes back."""

from __future__ import annotations

import pytest

from kvass.core.rows import index, row_classes
from kvass.types import PAGE
from tests.core.rig import Rig, layout


@pytest.fixture
def rig() -> Rig:
    """Gives back one set at a time."""
    return Rig(pages=64, extent=4, instance_write_share=1.0, core={"slice_slots": 1})


def test_what_was_cleared_matches_nothing_before_it_is_given_back(rig: Rig) -> None:
    e = rig.engine()
    e.store(*range(64))
    assert e.clear() == 64
    assert e.holds(*range(64)) == 0
    assert rig.gauge("rows") == (0,)
    assert rig.status["l1_cleared_bytes"] > 50 * PAGE
    assert rig.finish() == 15, "one slice was done at once"
    assert rig.gauge("l1_cleared_bytes", "l1_used_bytes") == (0, 0)


def test_what_was_cleared_makes_room_before_anything_else_does(rig: Rig) -> None:
    e, other = rig.engine(), rig.engine("o", layout=layout(2))
    e.store(*range(56))
    other.store("kept")
    e.clear()
    grant = e.store(*range(56))
    assert len(grant.chunks) == 56
    assert other.holds("kept") == 1
    assert e.holds(*range(56)) == 56
    rig.finish()
    assert rig.gauge("l1_cleared_bytes") == (0,)


def test_a_cleared_row_that_is_read_keeps_its_place(rig: Rig) -> None:
    e = rig.engine()
    e.store(*range(64))
    found = e.lookup(0)
    place = {*found.slots[0].offsets(0, PAGE).tolist()}
    e.clear()
    rig.finish()
    for i in range(3):
        written = e.store(*range(100 * i, 100 * i + 60)).slots[0].offsets(0, PAGE).tolist()
        assert not place & {*written}
    e.release(found.lease)
    rig.finish()
    assert rig.gauge("l1_cleared_bytes") == (0,)


def test_a_cleared_row_that_is_written_keeps_its_place_and_is_never_published(rig: Rig) -> None:
    e = rig.engine()
    grant = e.reserve("late")
    place = {*grant.slots[0].offsets(0, PAGE).tolist()}
    e.hand_over(reservations=(grant.reservation,))
    e.clear()
    rig.finish()
    assert not place & {*e.store(*range(60)).slots[0].offsets(0, PAGE).tolist()}
    e.commit(grant.reservation)
    rig.finish()
    assert e.holds("late") == 0
    assert rig.gauge("l1_cleared_bytes", "quarantined_bytes") == (0, 0)


def test_a_new_index_is_warm_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "WARMED", 64)
    rig = Rig(pages=4096, extent=64)
    e = rig.engine()
    assert rig.finish() > 5
    assert not rig.machine.state.store.unfinished
    e.store("a")
    assert e.clear() == 1
    assert rig.finish() > 5
    assert e.holds("a") == 0


def test_all_indexes_together_begin_with_so_much_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand namespaces would take as many times the memory of one."""
    monkeypatch.setattr(row_classes, "INDEX_ROOM", 1030)
    rig = Rig(pages=400, extent=4, instance_write_share=1.0)
    engines = [rig.engine(f"e{i}", identity={"model": f"m{i}"}) for i in range(3)]
    classes = rig.machine.state.store.classes.values()
    assert [one.index.room >= 400 for one in classes] == [True, True, False]
    engines[2].store(*range(300))
    assert engines[2].holds(*range(300)) == 300
    engines[0].quit()
    rig.engine("new", identity={"model": "new"})
    assert [one.index.room >= 400 for one in classes] == [True, False, True]
