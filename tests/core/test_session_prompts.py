"""The prompts of sessions, with any history: what is counted is there, and it is bounded."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvass.core.clients import session_prompts
from kvass.core.clients.session_prompts import ENTRY_BYTES, SessionPrompts


def test_any_history_is_counted_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_prompts, "MOST_BYTES", 12 * ENTRY_BYTES)
    monkeypatch.setattr(session_prompts, "PROMPT_BYTES", 512)
    monkeypatch.setattr(session_prompts, "_STALE", 8)
    random, prompts, taken = Random(1), SessionPrompts(), 0
    for now in range(2000):
        tag, payer, namespace = random.randrange(1, 30), random.randrange(3), random.randrange(2)
        keys = np.arange(4 * random.randint(1, 40), dtype=np.uint64).reshape(-1, 4)
        due = random.choice([None, now + random.randrange(50)])
        prompts.remember(tag, namespace, payer, "", keys + random.randrange(2), due)
        if random.random() < 0.02:
            prompts.clear({namespace})
        while (prompt := prompts.take_due(now)) is not None:
            assert prompt.due is None
            taken += 1
        every = [p for payer in range(3) for tag in range(30) for p in prompts.of(tag, payer)]
        assert len(every) == len(prompts) <= 12
        assert prompts.bytes == sum(p.size_bytes for p in every) <= session_prompts.MOST_BYTES
        assert all(p.keys.nbytes <= 512 and p.keys.base is None for p in every)
        assert prompts.next_due == min((p.due for p in every if p.due is not None), default=None)
        assert len(prompts._due) <= 4 * 12 + 8 + 1
    assert taken > 100
