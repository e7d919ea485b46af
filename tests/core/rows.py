"""Rows, their classes and the allocator without a machine, for unit tests."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvass.core.clients.registry import RowClassSpec
from kvass.core.histogram import Histogram
from kvass.core.rows.followers import Followers
from kvass.core.rows.row_allocator import RowAllocator
from kvass.core.rows.row_class import RowClass
from kvass.core.rows.row_classes import RowClasses
from kvass.core.rows.row_states import RowStates
from kvass.core.rows.row_table import FREE, READY, WRITING, RowTable
from kvass.core.rows.tables import CoreTables
from kvass.types import KEY_WORDS, GroupLayout, I64Array, U64Array


def ready_table(rows: int) -> RowTable:
    """A table of ``rows`` READY rows."""
    table = RowTable()
    table.grow(rows)
    every = np.arange(rows)
    table.move(every, FREE, WRITING)
    table.move(every, WRITING, READY)
    return table


def tables_of(table: RowTable) -> CoreTables:
    """The tables of an empty arena, with ``table`` as the rows."""
    tables = CoreTables(0)
    tables.table = table
    return tables


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

    def __init__(
        self, arena_bytes: int = 16, extent_bytes: int = 4, keep_share: float = 0.25
    ) -> None:
        self.counters = Counter[str]()
        self.tables = tables = CoreTables(arena_bytes)
        follow = Followers(tables, self.counters, Histogram(), b"seed", 1 << 16, keep_share)
        self.followers = follow
        self.classes = RowClasses(
            tables, extent_bytes, b"seed", follow.policy, follow.saving, follow.listeners
        )
        self.rows = RowStates(self.classes)
        self.rows.uses.mark(0, now=0.0)
        self.allocator = RowAllocator(self.rows, tables, 2048)

    def write(
        self, row_class: RowClass, *numbers: int, tenant: str = "", session: int = 0
    ) -> I64Array:
        """WRITING rows with the keys of ``numbers``, as many as there is room for."""
        (rows,), _ = self.allocator.allocate(
            [row_class],
            keys(*numbers),
            [np.arange(len(numbers))],
            self.rows.table.clock,
            self.classes.tenants.payer(tenant),
            session=session,
        )
        return rows

    def store(
        self, row_class: RowClass, *numbers: int, tenant: str = "", session: int = 0
    ) -> I64Array:
        """READY rows with the keys of ``numbers``, used now."""
        rows = self.write(row_class, *numbers, tenant=tenant, session=session)
        self.rows.publish(rows)
        self.rows.touch(row_class, rows)
        return rows

    def states(self, rows: I64Array) -> set[int]:
        return set(self.rows.table.state[rows].tolist())
