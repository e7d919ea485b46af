"""The table of processes that may still write."""

from __future__ import annotations

import numpy as np
import pytest

from kvass.core.saved.processes import PLACES, PROCESS, FormerProcess, Processes, who

A, B = who("a", 0), who("b", 0)


def table() -> tuple[Processes, np.ndarray]:
    memory = np.zeros(PLACES, PROCESS)
    return Processes(memory), memory


def test_ranks_and_instances_have_names_of_their_own() -> None:
    assert len({who("a", 0), who("a", 1), who("b", 0), who("a/1", 0), who("1", 0)}) == 5


def test_the_next_life_knows_who_may_still_write() -> None:
    this, memory = table()
    assert this.note_worker(1, 10, 99, A)
    assert this.note_worker(2, 20, 98, B)
    this.forget_worker(1)
    following = Processes(memory)
    following.begin(pids_known=True)
    assert following.former() == (FormerProcess(1, 20, 98),)
    assert following.former_of({B: 20}) == [1]
    assert following.former_of({B: 21}) == []
    assert following.former_of({B: 0}) == [1]
    following.former_ended(1)
    assert Processes(memory).former() == ()


def test_a_worker_that_lives_on_writes_in_both_lives() -> None:
    this, memory = table()
    this.note_worker(1, 10, 99, A)
    following = Processes(memory)
    following.begin(pids_known=True)
    following.note_worker(5, 10, 99, A)
    following.former_ended(0)
    third = Processes(memory)
    third.begin(pids_known=True)
    assert third.former() == (FormerProcess(0, 10, 99),)
    third.note_worker(6, 10, 99, A)
    third.forget_worker(6)
    assert third.former() == (FormerProcess(0, 10, 99),)


def test_pids_of_another_namespace_mean_nothing() -> None:
    this, memory = table()
    this.note_worker(1, 10, 99, A)
    following = Processes(memory)
    following.begin(pids_known=False)
    assert following.former() == (FormerProcess(0, 0, 99),)


@pytest.mark.parametrize("part", ["start", "who", "pid"])
def test_of_a_damaged_place_the_pid_is_unknown(part: str) -> None:
    this, memory = table()
    this.note_worker(1, 10, 99, A)
    memory[part][0] = 0xFFFFFFFF
    following = Processes(memory)
    following.begin(pids_known=True)
    (found,) = following.former()
    assert found.pid == 0


def test_a_pid_that_was_forgotten_is_unknown_to_later_lives_too() -> None:
    this, memory = table()
    this.note_worker(1, 10, 99, A)
    for _ in range(2):
        following = Processes(memory)
        following.begin(pids_known=True)
        following.forget_pid(0)
        assert following.former() == (FormerProcess(0, 0, 99),)
        assert following.former_of({A: 10}) == [0]


def test_a_full_table_takes_nobody() -> None:
    this, _ = table()
    assert all(this.note_worker(i, i, 0, A) for i in range(1, PLACES + 1))
    assert not this.note_worker(PLACES + 1, 7, 7, B)
    assert this.note_worker(PLACES, 1, 0, A), "it is noted already"
