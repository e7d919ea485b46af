"""The threads of a tier: bounded in number and in bytes, and never left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvass.errors import TierDown
from kvass.testing.tier_suite import eventually
from kvass.tiers.worker_pool import WorkerPool

OpenPool = Callable[..., WorkerPool]


@pytest.fixture
def open_pool() -> Iterator[OpenPool]:
    made: list[WorkerPool] = []

    def open_(size: int = 4, max_bytes: int = 100, slow_failure_s: float = 60) -> WorkerPool:
        made.append(
            WorkerPool(
                "pool", size, max_bytes=max_bytes, max_failures=3, slow_failure_s=slow_failure_s
            )
        )
        return made[-1]

    yield open_
    for pool in made:
        pool.close()


class Meter:
    """How much is going on, and the most there ever was."""

    def __init__(self) -> None:
        self.now = self.most = self.count = 0
        self._lock = threading.Lock()

    def add(self, n: int) -> None:
        with self._lock:
            self.now += n
            self.most = max(self.most, self.now)
            self.count += n > 0


def test_answers_come_in_the_order_asked(open_pool: OpenPool) -> None:
    def work(i: int) -> bool:
        threading.Event().wait(0.001 * (7 - i % 7))
        if i == 5:
            raise TierDown("five")
        return i % 2 == 0

    answers = open_pool().each(work, [1] * 20)
    assert [str(a) if isinstance(a, TierDown) else a for a in answers] == [
        "five" if i == 5 else i % 2 == 0 for i in range(20)
    ]
    assert open_pool().each(work, []) == []


def test_threads_and_bytes_are_bounded_over_all_calls(open_pool: OpenPool) -> None:
    pool = open_pool(size=8, max_bytes=100)
    threads, room = Meter(), Meter()
    needs = [30, 60, 0, 10, 100, 1] * 10

    def work(i: int) -> bool:
        threads.add(1)
        room.add(needs[i])
        threading.Event().wait(0.001)
        room.add(-needs[i])
        threads.add(-1)
        return True

    with ThreadPoolExecutor(6) as callers:
        calls = [callers.submit(pool.each, work, needs) for _ in range(6)]
        assert all(call.result(timeout=60) == [True] * len(needs) for call in calls)
    assert 2 <= threads.most <= 8
    assert 60 < room.most <= 100


def test_one_larger_than_the_room_goes_alone(open_pool: OpenPool) -> None:
    alone = Meter()

    def work(i: int) -> bool:
        alone.add(1)
        threading.Event().wait(0.001)
        alone.add(-1)
        return True

    assert open_pool(max_bytes=100).each(work, [1000, 1000, 1000]) == [True] * 3
    assert alone.most == 1


def test_a_batch_in_trouble_is_given_up(open_pool: OpenPool) -> None:
    begun = Meter()

    def work(i: int) -> bool:
        begun.add(1)
        raise TierDown("no")

    answers = open_pool(size=4).each(work, [0] * 500)
    assert len(answers) == 500
    assert all(isinstance(answer, TierDown) for answer in answers)
    assert 3 <= begun.count <= 3 + 4


def test_a_long_silence_is_enough(open_pool: OpenPool) -> None:
    begun = Meter()

    def work(i: int) -> bool:
        begun.add(1)
        threading.Event().wait(0.1)
        raise TierDown("silence")

    assert len(open_pool(size=1, slow_failure_s=0.05).each(work, [0] * 50)) == 50
    assert begun.count == 1


def test_trouble_now_and_then_ends_nothing(open_pool: OpenPool) -> None:
    def work(i: int) -> bool:
        if i % 3:
            raise TierDown("no")
        return True

    answers = open_pool(size=1).each(work, [0] * 60)
    assert [answer is True for answer in answers] == [i % 3 == 0 for i in range(60)]


def test_a_mistake_surfaces_when_all_have_ended(open_pool: OpenPool) -> None:
    """Whoever asked owns the memory again, and the room is free."""
    pool = open_pool(size=4, max_bytes=100)
    at_work, may_end = Meter(), threading.Event()

    def work(i: int) -> bool:
        if i == 0:
            eventually(lambda: at_work.most == 3, 60)
            raise ZeroDivisionError
        at_work.add(1)
        may_end.wait(60)
        at_work.add(-1)
        return True

    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(pool.each, work, [25] * 4)
        eventually(lambda: at_work.now == 3, 60)
        assert not call.done()
        may_end.set()
        with pytest.raises(ZeroDivisionError):
            call.result(timeout=60)
    assert at_work.now == 0
    assert pool.each(lambda i: True, [100]) == [True]
