"""What an observer is told of requests, with vLLM's real scheduler."""

from __future__ import annotations

from typing import Any

from kvass.engine.observers import Observer
from tests.support.vllm.scheduler import SchedulerHarness, rig

HOOKS = [name for name in vars(Observer) if not name.startswith("_")]


def watched(world: SchedulerHarness) -> list[tuple[str, str]]:
    """The hooks that are called from now on, and of which request; without ``stepped``."""
    told: list[tuple[str, str]] = []

    class Watcher(Observer):
        pass

    def noting(hook: str) -> Any:
        def note(_: Observer, first: Any, *rest: Any) -> None:
            of = getattr(first, "state", first) if hook == "stored" else first
            told.append((hook, of if isinstance(of, str) else of.request.name))

        return note

    for hook in HOOKS:
        if hook != "stepped":
            setattr(Watcher, hook, noting(hook))
    planner = world.connector._planner
    planner._observers = planner.stores._observers = (*planner._observers, Watcher())
    return told


def test_the_hooks_of_a_request_come_in_their_order() -> None:
    client, world = rig()
    told = watched(world)
    world.add("a", range(100), max_tokens=2)
    world.run(client)
    assert told == [(hook, "a") for hook in ("asked", "answered", "allocated", "stored", "ended")]
    assert world.scheduler.reset_prefix_cache()
    told.clear()
    world.add("b", range(100), max_tokens=2)
    world.run(client)
    hooks = ("asked", "answered", "allocated", "loading", "loaded", "ended")
    assert told == [(hook, "b") for hook in hooks]
    told.clear()
    world.add("c", range(10), max_tokens=2)
    world.run(client)
    assert told == [("unasked", "c"), ("ended", "c")]
    client.pending = 1
    world.add("d", range(500, 540), max_tokens=2)
    world.run(client)
    mine = [hook for hook, name in told if name == "d"]
    assert mine == ["asked", "asked", "answered", "allocated", "stored", "ended"]
    assert mine == sorted(mine, key=HOOKS.index)
