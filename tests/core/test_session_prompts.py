"""The prompts of sessions, with any history: what is counted is there, and it is bounded."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvass.core.clients import session_prompts
from kvass.core.clients.session_prompts import ENTRY_BYTES, SessionPrompts
from tests.core.test_release_cost import bytecodes


@pytest.mark.parametrize("payers", [3, 12])
def test_any_history_is_counted_and_bounded(payers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twelve payers one may have most with its only prompt."""
    monkeypatch.setattr(session_prompts, "MOST_BYTES", 12 * ENTRY_BYTES)
    monkeypatch.setattr(session_prompts, "PROMPT_BYTES", 512)
    random, prompts, taken = Random(1), SessionPrompts(), 0
    for now in range(2000):
        tag, payer = random.randrange(1, 30), random.randrange(payers)
        namespace = random.randrange(2)
        keys = np.arange(4 * random.randint(1, 40), dtype=np.uint64).reshape(-1, 4)
        due = random.choice([None, now + random.randrange(50)])
        prompt = prompts.remember(tag, namespace, payer, "", keys + random.randrange(2))
        prompt.fetch_s = now + random.randrange(50)
        prompts.wake_at(prompt, due)
        while (taken_one := prompts.take_due(now)) is not None:
            assert taken_one.due is None
            taken += 1
        every = [p for payer in range(payers) for tag in range(30) for p in prompts.of(tag, payer)]
        assert len(every) == len(prompts) <= 12
        assert prompts.bytes == sum(p.size_bytes for p in every) <= session_prompts.MOST_BYTES
        assert all(p.keys.nbytes <= 512 and p.keys.base is None for p in every)
        assert prompts.next_due == min((p.due for p in every if p.due is not None), default=None)
        agendas = [prompts._let_go, *prompts._fetch.values()]
        assert sum(map(len, agendas)) == sum(p.due is not None for p in every)
    assert taken > 100


def test_what_is_to_be_fetched_rests_and_what_is_to_be_let_go_does_not() -> None:
    prompts, keys = SessionPrompts(), np.zeros((1, 4), np.uint64)
    for tag, fetch_s in ((1, 4.0), (2, 3.0), (3, 20.0)):
        prompt = prompts.remember(tag, 0, 0, "", keys)
        prompt.fetch_s = fetch_s
        prompts.wake_at(prompt, min(fetch_s, 5.0))
    prompts.rests_until = 6.0
    assert prompts.next_due == 5.0
    order = [prompts.take_due(now) for now in (4.0, 5.0, 5.9, 6.0, 6.0)]
    assert [prompt and prompt.tag for prompt in order] == [None, 3, None, 2, 1]


def test_many_that_are_not_due_any_more_cost_the_next_call_nothing() -> None:
    keys, costs = np.zeros((1, 4), np.uint64), list[int]()
    for many in (1, 3_000):
        prompts = SessionPrompts()
        for tag in [*range(many), many]:
            prompts.wake_at(prompts.remember(tag, 0, 0, "", keys), 1.0 + (tag == many))
        for tag in range(many):
            prompts.remember(tag, 0, 0, "", keys)
        with bytecodes() as count:
            assert prompts.next_due == 2.0
            assert prompts.take_due(2.0) is not None
        costs.append(count[0])
    assert costs[0] == costs[1]
