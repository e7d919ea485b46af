"""What a rank's release costs in Python: nothing that grows with the chunks of its lease.

Counted in bytecodes, so the answer is exact and the same on any machine.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

from kvass.core.effects import Received
from kvass.core.rows.row_states import RowStates
from kvass.messages import Release
from kvass.types import I64Array
from tests.core.rig import BOOT, Engine, Rig

RANKS = 8
FEW, MANY = 8, 512


@contextmanager
def bytecodes() -> Iterator[list[int]]:
    """Counts, in its one element, the bytecodes that this thread runs inside.

    Without the collector: others' callbacks of it (hypothesis has one) are bytecodes too.
    """
    count, before = [0], sys.gettrace()
    gc.disable()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = True
        count[0] += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)
        gc.enable()


def costs_of_releases(engine: Engine, chunks: range) -> list[int]:
    """Bytecodes of each rank's release of one lease on ``chunks``."""
    rig, costs = engine.rig, []
    lease = engine.lookup(*chunks, readers=tuple(range(RANKS))).lease
    for rank, connection in enumerate(engine.workers):
        event = Received(connection, Release(boot=BOOT, lease=lease, rank=rank))
        with bytecodes() as count:
            effects = rig.machine.step(event, rig.now)
        assert effects == []
        costs.append(count[0])
    rig.machine.validate()
    assert rig.gauge("leases", "pins") == (0, 0)
    return costs


@pytest.fixture
def engine() -> Engine:
    engine = Rig(pages=2 * RANKS * MANY, extent=64, instance_write_share=1.0).engine(ranks=RANKS)
    engine.store(*range(MANY))
    costs_of_releases(engine, range(1))  # the first time, counters are made
    return engine


def test_a_release_costs_the_same_for_any_number_of_chunks(engine: Engine) -> None:
    few = costs_of_releases(engine, range(FEW))
    many = costs_of_releases(engine, range(MANY))
    # Not ==: under another tracer (coverage) the interpreter may report a few opcodes less.
    assert all(large <= small for small, large in zip(few, many, strict=True)), (few, many)
    assert len(set(many[:-1])) == 1, "ranks that are not the last do different things"
    assert 0 < many[0] < many[-1], "the last one ends the lease"


def test_negative_control_a_loop_over_rows_is_seen(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpin = RowStates.unpin

    def slow(states: RowStates, rows: I64Array) -> None:
        for row in rows:
            unpin(states, np.array([row]))

    monkeypatch.setattr(RowStates, "unpin", slow)
    few = costs_of_releases(engine, range(FEW))
    many = costs_of_releases(engine, range(MANY))
    assert few[:-1] == many[:-1]
    assert few[-1] < many[-1] / 10
