"""What vLLM's real scheduler lets us tell of a miss that the daemon cannot see."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kvass.client.lookups import Match
from kvass.engine import explain
from kvass.messages import MOST_NOTES, RequestContext
from tests.engine.test_scheduler_changes import engine
from tests.engine.test_scheduler_load import PROMPT, stored
from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.scheduler import SchedulerHarness, rig


def asked(client: FakeClient, world: SchedulerHarness, name: str, **fields: Any) -> RequestContext:
    """What the lookup of a request says of it."""
    tokens = fields.pop("tokens", PROMPT)
    world.add(name, tokens, max_tokens=1, **fields)
    world.run(client)
    return client.contexts[name]


def noted(client: FakeClient) -> dict[str, str]:
    """The reasons that the daemon got, by request."""
    return {note.request: note.why for note in client.notes}


def told(client: FakeClient, world: SchedulerHarness, tokens: Any, **fields: Any) -> str:
    """The reason that the daemon gets of a request."""
    world.add("told", tokens, max_tokens=1, **fields)
    world.run(client)
    return noted(client).get("told", "")


def test_a_prompt_that_was_seen_under_another_salt() -> None:
    client, world = rig()
    first, second = asked(client, world, "a", salt="one"), asked(client, world, "b", salt="two")
    assert (first.prompt_tokens, first.local_tokens, first.if_absent) == (100, 0, "")
    assert (second.prompt_tokens, second.local_tokens) == (100, 0)
    assert (second.if_absent, second.absent_chunk) == ("other_salt", 0)
    assert world.scheduler.reset_prefix_cache()
    assert asked(client, world, "c", salt="two").if_absent == "", "now it was seen under this one"
    assert asked(client, world, "d").if_absent == "other_salt"
    assert asked(client, world, "e", tokens=range(1, 101)).if_absent == "", "another prompt"
    assert noted(client) == {}


def test_a_prompt_that_was_seen_with_another_adapter(tmp_path: Path) -> None:
    client, world = rig()
    explainer = world.connector._planner._asking._explain
    assert asked(client, world, "a").if_absent == ""
    request = world.add("b", PROMPT, lora=tmp_path / "lora", max_tokens=1)
    planner = world.connector._planner
    assert explainer.if_absent(planner._requests["b"], 3) == ("other_adapter", 0)
    assert request.lora_request is not None


def test_what_is_remembered_is_bounded_and_keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "PROMPTS", 2)
    monkeypatch.setattr(explain, "SPACES", 2)
    client, world = rig()
    for number in range(4):
        asked(client, world, f"p{number}", tokens=range(number, number + 40))
    explainer = world.connector._planner._asking._explain
    assert len(explainer._spaces) == 2
    for number in range(4):
        asked(client, world, f"s{number}", salt=str(number))
    assert max(map(len, explainer._spaces.values())) == 2
    other = rig()[1].connector._planner._asking._explain
    assert explainer._hash(b"x") != other._hash(b"x")


def test_an_engine_that_was_too_busy_to_hold_blocks_for_the_store() -> None:
    client, world = rig(blocks=65, batched=64)
    client.late, client.patience = 8, 100
    requests = [world.add(str(n), range(1000 * n, 1000 * n + 64), max_tokens=1) for n in range(24)]
    hashes = [bytes(request.block_hashes[1]) for request in requests]
    world.run(client)
    client.late = 0
    lost = [n for n, digest in enumerate(hashes) if digest not in client.rows]
    assert 0 < len(lost) < 24
    assert world.scheduler.reset_prefix_cache()
    for n in range(24):
        facts = asked(client, world, f"again {n}", tokens=range(1000 * n, 1000 * n + 65))
        assert (facts.if_absent, facts.absent_chunk) == (("engine_busy" if n in lost else ""), 0)


def test_nothing_is_asked_and_why() -> None:
    client, world = stored()
    assert told(client, world, range(31)) == "too_short"
    assert told(client, world, range(200, 300), reads=False) == "not_read"
    world.run(client)
    client, world = rig()
    asked(client, world, "a")
    assert told(client, world, range(97)) == "own_hit"
    (note,) = client.notes
    assert (note.prompt_tokens, note.local_tokens) == (97, 96)


def test_without_a_daemon_notes_wait_and_the_oldest_go() -> None:
    client, world = stored()
    client.connected = False
    assert told(client, world, PROMPT) == ""
    client.connected = True
    world.add("b", range(500, 540), max_tokens=1)
    world.run(client)
    assert noted(client) == {"told": "no_daemon"}
    explainer = world.connector._planner._asking._explain
    client.connected = False
    world.add("waits", PROMPT)
    state = world.connector._planner._requests["waits"]
    for number in range(2 * MOST_NOTES):
        state.request.vllm.request_id, state._short_name, state.noted = f"r{number}", "", ""
        explainer.note(state, 0, "no_daemon")
    assert next(iter(explainer._notes)) == f"r{MOST_NOTES}"
    assert len(explainer._notes) == MOST_NOTES


def test_weights_without_a_name_and_weights_that_changed() -> None:
    client, world = stored()
    client.connected = False
    explainer = world.connector._planner._asking._explain
    vars(explainer._setup)["weights"] = Future()
    told(client, world, PROMPT)
    client.connected = True
    world.step()
    assert noted(client) == {"told": "weights_unnamed"}
    client, world, executor = engine()
    executor.collective_rpc("update_weights")
    assert told(client, world, range(100)) == "weights_changed"


def test_an_adapter_that_is_not_known(tmp_path: Path) -> None:
    client, world = stored()
    assert told(client, world, PROMPT, lora=tmp_path / "none") == "adapter_unknown"


def test_a_load_that_failed() -> None:
    client, world = stored()
    world.add("b", PROMPT)
    output, work = world.schedule()
    world.finish(output, failed=["b"])
    world.run(client)
    assert len(work.loads) == 1
    assert noted(client) == {"b": "load_failed_here"}
    client, world = stored()
    world.add("b", PROMPT)
    world.run(client)
    assert noted(client) == {}, "the control"


def test_a_request_that_waits_is_noted_once() -> None:
    client, world = stored()
    planner = world.connector._planner
    client.connected = False
    world.add("b", PROMPT)
    for _ in range(3):
        assert planner.match("b", 0) == 0
    (note,) = planner._asking._explain._notes.values()
    first = note.when_s
    planner.match("b", 0)
    assert next(iter(planner._asking._explain._notes.values())).when_s == first


def test_a_match_that_ends_inside_the_engines_own_hit_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is given back at once, and its reason is known only before that."""
    client, world = rig(tails=True)
    assert told(client, world, range(50)) == ""
    match = Match(lease=77, boot=b"boot", first=1, chunks=1, blocks=1)

    def found(name: str, *_: Any) -> Match:
        client.held[name] = match
        return match

    why: list[str] = []
    explainer = world.connector._planner._asking._explain
    monkeypatch.setattr(client, "find", found)
    monkeypatch.setattr(client, "ended_by", lambda name: "evicted" if name in client.held else "")
    monkeypatch.setattr(explainer, "answered", lambda _, answer, __: why.append(answer.why))
    world.add("b", range(100), max_tokens=1)
    world.run(client)
    assert client.released == [77]
    assert why == ["evicted"]
