"""Workers of former lives, and slots that rest for them (laws 3 and 13)."""

from __future__ import annotations

from kvass import messages as m
from kvass.core.effects import FormerEnded
from kvass.core.machine import CacheMachine
from kvass.types import DEVICE_S
from tests.core.lives import Memory
from tests.core.rig import BOOT, GRACE_S, Rig


def killed_while_writing(pid: int = 10) -> tuple[Memory, Rig]:
    """A daemon that died while a worker of ``pid`` was writing a row; and the next one."""
    memory = Memory()
    before = Rig(index=memory.create())
    before.engine(pid=pid).begin("a")
    return memory, following(memory, 101.0)


def following(memory: Memory, now: float) -> Rig:
    rig = Rig(now=now, core={"started_s": now}, index=memory.adopt())
    rig.machine.validate()
    return rig


def resting(machine: CacheMachine) -> int:
    return len(machine.state.reservations.of(""))


def test_slots_rest_until_the_former_worker_has_ended() -> None:
    _, rig = killed_while_writing()
    adoption = rig.machine.adoption
    assert adoption is not None
    assert (adoption.rows, adoption.resting) == (0, 1)
    (worker,) = adoption.former
    assert (worker.pid, worker.start) == (10, 10)
    rig.wait(10_000)
    assert resting(rig.machine) == 1
    rig.step(FormerEnded(worker.number))
    assert resting(rig.machine) == 1, "its device may write a little longer"
    rig.wait(DEVICE_S)
    assert resting(rig.machine) == 0
    assert rig.machine.state.index is not None
    assert not rig.machine.state.index.processes.former()


def test_slots_rest_until_the_worker_says_that_it_is_done() -> None:
    _, rig = killed_while_writing()
    other = rig.engine("other", pid=30)
    mine = rig.engine("e", pid=10)
    rig.wait(DEVICE_S)
    assert rig.say(other.workers[0], m.Drained(boot=BOOT)) == []
    assert resting(rig.machine) == 1, "another worker speaks for itself"
    assert rig.say(mine.workers[0], m.Drained(boot=BOOT)) == []
    assert resting(rig.machine) == 0
    assert rig.say(mine.workers[0], m.Drained(boot=BOOT)) == []
    assert rig.code(mine.scheduler, m.Drained(boot=BOOT)) == "bad_rank"
    rig.wait(0)


def test_a_worker_that_nobody_sees_has_the_dma_grace() -> None:
    _, rig = killed_while_writing(pid=0)
    rig.wait(GRACE_S - 0.01)
    assert resting(rig.machine) == 1
    rig.wait(0.02)
    assert resting(rig.machine) == 0
    assert rig.machine.state.index is not None
    assert not rig.machine.state.index.processes.former()


def test_slots_rest_through_more_than_one_life() -> None:
    memory, rig = killed_while_writing()
    rig.engine(pid=10)
    third = following(memory, 300.0)
    third.wait(1000)
    assert resting(third.machine) == 1
    adoption = third.machine.adoption
    assert adoption is not None
    (worker,) = adoption.former
    third.step(FormerEnded(worker.number))
    third.wait(DEVICE_S)
    assert resting(third.machine) == 0


def test_an_engine_that_is_never_done_has_no_more_than_its_share_of_l1_rest() -> None:
    """However often the daemon is killed (law 12)."""
    memory = Memory()
    rig = Rig(index=memory.create())
    share, rested = rig.machine.state.quota, 0
    for life in range(6):
        e = rig.engine(pid=10)
        other = rig.engine("other", pid=30)
        assert rig.say(other.workers[0], m.Drained(boot=BOOT)) == []
        e.begin(*(f"{life} {i}" for i in range(10)))
        assert other.store(f"its {life}").chunks, "it has said that it is done"
        rig = following(memory, 101.0 + life)
        rested = rig.status["l1_resting_bytes"]
        assert 0 < rested <= share
    assert rested == share
    e = rig.engine(pid=10)
    assert e.reserve("x").refused == (0,)
    assert rig.say(e.workers[0], m.Drained(boot=BOOT)) == []
    other = rig.engine("other", pid=30)
    assert rig.say(other.workers[0], m.Drained(boot=BOOT)) == []
    rig.wait(DEVICE_S)
    assert rig.status["l1_resting_bytes"] == 0
    assert e.store("x").chunks == (0,)


def test_a_worker_that_left_is_no_former_worker() -> None:
    memory = Memory()
    rig = Rig(index=memory.create())
    e = rig.engine(pid=10)
    grant = e.begin("a")
    rig.lose(*e.workers)
    rig.wait(0)
    assert len(memory.adopt().processes.former()) == 1, "its device may still write"
    memory = Memory()
    rig = Rig(index=memory.create())
    e = rig.engine(pid=10)
    grant = e.begin("a")
    rig.lose(*e.workers)
    rig.wait(GRACE_S)
    assert grant.reservation
    rig.wait(0)
    assert not memory.adopt().processes.former()


def test_without_an_index_nothing_is_noted() -> None:
    rig = Rig()
    e = rig.engine(pid=10)
    assert rig.say(e.workers[0], m.Drained(boot=BOOT)) == []
    rig.lose(*e.workers)
    assert not rig.machine.state.lost_workers
    assert rig.machine.adoption is None
