"""``CacheMachine``: one step at a time, and when the next one is due."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.effects import Faulted, Lost, Received
from tests.core.rig import Rig


def test_events_of_sessions_that_are_gone_do_nothing(rig: Rig) -> None:
    assert rig.step(Lost(5)) == []
    assert rig.step(Received(5, m.Ping(seq=1))) == []
    assert rig.step(Faulted(5, "bad_frame", "too long")) == []


def test_time_does_not_go_back(rig: Rig) -> None:
    rig.wait(5)
    rig.now -= 1
    with pytest.raises(AssertionError, match="time went back"):
        rig.open()
