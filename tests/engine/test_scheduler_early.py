"""What waits in the queue of vLLM's real scheduler is promoted before vLLM asks for it."""

from __future__ import annotations

from typing import Any

import pytest

from kvass.engine.early_lookups import AT_ONCE
from kvass.types import session_tag
from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.scheduler import CHUNK, SchedulerHarness, make_configs, rig

STEP = 64
"""Tokens of a step: the first request takes all of them for a while."""


def queued(
    count: int, *, tokens: int = 100, **options: Any
) -> tuple[FakeClient, SchedulerHarness, Any]:
    """An engine that computes one long prompt, and so many requests that came behind it. vLLM has
    asked for the long one alone. The last is the open step."""
    client, world = rig(batched=STEP, **options)
    client.promotes_ahead = True
    world.add("long", range(2000, 2900), max_tokens=1)
    for number in range(count):
        world.add(f"r{number}", range(number, number + tokens))
    output, _ = world.schedule()
    assert client.lookups == [("long", 0)]
    return client, world, output


def sent(client: FakeClient) -> list[str]:
    return [name for name, _, _ in client.prefetches]


def asked(client: FakeClient) -> list[str]:
    """The requests that were looked up, in the order of their first lookup."""
    return [*dict.fromkeys(name for name, _ in client.lookups)]


def test_an_engine_without_a_queue_asks_for_nothing_early() -> None:
    client, world = rig()
    client.promotes_ahead = True
    for number in range(5):
        world.add(f"r{number}", range(number, number + 100))
        world.step()
    world.run(client)
    assert len(client.lookups) == 5
    assert client.prefetches == []


@pytest.mark.parametrize("case", ["no tiers", "the option", "shadow"])
def test_nothing_is_sent_in_vain(case: str) -> None:
    """Without tiers, or a daemon, nothing is sent, whatever waits."""
    options: dict[str, dict[str, object]] = {
        "the option": {"kvass.early_lookups": 0},
        "shadow": {"kvass.shadow": True},
    }
    client, world = rig(batched=STEP, options=options.get(case))
    client.promotes_ahead = case != "no tiers"
    for number in range(5):
        world.add(f"r{number}", range(number, number + 300))
    for _ in range(3):
        world.step()
    assert client.prefetches == []


def test_some_at_a_time_are_promoted_from_the_head_of_the_queue_on() -> None:
    client, world, output = queued(12)
    names = [f"r{number}" for number in range(12)]
    assert sent(client) == names[:AT_ONCE]
    world.finish(output)
    world.step()
    assert sent(client) == names[:AT_ONCE], "none of them has been promoted"
    client.promoted |= {"r1", "r2"}
    world.step()
    assert sent(client) == names[: AT_ONCE + 2]
    client.promoted |= {*names}
    for _ in range(4):
        world.step()
    assert sent(client) == names[:8], "so many are promoted, and have not been asked for"
    while len(asked(client)) < 3:
        world.step()
    assert sent(client) == names[: 8 + len(asked(client)) - 1]
    world.run(client)
    assert sent(client) == names
    assert client.left == client.ended_early == []


def test_what_is_asked_early_is_what_is_looked_up() -> None:
    """Also the salt, and how much may be loaded. What may not be read is not promoted."""
    client, world = rig(batched=STEP, options={"kvass.early_lookups": 20})
    client.promotes_ahead = True
    world.add("long", range(2000, 2900), max_tokens=1)
    world.add("plain", range(100), params={"kvass.session": "s"})
    world.add("salted", range(100), salt="pepper")
    world.add("some", range(4000, 4100), params={"kvass.max_load_tokens": 40})
    world.add("none", range(100), params={"kvass.max_load_tokens": 0})
    world.add("unread", range(100), reads=False)
    world.add("short", range(CHUNK - 1))
    world.step()
    early = {name: (hashes, first) for name, hashes, first in client.prefetches}
    assert client.contexts["plain"].session == session_tag("s")
    assert {name: (len(hashes), first) for name, (hashes, first) in early.items()} == {
        "plain": (3, 0),
        "salted": (3, 0),
        "some": (1, 0),
    }
    world.run(client)
    assert early == {name: (client.hashes[name], 0) for name in early}
    assert early["plain"] != early["salted"]


def test_what_the_engine_has_itself_is_not_promoted() -> None:
    client, world = rig(batched=STEP, options={"kvass.early_lookups": 20})
    world.add("writer", range(100), max_tokens=1)
    world.run(client)
    client.promotes_ahead = True
    world.add("long", range(2000, 2600), max_tokens=1)
    world.add("all", range(100))
    world.add("part", [*range(64), *range(3000, 3064)])
    world.add("other", range(500, 600))
    world.step()
    assert [(name, first) for name, _, first in client.prefetches] == [("part", 2), ("other", 0)]


def test_by_priority_the_first_of_the_queue_are_others() -> None:
    config, caches = make_configs(batched=STEP, options={"kvass.early_lookups": 2})
    config.scheduler_config.policy = "priority"
    client = FakeClient()
    world = SchedulerHarness(client, configs=(config, caches))
    client.promotes_ahead = True
    world.add("long", range(2000, 2900), max_tokens=1, priority=-1)
    for number in range(4):
        world.add(f"r{number}", range(number, number + 100), priority=4 - number)
    world.step()
    assert sent(client) == ["r3", "r2"]


def test_who_is_asked_for_or_gone_needs_no_promotion() -> None:
    client, world, output = queued(2)
    world.finish(output)
    world.abort("r0")
    assert client.ended_early == ["r0"]
    world.run(client)
    assert asked(client) == ["long", "r1"]
    assert client.left == ["r1"]
    assert not world.planner._early._waiting
    assert not world.planner._early._begun


def test_after_a_wrong_copy_nothing_is_promoted() -> None:
    client, world, output = queued(6)
    world.finish(output, wrong=["a row"])
    client.promoted |= {"r0", "r1"}
    world.step()
    assert sent(client) == [f"r{number}" for number in range(AT_ONCE)]
