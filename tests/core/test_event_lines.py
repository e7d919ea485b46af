"""Events as lines of text, and back."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvass import messages as m
from kvass.core.effects import Faulted, Lost, Received, Stored, TierReport
from kvass.core.event_lines import line, parse
from tests.core.rig import WIDTH, digests
from tests.core.spelling import tokens


def test_an_event_comes_back_from_its_line() -> None:
    lookup = m.Lookup(seq=3, request="r\n", digests=digests("a"), width=WIDTH)
    for event in (Received(1, lookup), Faulted(1, "bad_frame", "\n"), TierReport(0, {"up": True})):
        text = line(1.5, event)
        assert text.isprintable()
        assert parse(text) == (1.5, event)
    assert json.loads(line(1.5, Lost(1)))[2] == {"session": 1, "exiting": False}
    _, stored = parse(line(0.0, Stored(1, np.array([True, False]))))
    assert isinstance(stored, Stored)
    assert stored.which.tolist() == [True, False]


def test_the_line_of_a_huge_event_is_cut() -> None:
    event = Received(1, m.Lookup(seq=3, request="r", digests=bytes(1 << 20)))
    assert parse(line(0.0, event)) == (0.0, event)
    cut = line(0.0, event, max_chars=60_000)
    assert len(cut) < 70_000
    with pytest.raises(ValueError, match="line 1 column"):
        parse(cut)


def test_a_line_shows_no_tokens() -> None:
    event = Received(1, m.FindSegments(seq=1, space=b"s", tokens=tokens("a")))
    hidden = Received(1, m.FindSegments(seq=1, space=b"s", tokens=bytes(64)))
    assert parse(line(5.0, event)) == (5.0, hidden)
    assert parse(line(5.0, event, max_chars=None)) == (5.0, event)
