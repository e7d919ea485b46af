"""Which rows that left L1 are asked for and announced: bounds, and answers that do not come."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.engine import tier_rows
from kvass.engine.tier_rows import ROWS_PER_QUESTION, TierRows
from kvass.engine.traffic import EngineTraffic
from kvass.errors import Unavailable
from kvass.messages import PRESENT, Error, Presence, Present

WIDTH = 8
AGAIN_S = 10.0


class Daemon:
    """A client whose daemon's tiers have the rows in ``held``, of every group."""

    def __init__(self) -> None:
        self.connection: Any = self.fresh()
        self.held: set[bytes] = set()
        self.asked: list[Present] = []
        self.reply: Any = None
        """What it answers instead, or raises."""

    def fresh(self, *features: str) -> Any:
        return SimpleNamespace(welcome=SimpleNamespace(features=features or (PRESENT,)))

    def submit(self, message: Present) -> int:
        self.asked.append(message)
        return len(self.asked)

    def wait(self, seq: int, timeout_s: float) -> Any:
        assert (seq, timeout_s) == (len(self.asked), 0.0)
        if isinstance(self.reply, Exception):
            raise self.reply
        blob = self.asked[-1].digests
        rows = [blob[i : i + WIDTH] for i in range(0, len(blob), WIDTH)]
        return self.reply or Presence(held=bytes(row in self.held for row in rows))


class Maker:
    """Events are tuples."""

    def stored_in_tier(self, kept: Any) -> Any:
        return "stored", kept

    def removed(self, group: int, rows: list[Any], tier: bool) -> Any:
        assert tier
        return ("removed", *rows)


class Rig:
    """Rows of numbers, and time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.daemon = 1000.0, Daemon()
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        client: Any = self.daemon
        self.rows = TierRows(client, Maker(), EngineTraffic(), AGAIN_S)
        self.polls(2)

    def left(self, numbers: Iterable[int], group: int = 0) -> None:
        self.rows.left(((group, digest(number)), number) for number in numbers)

    def polls(self, times: int, step_s: float = tier_rows.NEW_DAEMON_S) -> list[Any]:
        """The events of so many polls."""
        events = []
        for _ in range(times):
            events += self.rows.poll(WIDTH)
            self.now_s += step_s
        return events


def digest(number: int) -> bytes:
    return number.to_bytes(WIDTH, "big")


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_what_a_tier_has_is_announced_until_it_has_it_no_more(rig: Rig) -> None:
    rig.daemon.held = {digest(1), digest(2)}
    rig.left([1, 2, 3])
    assert rig.polls(3) == [("stored", 1), ("stored", 2)]
    rig.daemon.held.discard(digest(1))
    assert rig.polls(1, step_s=AGAIN_S) == []
    assert rig.polls(3) == [("removed", 1)]
    rig.left([2])  # it was in L1 meanwhile
    assert rig.polls(3) == []
    assert len(rig.daemon.asked) == 3


def test_doubt_asks_for_all_at_once(rig: Rig) -> None:
    rig.daemon.held = {digest(1)}
    rig.left([1])
    assert rig.polls(2, 0.1) == [("stored", 1)]
    assert rig.polls(3, 0.1) == []
    rig.daemon.held.clear()
    rig.rows.doubt()
    assert rig.polls(3, 0.1) == [("removed", 1)]


def test_questions_are_small_rare_and_of_one_group(rig: Rig) -> None:
    rig.left(range(2 * ROWS_PER_QUESTION))
    rig.left([5], group=1)
    assert len(rig.daemon.asked) == 0
    rig.polls(20, tier_rows.PAUSE_S / 4)
    sizes = [(one.groups, len(one.digests) // WIDTH) for one in rig.daemon.asked]
    assert sizes == [(1, ROWS_PER_QUESTION), (1, ROWS_PER_QUESTION), (2, 1)]


def test_a_bounded_number_waits_and_is_announced(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_rows, "MOST", 4)
    rig.daemon.held = {digest(number) for number in range(20)}
    rig.left(range(10))
    assert rig.polls(3) == [("stored", number) for number in range(6, 10)]
    rig.left([1, 2])
    assert rig.polls(3) == [("stored", 1), ("stored", 2), ("removed", 6, 7)]


def test_who_has_just_come_is_asked_after_a_while(rig: Rig) -> None:
    """Its tiers may not be there yet."""
    rig.daemon.held = {digest(1)}
    rig.daemon.connection = rig.daemon.fresh()
    rig.left([1])
    assert rig.polls(10, tier_rows.NEW_DAEMON_S / 10) == []
    assert not rig.daemon.asked
    assert rig.polls(3) == [("stored", 1)]


@pytest.mark.parametrize("reply", [Unavailable("lost"), Error(code="limit", text="later")])
def test_without_an_answer_it_is_asked_again(rig: Rig, reply: Any) -> None:
    rig.daemon.held, rig.daemon.reply = {digest(1)}, reply
    rig.left([1])
    assert rig.polls(2) == []
    rig.daemon.reply = None
    assert rig.polls(3) == [("stored", 1)]


def test_what_was_forgotten_is_not_announced(rig: Rig) -> None:
    """The engine said that all is gone while a question was open."""
    rig.daemon.held = {digest(1)}
    rig.left([1])
    rig.polls(1)
    rig.rows.forget()
    assert rig.polls(3) == []


def test_an_older_daemon_is_not_asked(rig: Rig) -> None:
    rig.daemon.connection = rig.daemon.fresh("explain")
    rig.left([1])
    assert rig.polls(3) == []
    assert not rig.daemon.asked


def test_without_a_daemon_all_are_withdrawn_in_parts(rig: Rig) -> None:
    rig.daemon.held = {digest(number) for number in range(3)}
    rig.left(range(3))
    assert len(rig.polls(2)) == 3
    assert rig.rows.withdraw(2) == [("removed", 0, 1)]
    assert rig.rows.withdraw(2) == [("removed", 2)]
    assert rig.rows.withdraw(2) == []
