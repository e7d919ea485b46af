"""The arena's mapping: shared between processes, of a fixed size, alive while it is viewed."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvass.arena import memory
from kvass.errors import RemoteError, UsageError
from kvass.types import PAGE

MIB = 1 << 20


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("kvass-arena")


def mapped_bytes(arena: memory.Arena) -> int:
    """Bytes of ``arena`` that stand in this process's page tables, of all its mappings. Another
    test's arena may still await the garbage collector."""
    inode, mappings = str(os.fstat(arena.fileno()).st_ino), Path("/proc/self/smaps").read_text()
    sizes = re.findall(rf" {inode} +/memfd:kvass-arena.*?Rss: +(\d+) kB", mappings, re.DOTALL)
    assert sizes, "not mapped"
    return sum(map(int, sizes)) * 1024


def resident(arena: memory.Arena) -> int:
    """Bytes of the memfd that exist."""
    return os.fstat(arena.fileno()).st_blocks * 512


def test_second_process_sees_what_the_first_wrote() -> None:
    arena = memory.create(MIB)
    arena.buffer[100:104] = (1, 2, 3, 4)
    child = (
        "import sys; from kvass.arena import memory;"
        f"a = memory.attach({arena.fileno()}, {MIB});"
        "a.buffer[200] = a.buffer[100:104].sum()"
    )
    subprocess.run([sys.executable, "-c", child], pass_fds=[arena.fileno()], check=True, timeout=60)
    assert arena.buffer[200] == 10
    arena.close()


def test_nothing_is_populated_until_asked() -> None:
    arena = memory.create(8 * MIB)
    assert resident(arena) == 0
    arena.populate(MIB, 3 * MIB)
    assert resident(arena) == 2 * MIB
    arena.buffer[2 * MIB] = 7
    arena.populate(0, 8 * MIB)
    assert resident(arena) == 8 * MIB
    assert arena.buffer[2 * MIB] == 7
    arena.close()


def test_a_page_is_there_whoever_touched_it() -> None:
    ours = memory.create(MIB)
    theirs = memory.attach(os.dup(ours.fileno()), MIB)
    assert not theirs.has_page(PAGE)
    ours.buffer[PAGE] = 1
    assert theirs.has_page(PAGE)
    assert not theirs.has_page(0)
    assert mapped_bytes(ours) == PAGE, "asking maps nothing"
    for arena in (ours, theirs):
        arena.close()


def test_populating_without_kernel_support_still_takes_the_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)
    arena = memory.create(2 * MIB)
    arena.populate(0, MIB)
    assert resident(arena) == MIB
    arena.close()


@pytest.mark.parametrize(("lo", "hi"), [(-1, 5), (0, MIB + 1), (9, 8)])
def test_populate_stays_inside(lo: int, hi: int) -> None:
    arena = memory.create(MIB)
    with pytest.raises(UsageError, match="outside"):
        arena.populate(lo, hi)
    arena.close()


def test_size_is_sealed() -> None:
    arena = memory.create(MIB)
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fileno(), size)
    arena.close()


def test_mapping_lives_as_long_as_its_last_view() -> None:
    before = mapped_arenas()
    arena = memory.create(MIB)
    view = arena.buffer[: 4 * mmap.PAGESIZE]
    arena.close()
    arena.close()
    view[:] = 9
    assert mapped_arenas() == before + 1
    assert np.all(view == 9)
    del view
    assert mapped_arenas() == before
    with pytest.raises(UsageError, match="closed"):
        _ = arena.buffer


def test_closing_empties_the_mapping_before_it_is_unmapped() -> None:
    size = memory.SLICE_BYTES + MIB  # a slice, and what is left
    arena = memory.create(size)
    second = memory.attach(os.dup(arena.fileno()), size)
    second.buffer[:] = 9
    view, before = second.buffer, mapped_bytes(arena)
    second.close()
    assert before - mapped_bytes(arena) == size
    assert resident(arena) == size  # of this mapping, not of the arena
    assert np.all(view == 9)
    arena.close()


def test_attach_owns_the_descriptor_and_refuses_what_is_no_arena(tmp_path: Path) -> None:
    arena = memory.create(MIB)
    second = memory.attach(fd := os.dup(arena.fileno()), MIB)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    second.buffer[5] = 1
    assert arena.buffer[5] == 1
    with pytest.raises(RemoteError, match="no arena of"):
        memory.attach(os.dup(arena.fileno()), 2 * MIB)
    arena.close()
    second.close()
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    with pytest.raises(RemoteError):
        memory.attach(os.open(path, os.O_RDWR), MIB)


@pytest.mark.parametrize("size", [0, -4096, 5000])
def test_create_refuses_what_is_no_size(size: int) -> None:
    with pytest.raises(UsageError, match="4096"):
        memory.create(size)
