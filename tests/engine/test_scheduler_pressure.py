"""vLLM's real schedulers under pressure: whatever happens, some request goes on."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.vllm.hybrid import GroupShape
from tests.support.vllm.pressure import SHAPES, World


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_some_request_always_goes_on(
    shapes: list[GroupShape], asynchronous: bool, policy: str
) -> None:
    """In half of the worlds another connector loads, too; in half of them an EAGLE model drafts."""
    seen = Counter[str]()
    for seed in range(4):
        world = World(seed, asynchronous, policy, shapes, seed % 2, 2 * (seed // 2))
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        seen += world.seen
    assert min(seen[name] for name in ("loads", "aborts", "pending", "drafts")) > 5
    assert min(seen[name] for name in ("failed", "preempted")) > 0
