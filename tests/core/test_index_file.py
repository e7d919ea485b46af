"""The memory of a saved index: what is believed, and what is not."""

from __future__ import annotations

import numpy as np
import pytest

from kvass.core.saved import index_file
from kvass.core.saved.index_file import MOST_SETS, SavedIndex, Unusable, Where, index_bytes
from kvass.types import PAGE
from tests.core.lives import WHERE, Memory


def reason(found: SavedIndex | Unusable) -> str:
    assert isinstance(found, Unusable)
    assert "\n" not in found.reason
    return found.reason


def test_an_index_is_opened_where_it_was_made() -> None:
    memory = Memory()
    made = memory.create()
    assert made.begin(64 * PAGE, [])
    made.promise(50.0)
    again = memory.adopt()
    assert again.lease_until == 50.0
    assert again.rows >= 64
    assert index_bytes(128 * PAGE) > index_bytes(64 * PAGE)


def test_of_another_boot_version_or_size_it_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    assert "no index" in reason(memory.open())
    memory.create().begin(64 * PAGE, [])
    assert "another boot" in reason(memory.open(where=Where(b"another", 7)))
    assert "shorter" in reason(memory.open(pages=1 << 20))
    with monkeypatch.context() as newer:
        newer.setattr(index_file, "VERSION", 3)
        assert "format 2, this kvass reads 3" in reason(memory.open())
    assert isinstance(memory.open(), SavedIndex)
    memory.bytes[16] ^= 1
    assert "damaged" in reason(memory.open())


def test_a_damaged_header_or_directory_is_not_believed() -> None:
    memory = Memory()
    made = memory.create()
    made.begin(64 * PAGE, [])
    made.promise(float("nan"))
    made._header["lease_until"] = np.nan
    assert "damaged" in reason(memory.open())
    made._header["lease_until"] = 1.0
    assert isinstance(memory.open(), SavedIndex)
    made._header["log"][1:] = 1 << 40
    assert "damaged" in reason(memory.open())


def test_an_arena_that_shrank_may_not_grow_again() -> None:
    memory = Memory()
    memory.create().begin(64 * PAGE, [])
    memory.adopt().begin(32 * PAGE, [])
    assert "larger once" in reason(memory.open(pages=64))
    assert isinstance(memory.open(pages=32), SavedIndex)


def test_an_arena_may_grow() -> None:
    memory = Memory(128)
    memory.create().begin(64 * PAGE, [])
    assert isinstance(memory.open(pages=128), SavedIndex)


def test_in_another_pid_namespace_pids_mean_nothing() -> None:
    memory = Memory()
    made = memory.create()
    made.processes.note_worker(1, 10, 99, 5)
    elsewhere = memory.open(where=Where(WHERE.boot_id, 8))
    assert isinstance(elsewhere, SavedIndex)
    assert [p.pid for p in elsewhere.processes.former()] == [0]


def test_memory_is_asked_for_before_it_is_used() -> None:
    memory = Memory()
    memory.full = True
    found = SavedIndex.create(memory.bytes, WHERE, memory.allocate)
    assert reason(found) == "there is no memory for the index"
    memory.full = False
    made = memory.create()
    memory.full = True
    assert not made.has_rows(1)
    assert made.serials(1) is None
    memory.full = False
    assert made.has_rows(made.rows)
    assert not made.has_rows(made.rows + 1)
    assert made.serials(MOST_SETS + 1) is None
    serials = made.serials(3)
    assert serials is not None
    made.new_serial(np.array([0, 2]))
    assert serials[:3].tolist() == [1, 0, 1]
