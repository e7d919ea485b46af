"""What a core writes to the directory while it runs."""

from __future__ import annotations

import numpy as np

from kvass.core.saved.directory import SavedClass, SavedNamespace, SavedSet
from tests.core.lives import Memory
from tests.core.rig import Rig


def test_the_directory_follows_namespaces_classes_and_sets() -> None:
    memory = Memory()
    rig = Rig(index=memory.create())
    e = rig.engine()
    e.store("a")
    entries = memory.adopt().entries
    assert [type(each) for each in entries] == [SavedClass, SavedNamespace, SavedSet]
    e.clear()
    rig.finish()
    kept = memory.adopt().entries
    assert [type(each) for each in kept] == [SavedNamespace, SavedClass]
    rig.machine.validate()


def test_a_set_that_cannot_be_noted_is_not_added() -> None:
    memory = Memory()
    rig = Rig(index=memory.create())
    e = rig.engine()
    memory.full = True
    assert not e.reserve("a").reservation
    assert not rig.machine.state.classes.extents.sets
    memory.full = False
    e.store("b")
    assert e.holds("b") == 1
    assert np.flatnonzero(rig.machine.state.rows.table.set_of >= 0).size
