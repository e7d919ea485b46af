"""Rows, their classes and the allocator without a machine, for unit tests."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvass.core.clients.registry import RowClassSpec
from kvass.core.histogram import Histogram
from kvass.core.rows.row_allocator import RowAllocator
from kvass.core.rows.row_classes import RowClass, RowClasses
from kvass.core.rows.row_states import RowStates
from kvass.core.rows.row_table import FREE, KEY_WORDS, READY, WRITING, RowTable
from kvass.types import GroupLayout, I64Array, U64Array


def ready_table(rows: int) -> RowTable:
    """A table of ``rows`` READY rows."""
    table = RowTable()
    table.grow(rows)
    every = np.arange(rows)
    table.move(every, FREE, WRITING)
    table.move(every, WRITING, READY)
    return table


def keys(*numbers: int) -> U64Array:
    """A key per number."""
    made = np.zeros((len(numbers), KEY_WORDS), np.uint64)
    made[:, 0] = numbers
    return made


def spec(group: int = 0, row_bytes: int = 1, chunk_blocks: int = 0) -> RowClassSpec:
    """A row class of ``full`` rows with one shard."""
    layout = GroupLayout("full", 16, (), ())
    return RowClassSpec(group, layout, (row_bytes,), chunk_blocks)


class Rows:
    """An arena of ``arena_bytes`` bytes in extents of ``extent_bytes``."""

    def __init__(self, arena_bytes: int = 16, extent_bytes: int = 4) -> None:
        self.counters = Counter[str]()
        self.classes = RowClasses(arena_bytes, extent_bytes, self.counters, b"seed", 1 << 16)
        self.rows = RowStates(self.classes, self.counters)
        self.rows.uses.mark(0, now=0.0)
        self.allocator = RowAllocator(self.rows, self.counters, Histogram(), 2048)

    def write(self, row_class: RowClass, *numbers: int, tenant: str = "") -> I64Array:
        """WRITING rows with the keys of ``numbers``, as many as there is room for."""
        (rows,), _ = self.allocator.allocate(
            [row_class],
            keys(*numbers),
            [np.arange(len(numbers))],
            self.rows.table.clock,
            self.classes.tenants.payer(tenant),
        )
        return rows

    def store(self, row_class: RowClass, *numbers: int, tenant: str = "") -> I64Array:
        """READY rows with the keys of ``numbers``, used now."""
        rows = self.write(row_class, *numbers, tenant=tenant)
        self.rows.publish(rows)
        self.rows.touch(row_class, rows)
        return rows

    def states(self, rows: I64Array) -> set[int]:
        return set(self.rows.table.state[rows].tolist())
