"""vLLM's real schedulers under pressure: whatever happens, some request goes on."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.vllm.hybrid import GroupShape, make_hybrid_configs
from tests.support.vllm.pressure import IDLE, SHAPES, GroupClient, World
from tests.support.vllm.scheduler import CHUNK, SchedulerHarness


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


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("shapes", [SHAPES["window"], SHAPES["windows"]], ids=["window", "windows"])
def test_two_loads_that_fail_together_are_both_computed(
    shapes: list[GroupShape], asynchronous: bool
) -> None:
    """Computing needs more blocks of a window than loading, and vLLM has not reserved them. So the
    first has no room while the second holds blocks, and vLLM does not come to the second."""
    client, each = GroupClient(tails=False), 25 * len(shapes)
    configs = make_hybrid_configs({"kvass.chunk_tokens": CHUNK}, shapes, blocks=each + 15)
    world = SchedulerHarness(client, asynchronous=asynchronous, configs=configs)
    client.serve(world.planner._setup)
    prompts = {"a": range(400), "b": range(1000, 1400)}
    for name, tokens in prompts.items():
        world.add(f"writer of {name}", tokens, max_tokens=1)
        world.run(client)
    assert world.scheduler.reset_prefix_cache()
    for name, tokens in prompts.items():
        world.add(name, tokens)
    output, work = world.schedule()
    assert [load.request for load in work.loads] == [*prompts]
    world.finish(output, failed=[*prompts])
    assert world.free_blocks < each
    for _ in range(IDLE):
        world.step()
    assert not world.scheduler.has_unfinished_requests()
