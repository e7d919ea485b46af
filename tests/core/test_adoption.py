"""What a core adopts of a former life, and what it does not (law 13)."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from kvass import messages as m
from kvass.core.adoption import Adoption
from kvass.core.rows.row_table import READY
from kvass.core.saved.index_file import SavedIndex
from kvass.types import DEFAULT_TENANT, DEVICE_S, MOST_S, PAGE, Quota
from tests.core.lives import Memory, run
from tests.core.rig import LEASE_S, Rig
from tests.core.test_blocks import full, lookup, store

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


def test_what_was_stored_hits_in_the_next_life_and_the_one_after() -> None:
    memory = killed("a", "b", "c")
    for now in (101.0, 102.0):
        rig, adoption = life(memory, now)
        assert (adoption.rows, adoption.bytes, adoption.dropped) == (3, 3 * PAGE, 0)
        e = rig.engine()
        assert e.holds("a", "b", "c", "d") == 3
        assert e.begin("a", "b", "c", "d").chunks == (3,)


def test_rows_are_evicted_in_the_order_of_their_last_use() -> None:
    memory = Memory(8)
    rig, _ = life(memory, pages=8)
    e = rig.engine()
    for name in "abcdefgh":
        e.store(name)
    e.holds("a")
    rig, adoption = life(memory, now=1000.0, pages=8)
    assert adoption.rows == 8
    e = rig.engine()
    e.store("x")
    assert [e.holds(name) for name in "ab"] == [1, 0]


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_a_full_l1_takes_stores_at_once_if_nothing_is_lent(stopped: bool) -> None:
    memory = Memory(4)
    rig, _ = life(memory, pages=4)
    e = rig.engine()
    e.store("a", "b", "c", "d")
    assert e.holds("a", "b") == 2
    if stopped:
        rig.machine.end()
    rig, adoption = life(memory, now=100.0, pages=4)
    assert (adoption.rows, adoption.lent) == (4, 0)
    assert rig.engine().store("w", "x", "y", "z").chunks == (0, 1, 2, 3)


def test_what_was_lent_is_not_reused_before_the_last_lease_of_former_lives() -> None:
    memory = Memory(4)
    rig, _ = life(memory, pages=4)
    e = rig.engine()
    e.store("a", "b", "c", "d")
    until = e.lookup("a").deadline_s
    third, now = rig, 101.0
    for now in (101.0, 102.0):  # a life without leases of its own promises no less
        third, adoption = life(memory, now, pages=4)
        assert (adoption.rows, adoption.lent) == (4, 1)
        assert third.status["l1_resting_bytes"] == PAGE
    e = third.engine()
    assert e.reserve("w", "x", "y", "z").refused == (3,)
    third.wait(until - now - 0.1)
    assert e.reserve("v").refused == (0,)
    third.wait(0.1)
    assert third.status["l1_resting_bytes"] == 0
    assert e.store("v").chunks == (0,)


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_a_stop_says_until_when_the_last_open_lease_is(stopped: bool) -> None:
    memory = Memory(4)
    rig, _ = life(memory, pages=4)
    e = rig.engine()
    e.store("a", "b", "c", "d")
    assert e.lookup("a").lease
    rig.wait(LEASE_S / 4)
    until = e.lookup("c").deadline_s
    rig.wait(LEASE_S / 4)
    assert e.holds("b") == 1
    if stopped:
        rig.machine.end()
    rig, _ = life(memory, now=rig.now, pages=4)
    rig.wait(until - 0.1 - rig.now)
    assert rig.status["l1_resting_bytes"] == 2 * PAGE
    rig.wait(0.1)
    freed = not rig.status["l1_resting_bytes"]
    assert freed == stopped, "a killed daemon has said only when the last of all leases ends"
    rig.wait(LEASE_S / 2)
    assert not rig.status["l1_resting_bytes"]


def test_a_cleared_row_that_may_still_be_read_rests_through_two_lives() -> None:
    memory = Memory(4)
    rig, _ = life(memory, pages=4)
    e = rig.engine()
    e.store("a", "b", "c", "d")
    until = e.lookup("a").deadline_s
    e.clear()
    for now in (101.0, 102.0):
        rig, adoption = life(memory, now, pages=4)
        assert adoption.rows == 0
        e = rig.engine()
        rig.wait(DEVICE_S + 0.1)
        assert e.reserve("w", "x", "y", "z").refused
    rig.wait(until)
    rig.finish()
    assert e.store("w", "x", "y", "z").chunks == (0, 1, 2, 3)


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


def test_a_tail_is_not_adopted() -> None:
    memory = Memory()
    rig, _ = life(memory)
    e = rig.engine(layout=full(4))
    store(e, "abcdef")
    assert lookup(e, "abcdef").blocks == 2
    table = rig.machine.state.rows.table
    assert (table.state == READY).sum() == 2
    assert life(memory, 101.0)[1].rows == 1


def test_a_clear_of_much_is_whole_even_if_the_daemon_dies_in_its_middle() -> None:
    memory = Memory()
    rig, _ = life(memory, slice_ends=1)
    for i in range(3):
        rig.engine(f"e{i}", identity={"model": f"m{i}"}).store("a", "b")
    assert rig.say(rig.open(), m.Clear(seq=3, everything=True)) == []
    assert rig.machine.state.clears, "it is not done yet"
    assert life(memory, 101.0)[1].rows == 0


def test_a_clear_of_a_tenant_is_whole_even_if_the_daemon_dies_in_its_middle() -> None:
    memory = Memory()
    rig, _ = life(memory, slice_slots=4)
    rig.engine().store(*range(10))
    assert rig.say(rig.open(own=True), m.ClearTenant(seq=3, tenant=DEFAULT_TENANT)) == []
    assert rig.machine.state.clears, "it is not done yet"
    assert life(memory, 101.0)[1].rows == 0


def test_what_is_stored_after_a_clear_is_adopted() -> None:
    memory = Memory()
    rig, _ = life(memory)
    e = rig.engine()
    e.store("a")
    e.clear()
    e.store("b")
    rig, adoption = life(memory, 101.0)
    assert adoption.rows == 1
    e = rig.engine()
    assert (e.holds("a"), e.holds("b")) == (0, 1)


def test_a_smaller_arena_keeps_what_lies_in_it_and_a_larger_one_all() -> None:
    memory = killed(*range(12))
    assert life(memory, 101.0, pages=128)[1].rows == 12
    rig, adoption = life(memory, 102.0, pages=8)
    assert adoption.rows == 8
    e = rig.engine()
    assert sum(e.holds(name) for name in range(12)) == 8


def test_rows_go_to_the_tenant_that_paid_if_it_still_has_a_quota() -> None:
    memory, quota = Memory(), (Quota("t"),)
    rig, _ = life(memory, quotas=quota)
    e = rig.engine()
    e.store("a", tenant="t")
    e.store("b")

    def taken(rig: Rig) -> tuple[bool, bool]:
        tenants = rig.machine.state.tenants.all
        theirs = tenants.get("t")
        return theirs is not None and theirs.taken_bytes > 0, tenants["default"].taken_bytes > 0

    assert taken(rig) == (True, True)
    rig, adoption = life(memory, 101.0, quotas=quota)
    assert (adoption.rows, taken(rig)) == (2, (True, True))
    rig, adoption = life(memory, 102.0)
    assert (adoption.rows, taken(rig)) == (2, (False, True))
    e = rig.engine()
    assert (e.holds("a"), e.holds("b")) == (1, 1)


def test_leases_of_former_lives_are_not_counted_as_lapsed() -> None:
    rig, _ = life(killed("a"), 101.0)
    before = rig.count("lapsed_leases")
    rig.wait(1000)
    rig.finish()
    assert rig.count("lapsed_leases") == before
    assert rig.status["pins"] == 0


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
