"""What is told of rows: once each, in bulk, and while the table has what the protocol says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvass.core.machine import CacheMachine, CoreConfig
from kvass.core.rows.listeners import (
    ClassesGone,
    Entered,
    Left,
    Listener,
    Listeners,
    Readable,
    Used,
)
from kvass.core.rows.row_table import FREE, LOADING, READY, TRANSIENT, WRITING
from kvass.types import I64Array
from tests.core.rows import Rows, spec
from tests.support.simulation.simulator import run_seed


class Watch(Listener):
    """Checks what is guaranteed of each hook, and keeps which rows are in L1."""

    def __init__(self, table: Any, sets: Any) -> None:
        self.table, self.sets = table, sets
        self.inside = dict[int, int]()
        """By row, the id of its class."""
        self.told = Counter[str]()

    def check(self, row_class: Any, rows: I64Array, *states: int) -> None:
        assert len(rows), "nothing is told"
        assert len(np.unique(rows)) == len(rows), "a row is told twice"
        assert set(self.table.state[rows].tolist()) <= set(states)
        assert set(self.sets.owner[self.table.set_of[rows]].tolist()) == {row_class.id}
        assert self.table.keys_of(rows).any(axis=1).all(), "a row has no key"

    def entered(self, told: Entered) -> None:
        self.check(told.row_class, told.rows, WRITING, LOADING)
        for row in told.rows.tolist():
            assert row not in self.inside, "a row entered twice"
            self.inside[row] = told.row_class.id
        self.told["entered"] += 1

    def readable(self, told: Readable) -> None:
        self.check(told.row_class, told.rows, READY, TRANSIENT)
        assert self.inside.keys() >= {*told.rows.tolist()}
        self.told["readable"] += 1

    def used(self, told: Used) -> None:
        self.check(told.row_class, told.rows, WRITING, LOADING, READY, TRANSIENT)
        assert (self.table.stamp[told.rows] == told.stamps).all()
        assert (np.diff(told.stamps) > 0).all()
        self.told["used"] += 1

    def left(self, told: Left) -> None:
        self.check(told.row_class, told.rows, told.state)
        assert told.state != FREE
        assert (self.table.keys_of(told.rows) == told.keys).all()
        for row in told.rows.tolist():
            assert self.inside.pop(row) == told.row_class.id
        self.told[told.cause] += 1

    def gone(self, told: ClassesGone) -> None:
        owners = {*self.sets.owner[told.sets].tolist()}
        assert owners <= {c.id for c in told.classes}
        assert {c.namespace for c in told.classes} <= {*told.namespaces}
        self.told["gone"] += 1

    def reclaimed(self, rows: I64Array) -> None:
        assert len(rows)
        assert (self.table.state[rows] != FREE).all()
        for row in rows.tolist():
            self.inside.pop(row, None)  # it may have left before its class was removed
        self.told["reclaimed"] += 1

    def validate(self) -> None:
        """What entered and did not leave is in the table, and nothing else."""
        rows = np.flatnonzero(~np.isin(self.table.state, [0, 2, 3]))
        assert {*rows.tolist()} <= self.inside.keys()
        assert (self.table.state[[*self.inside]] != FREE).all(), "a row left untold"


def watch(core: Any) -> Watch:
    """Have a watch listen to the rows of ``core`` from now on, after all others."""
    watched = Watch(core.classes.table, core.classes.sets)
    also, told = Listeners(watched), core.classes.listeners
    for name in ("entered", "readable", "used", "left", "gone", "reclaimed"):
        setattr(told, name, (*getattr(told, name), *getattr(also, name)))
    return watched


def test_a_hook_that_nobody_overrides_has_no_listener() -> None:
    class Leaves(Listener):
        def left(self, told: Left) -> None:
            pass

    one, none = Leaves(), Listener()
    listeners = Listeners(one, none)
    assert listeners.left == (one.left,)
    for name in ("entered", "readable", "used", "gone", "reclaimed"):
        assert getattr(listeners, name) == ()


def test_a_row_that_was_quarantined_or_failed_leaves_once() -> None:
    core = Rows()
    watched = watch(core)
    row_class = core.classes.add(spec(), namespace=1)
    rows = core.write(row_class, 1, 2)
    core.rows.discard(rows)
    core.rows.free(rows)
    read = core.store(row_class, 3)
    core.rows.pin(read)
    core.rows.forget(read, "cleared")
    core.rows.unpin(read)
    assert watched.told["unfinished"] == watched.told["cleared"] == 1
    assert watched.told["not_retained"] == watched.told["reclaimed"] == 0
    assert not watched.inside


def test_of_a_class_that_is_gone_each_row_is_told_when_its_slot_is_free() -> None:
    core = Rows()
    watched = watch(core)
    row_class = core.classes.add(spec(), namespace=1)
    core.store(row_class, 1, 2)
    writing = core.write(row_class, 3)
    core.classes.remove([1], [row_class], "reset")
    assert (watched.told["gone"], watched.told["reclaimed"]) == (1, 0)
    core.rows.discard(writing)
    assert not watched.told["unfinished"], "its class was removed"
    core.rows.free(writing)
    core.allocator.reclaim()
    assert watched.told["reclaimed"] == 2
    assert not watched.inside


def test_rows_never_leave_without_a_cause() -> None:
    core = Rows()
    rows = core.store(core.classes.add(spec(), namespace=1), 1)
    with pytest.raises(AssertionError, match="without a cause"):
        core.rows.free(rows)


def test_what_the_protocol_guarantees_holds_in_whatever_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watches = list[Watch]()

    class Watched(CacheMachine):
        def __init__(self, config: CoreConfig) -> None:
            super().__init__(config)
            watches.append(watch(self.state))

        def validate(self) -> None:
            super().validate()
            watches[-1].validate()

    monkeypatch.setattr("tests.support.simulation.world.CacheMachine", Watched)
    for seed in range(4):
        assert not run_seed(seed)
    told = sum((each.told for each in watches), Counter[str]())
    hooks = {"entered", "readable", "used", "gone"}
    assert told.keys() >= hooks | {"capacity", "handed_over", "unfinished"}
