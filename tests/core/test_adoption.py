"""What a core adopts of a former life, and what it does not (law 13)."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from kvass.core.adoption import Adoption
from kvass.core.rows.row_table import READY
from kvass.core.saved.directory import MOST_COUNT
from kvass.core.saved.index_file import SavedIndex
from kvass.types import MOST_S
from tests.core.lives import Memory, run
from tests.core.rig import Rig

SEEDS = 24


def life(memory: Memory, now: float = 100.0, pages: int = 64, **core: Any) -> tuple[Rig, Adoption]:
    """A daemon that starts with what ``memory`` has."""
    found = memory.open(pages)
    index = found if isinstance(found, SavedIndex) else memory.create()
    core = {"started_s": now, **core}
    rig = Rig(pages, now=now, core=core, index=index, instance_write_share=1.0)
    rig.machine.validate()
    assert rig.machine.adoption is not None
    return rig, rig.machine.adoption


def killed(*names: object, pages: int = 64) -> Memory:
    """The memory of a daemon that died with rows of these names."""
    memory = Memory(128)
    rig, adoption = life(memory, pages=pages)
    assert adoption == Adoption(0, 0, 0, 0, 0, ())
    rig.engine().store(*names)
    return memory


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_instant_it_dies_at_no_row_has_other_bytes(seed: int) -> None:
    assert run(seed).adopted


def test_the_world_gets_around() -> None:
    lives = [run(seed) for seed in range(3)]
    assert sum(each.torn for each in lives) > 3
    assert sum(each.hits for each in lives) > 10


@pytest.mark.parametrize(
    ("part", "value"),
    [("key", 7), ("loader", 1), ("stamp", -1), ("stamp", 2**63 - 1), ("state", 200)],
)
def test_a_row_that_does_not_check_out_is_dropped(part: str, value: int) -> None:
    memory = killed("a", "b")
    table = life(memory, 101.0)[0].machine.state.rows.table
    row = int(np.flatnonzero(table.state == READY)[0])
    getattr(table, part)[row] = value
    rig, adoption = life(memory, 102.0)
    assert adoption.rows == 1
    assert rig.engine().holds("a", "b") <= 1


def test_a_damaged_stamp_costs_no_later_life_what_it_kept() -> None:
    """No seal covers a stamp, and all later ones are above it."""
    memory = killed("a", "b")
    table = life(memory, 101.0)[0].machine.state.rows.table
    row = int(np.flatnonzero(table.state == READY)[0])
    table.stamp[row] = MOST_COUNT - 1
    rig, adoption = life(memory, 102.0)
    assert adoption.rows == 2
    rig.engine().store("c", "d")
    assert rig.engine("f").holds("a", "b") == 2
    rig, adoption = life(memory, 103.0)
    assert adoption.rows == 4


def test_a_damaged_deadline_of_leases_is_no_later_than_any_lease_can_be() -> None:
    memory = Memory(4)
    rig, _ = life(memory, pages=4)
    e = rig.engine()
    e.store("a", "b", "c", "d")
    assert e.lookup("a", "b", "c", "d").lease
    memory.adopt().promise(1e300)
    rig, _ = life(memory, 101.0, pages=4)
    assert rig.engine().reserve("x").refused == (0,)
    rig.wait(MOST_S)
    assert rig.engine("f").store("x").chunks == (0,)


def test_a_damaged_index_is_not_believed_or_costs_rows_and_raises_nothing() -> None:
    memory, rng = Memory(128), random.Random(1)
    rig, _ = life(memory)
    e = rig.engine(pid=10)
    e.store(*range(10))
    e.lookup(0, 1)
    e.begin("written")
    copy, used = memory.copy(), np.flatnonzero(memory.bytes)
    for _ in range(150):
        memory.put_back(copy)
        at = int(rng.choice(used)) & ~7
        word = rng.choice([b"\xff" * 8, b"\xff" * 7 + b"\x7f", rng.randbytes(8)])
        memory.bytes[at : at + 8] = np.frombuffer(word, np.uint8)
        if not isinstance(memory.open(), SavedIndex):
            continue
        rig, _ = life(memory, 101.0)
        e = rig.engine(pid=10)
        e.holds(*range(10))
        e.reserve("x", "y")
        rig.wait(MOST_S)
        rig.finish()
        assert e.store("z").chunks == (0,)


class Death(BaseException):
    """The end of a process, in a test."""


def adopt_and_die(memory: Memory, lines: int) -> bool:
    """Adopt, and die after so many lines of it; returns whether it had so many. Most lines count an
    eighth: those that write to the records count one."""
    left = 8 * lines

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("core/adoption.py"):
            return None
        left -= (event == "line") * (8 if frame.f_code.co_name == "_judge_some" else 1)
        if left < 0:
            raise Death
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        life(memory, 101.0)
    except Death:
        return True
    finally:
        sys.settrace(before)
    return False


def test_adoption_that_dies_in_its_middle_can_begin_again() -> None:
    memory, lines = Memory(128), 0
    rig, _ = life(memory)
    e, other = rig.engine(), rig.engine("other", identity={"model": "cleared"})
    e.store(*range(6))
    other.store("x", "y")
    assert (e.lookup(0, 1).chunks, other.lookup("x").chunks) == (2, 1)
    other.clear()
    copy = memory.copy()
    while adopt_and_die(memory, lines):
        rig, adoption = life(memory, 102.0)
        assert (adoption.rows, adoption.lent, adoption.dropped) == (6, 2, 1)
        assert rig.engine().holds(*range(6)) == 6
        memory.put_back(copy)
        lines += 1
    assert lines > 50
