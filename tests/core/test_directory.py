"""The directory's log: whole at any instant, and damage is seen."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvass.core.saved.directory import LEAST_FREE, Directory, SavedNamespace, SavedSet
from kvass.messages import Register

HALF = 1 << 20


def a_set(number: int, shards: int = 1) -> SavedSet:
    return SavedSet(number, 1, 4, 4 * number, tuple(range(shards)), (4096,) * shards)


class Log:
    def __init__(self) -> None:
        self.memory, self.words = np.zeros(2 * HALF, np.uint8), np.zeros(3, np.uint64)
        self.room = True
        self.directory = self.again()
        assert self.directory.replace([])

    def again(self) -> Directory:
        """The directory of the next life."""
        return Directory(self.memory, self.words, lambda *_: self.room)

    def sets(self) -> list[int] | None:
        found = self.again().read()
        return None if found is None else sorted(each.id for each in found)


def test_what_holds_is_read_again() -> None:
    log = Log()
    for number in range(5):
        assert log.directory.put(a_set(number))
    log.directory.remove("set", np.array([1, 3, 77]))
    log.directory.remove("class", np.array([0]))
    assert log.sets() == [0, 2, 4]
    following = log.again()
    assert following.read() is not None
    following.remove("set", np.array([0]))
    assert log.sets() == [2, 4]
    assert following.replace([a_set(9)])
    assert log.sets() == [9]


def test_it_changes_halves_and_loses_nothing() -> None:
    log, there, rng = Log(), set[int](), random.Random(3)
    for _ in range(20_000):
        number = rng.randrange(200)
        if rng.random() < 0.5:
            assert log.directory.put(a_set(number, shards=60))
            there.add(number)
        else:
            log.directory.remove("set", np.array([number]))
            there.discard(number)
    assert log.words[0] > 2, "it never changed halves"
    assert log.sets() == sorted(there)


def test_a_record_counts_only_when_it_is_whole() -> None:
    log = Log()
    log.directory.put(a_set(1))
    words, before = log.words.copy(), log.memory.copy()
    log.directory.put(a_set(2))
    written = np.flatnonzero(before != log.memory)
    for keep in range(0, len(written), 5):
        log.words[:] = words
        log.memory[written[keep:]] = before[written[keep:]]
        assert log.sets() == [1]


@pytest.mark.parametrize("at", [0, 3, 8, 17, 40])
def test_damage_is_seen(at: int) -> None:
    log = Log()
    log.directory.put(a_set(1))
    log.directory.put(a_set(2))
    log.memory[int(log.words[0] & 1) * HALF + at] ^= 1
    assert log.sets() is None
    log.words[1:] = HALF + 1
    assert log.sets() is None


def test_where_there_is_no_room_nothing_changes_and_removals_still_fit() -> None:
    log, number = Log(), 0
    while log.directory.put(a_set(number, shards=100)):
        number += 1
    assert number * 400 < HALF - LEAST_FREE
    there = log.sets()
    assert there is not None
    assert len(there) == number
    assert not log.directory.replace([a_set(i, shards=100) for i in range(2 * number)])
    assert log.sets() == there
    for each in range(number):
        log.directory.remove("set", np.array([each]))
    assert log.sets() == []


def test_without_memory_nothing_is_added() -> None:
    log = Log()
    log.room = False
    added = 0
    while log.directory.put(a_set(added, shards=100)):
        added += 1
        assert added < 10_000
    there = log.sets()
    assert there is not None
    assert len(there) == added


def test_a_large_identity_is_left_out() -> None:
    log = Log()
    terms = Register(instance="e", identity={"a": "x" * 40_000}, chunk_tokens=16)
    assert log.directory.put(SavedNamespace(1, b"d", 16, terms, "m", False))
    (found,) = log.again().read() or []
    assert isinstance(found, SavedNamespace)
    assert found.terms.identity == {}
    assert found.terms.chunk_tokens == 16
