"""Fetches of sessions: what they cost while they wait. The stories are in ``scripts``."""

from __future__ import annotations

from typing import Any

import pytest

from kvass.core.handlers import session_fetching
from kvass.core.matching.prefix import PrefixView
from tests.core.tier_rig import TierRig


def test_who_waits_for_room_looks_its_prompt_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks again when there is the room that it needs: a long prompt takes milliseconds."""
    looks = list[int]()

    def view(rows: Any, ns: Any, keys: Any, first: int) -> PrefixView:
        looks.append(len(keys))
        return PrefixView(rows, ns, keys, first)

    monkeypatch.setattr(session_fetching, "PrefixView", view)
    rig = TierRig(pages=64)
    e = rig.ready()
    for tag, chunks in ((7, 9), (8, 10)):
        names = [f"{tag}.{i}" for i in range(chunks)]
        rig.only_in_tiers(e, *names, session=tag, then_s=10.0)
    rig.wait(1.0)
    rig.finish()
    rig.wait(8.1)
    for _ in range(20):
        rig.finish()
        rig.wait(0.01)
    assert looks == [9, 9, 10], "each once; the first one for what it loads, too"
    rig.answer_all()
    rig.wait(0.01)
    rig.answer_all()
    assert looks == [9, 9, 10, 10, 10]
    assert rig.status["rows"] == 19
