"""The ledger of open entries: by number, by instance, and by when they are due."""

from __future__ import annotations

import math

import pytest

from kvass.core.pending.ledger import Entry, Ledger, Reservation, soonest


def entry(number: int, deadline: float = 1.0, instance: str = "e", size_bytes: int = 0) -> Entry:
    return Entry(
        id=number, instance=instance, request="r", deadline=deadline, size_bytes=size_bytes
    )


def ledger(*entries: Entry) -> Ledger[Entry]:
    new = Ledger[Entry]()
    for each in entries:
        new.add(each)
    return new


def numbers(entries: list[Entry]) -> list[int]:
    return [each.id for each in entries]


def test_bytes_are_counted_by_instance_and_given_back() -> None:
    mine, more, other = entry(1, size_bytes=5), entry(2, size_bytes=7), entry(3, instance="o")
    entries = ledger(mine, more, other)
    assert entries.bytes_of == {"e": 12, "o": 0}
    assert [*entries.of("e")] == [1, 2]
    entries.drop(mine)
    assert entries.bytes_of["e"] == 7
    entries.drop(more)
    assert "e" not in entries.bytes_of, "an instance without entries takes no memory"
    assert entries.of("e") == {}


def test_an_entry_cannot_end_twice() -> None:
    one = entry(1)
    entries = ledger(one)
    entries.drop(one)
    with pytest.raises(KeyError):
        entries.drop(one)


def test_entries_are_due_in_the_order_of_their_deadlines() -> None:
    entries = ledger(entry(1, 3.0), entry(2, 1.0), entry(3, 2.0))
    assert entries.next_due == 1.0
    assert entries.due(0.9, 10) == []
    assert numbers(entries.due(2.0, 10)) == [2, 3]
    assert entries.next_due == 3.0


def test_no_more_entries_are_due_at_a_time_than_may_be() -> None:
    entries = ledger(*(entry(n) for n in range(5)))
    assert numbers(entries.due(1.0, 2)) == [0, 1]
    assert numbers(entries.due(1.0, 9)) == [2, 3, 4]


def test_an_entry_that_ended_is_never_due() -> None:
    early, late = entry(1, 1.0), entry(2, 2.0)
    entries = ledger(early, late)
    entries.drop(early)
    assert entries.next_due == 2.0
    assert numbers(entries.due(5.0, 10)) == [2]
    assert entries.next_due is None


def test_an_entry_can_be_due_a_second_time() -> None:
    one = entry(1)
    entries = ledger(one)
    assert numbers(entries.due(1.0, 10)) == [1]
    entries.wake_at(4.0, one)
    assert entries.next_due == 4.0
    assert numbers(entries.due(4.0, 10)) == [1]


def test_entries_that_ended_early_leave_nothing_behind() -> None:
    entries, kept = ledger(), entry(0, 1e9)
    entries.add(kept)
    for number in range(1, 5_000):
        short = entry(number, 1e6)
        entries.add(short)
        entries.drop(short)
    entries.wake_at(5.0, kept)
    entries.wake_at(5.0, kept)
    assert len(entries._due) == 2
    assert len(entries._times) == 1
    assert numbers(entries.due(5.0, 10)) == [0]
    assert numbers(entries.due(2e9, 10)) == [0]


def test_the_oldest_entry_is_the_first_that_was_added() -> None:
    first, second = entry(7, 9.0), entry(3, 1.0)
    entries = ledger(first, second)
    assert entries.oldest is first
    entries.drop(first)
    assert entries.oldest is second
    entries.drop(second)
    assert entries.oldest is None


@pytest.mark.parametrize(
    ("owing", "until", "settled"),
    [
        (set(), {}, True),
        ({0}, {}, False),
        (set(), {5: 10.0}, True),
        (set(), {5: 10.0, 6: 10.1}, False),
        (set(), {5: math.inf}, False),
    ],
)
def test_a_reservation_is_settled_when_nobody_can_write_any_more(
    owing: set[int], until: dict[int, float], settled: bool
) -> None:
    reservation = Reservation(
        id=1,
        instance="e",
        request="r",
        deadline=1.0,
        parts=(),
        owing=owing,
        writing_until=until,
    )
    assert reservation.settled(10.0) is settled


@pytest.mark.parametrize(
    ("one", "other", "earlier"),
    [(None, None, None), (1.0, None, 1.0), (None, 2.0, 2.0), (1.0, 2.0, 1.0), (3.0, 2.0, 2.0)],
)
def test_never_is_later_than_any_time(
    one: float | None, other: float | None, earlier: float | None
) -> None:
    assert soonest(one, other) == earlier
