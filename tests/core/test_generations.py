"""Weights replaced in place: an engine that says a new generation shares rows with nobody."""

from __future__ import annotations

from typing import Any

from kvass import messages as m
from kvass.core.effects import Received
from tests.core.rig import Rig
from tests.core.tier_rig import TierRig

NEW = b"a new generation"


def test_without_a_generation_the_namespace_is_what_it_always_was(rig: Rig) -> None:
    known = "dcc174f9ed6dbb8f0dccb4963d5f6259cf99d799272985994e2c918614b3e0eb"
    assert rig.engine("e").namespace.hex() == known


def test_many_generations_leave_nothing_behind() -> None:
    rig = TierRig()
    a = rig.ready("a")
    a.store("base")
    rig.answer_all()
    state = rig.machine.state
    terms: dict[str, Any] = {"instance": "a", "identity": {"model": "m"}, "chunk_tokens": 16}
    for i in range(1000):
        if i % 100 == 1:
            a.store("x")
        move = m.Register(seq=2, generation=b"%d" % i, **terms)
        rig.machine.step(Received(a.scheduler, move), rig.now)  # validated below, once
    rig.machine.validate()
    assert len(state.namespaces) <= 3
    assert len(state.namespaces.by_digest) == len(state.namespaces) == len(state.classes.by_id)
    assert (len(state.tiers.ops), state.tiers.owed, rig.status["rows"]) == (0, set(), 1)
