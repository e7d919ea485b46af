"""KV events: a router's index, built by vLLM's publisher and a ZMQ subscriber, and the daemon.

vLLM's real schedulers, real ranks' copies and a real daemon; no model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from examples.router import Subscriber
from kvass.client.lookups import Match
from kvass.connectors.vllm.events import Kept, VllmEvents
from kvass.engine import adapter_files, adapters, row_events
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.test_scheduler_groups import MODELS
from tests.engine.test_scheduler_lora import train
from tests.support.vllm.ranks import StubModelEngine, until
from tests.support.vllm.scheduler import BLOCK, CHUNK

ROW = 2 * 2 * 4096
"""Bytes of a row: two blocks of two layers."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """With room for 32 rows. Patient: a busy machine makes no miss of a hit."""
    with running_daemon(tmp_path, l1_size=str(64 * ROW), lookup_budget_ms=10_000) as one:
        yield one


class Engine(StubModelEngine):
    """An engine, and a router that listens to it."""

    def __init__(self, daemon: Daemon, name: str, **events: Any) -> None:
        self.endpoints = [f"ipc://{Path(daemon.socket).parent}/{name}-{n}" for n in (1, 2)]
        settings = {"endpoint": self.endpoints[0], "replay_endpoint": self.endpoints[1]}
        super().__init__(daemon.socket, daemon, kv_events={**settings, **events}, lora=True)
        self.wait_connected()
        self.router = Subscriber(*self.endpoints)

    def settle(self, condition: Callable[[], bool], what: str) -> None:
        """Step as an engine that has something to do, until the router's index is right."""
        until(lambda: self.step() and self.router.poll() and condition(), what)

    def rows(self) -> int:
        """Rows of kvass that the router knows of."""
        held = self.router.index.held.values()
        blocks = sum(medium == "CPU" for media in held for medium, _ in media)
        assert blocks % 2 == 0
        return blocks // 2

    @property
    def events(self) -> row_events.RowEvents:
        """The connector's."""
        found = self.world.connector._planner.events
        assert isinstance(found, row_events.RowEvents)
        return found

    def matched(self, tokens: list[int]) -> int:
        """The prefix that the daemon has of a prompt, in tokens."""
        request = Request("look", tokens, SamplingParams(max_tokens=1), None)
        hashes = self.world._hasher(request)[CHUNK // BLOCK - 1 :: CHUNK // BLOCK]
        found = self.client.match("look", b"".join(hashes), 32, 0)
        self.client.give_back("look")
        return found.chunks * CHUNK if isinstance(found, Match) else 0

    def close(self) -> None:
        self.router.close()
        super().close()


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(name: str = "a", **events: Any) -> Engine:
        made.append(Engine(daemon, name, **events))
        return made[-1]

    yield make
    for one in made:
        one.close()


def prompt(number: int, tokens: int = 100) -> list[int]:
    """Three chunks. Prompts below 1000 whose numbers are equal modulo 3 share two of them."""
    shared = random.Random(number % 3 if number < 1000 else number).choices(
        range(1000), k=2 * CHUNK
    )
    return (shared + random.Random(1000 + number).choices(range(1000), k=tokens))[:tokens]


def agrees(one: Engine, daemon: Daemon, prompts: list[list[int]]) -> bool:
    """Whether the router's index has as many rows as the daemon, and the same prefixes."""
    return one.rows() == daemon.status()["rows"] and all(
        one.router.index.cached(tokens, ["CPU"]) == one.matched(tokens) for tokens in prompts
    )


def churn(one: StubModelEngine, numbers: range) -> list[list[int]]:
    prompts = [prompt(number) for number in numbers]
    for number, tokens in zip(numbers, prompts, strict=True):
        one.generate(f"{number}", tokens)
    return prompts


def test_the_index_agrees_with_the_daemon_after_churn(daemon: Daemon, engine: Any) -> None:
    a = engine()
    prompts = churn(a, range(40))
    a.settle(lambda: agrees(a, daemon, prompts), "the index is right")
    status = daemon.status()
    assert status["counters"]["evicted_capacity"] > 10
    assert status["rows"] > 10
    assert a.router.gaps == 0


def tell_one_less(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    """Keep the next removal of a row from all routers. Returns where the row will be."""
    real, untold = VllmEvents.removed, list[Kept]()

    def one_less(self: VllmEvents, group: int, rows: list[Kept], tier: bool) -> Any:
        if not untold:
            untold.append(rows.pop())
        return real(self, group, rows, tier)

    monkeypatch.setattr(VllmEvents, "removed", one_less)
    return untold


def test_a_removal_that_is_not_told_is_seen(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    dropped = tell_one_less(monkeypatch)
    a = engine()
    prompts = churn(a, range(40))
    a.settle(lambda: a.rows() == daemon.status()["rows"] + 1, "all else was told")
    assert dropped
    assert not agrees(a, daemon, prompts)


def test_after_a_restart_of_the_daemon_nothing_of_before_is_left(
    daemon: Daemon, engine: Any
) -> None:
    a = engine()
    before = churn(a, range(4))
    a.settle(lambda: agrees(a, daemon, before), "the index is right")
    assert a.rows() > 4
    daemon.restart()
    a.wait_connected()
    a.settle(lambda: a.rows() == 0, "the rows were withdrawn")
    after = churn(a, range(10, 14))
    a.settle(lambda: agrees(a, daemon, before + after), "the index is right")


def test_without_a_daemon_rows_are_withdrawn_after_a_while(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_events, "AWAY_S", 0.3)
    monkeypatch.setattr(row_events, "ROWS_PER_MESSAGE", 2)
    a = engine()
    churn(a, range(2))
    a.settle(lambda: a.rows() == 6, "they are announced")
    daemon.kill()
    a.settle(lambda: a.rows() == 0, "they are withdrawn")


def test_what_the_daemon_does_not_remember_is_asked_for_row_by_row(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is lost while another engine stores: the daemon noted nothing."""
    monkeypatch.setattr(row_events, "ROWS_PER_MESSAGE", 5)
    a, b = engine(), StubModelEngine(daemon.socket, daemon)
    b.wait_connected()
    prompts = churn(a, range(20))
    a.settle(lambda: agrees(a, daemon, prompts), "the index is right")
    rows = a.rows()
    with a.client.lock:
        a.client.lose(a.client.connection, None)
    churn(b, range(1000, 1005))
    a.wait_connected()
    a.settle(lambda: a.rows() < rows and not a.events._doubted, "the loss was noticed")
    assert all(a.router.index.cached(p, ["CPU"]) <= a.matched(p) for p in prompts)
    assert a.rows() + 15 == daemon.status()["rows"]
    b.close()


def test_a_prompt_below_a_chunk_keeps_nothing_from_being_withdrawn(
    daemon: Daemon, engine: Any
) -> None:
    """What it leaves is stored and loaded under no chunk's hash, and announced to nobody."""
    a, b = engine(), StubModelEngine(daemon.socket, daemon)
    b.wait_connected()
    prompts = churn(a, range(2))
    a.settle(lambda: agrees(a, daemon, prompts), "the index is right")
    a.generate("short", prompt(5000, BLOCK + 4))
    churn(b, range(1000, 1030))
    a.settle(lambda: a.rows() == 0, "all was evicted, and withdrawn")
    b.close()


def test_each_engine_announces_what_it_stored_or_loaded(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row after its parent: the second router hears of nothing but kvass."""
    a, b = engine("a"), engine("b")
    index, apply = b.router.index, b.router.index.apply
    monkeypatch.setattr(index, "apply", lambda e: apply(e) if e["medium"] == "CPU" else None)
    a.generate("a", prompt(0))
    a.settle(lambda: a.rows() == 3, "it stored three rows")
    b.step()
    assert b.rows() == 0
    b.load("b", prompt(0))
    b.settle(lambda: b.rows() == 3, "it loaded them")
    b.world.abort("b")
    churn(b, range(1000, 1015))
    b.settle(lambda: b.rows() == daemon.status()["rows"], "it stored all that is there")
    a.settle(lambda: a.rows() == 0, "what b evicted is no more a's")


def test_a_reset_of_vllms_cache_takes_all_and_a_load_brings_it_back(
    daemon: Daemon, engine: Any
) -> None:
    """``AllBlocksCleared`` names no medium."""
    a = engine()
    a.generate("a", prompt(0))
    a.settle(lambda: a.rows() == 3, "three rows are announced")
    assert a.world.scheduler.reset_prefix_cache()
    a.settle(lambda: not a.router.index.held, "the router knows nothing")
    a.load("again", prompt(0))
    a.settle(lambda: a.rows() == 3, "they are announced again")


@pytest.mark.parametrize("remembered", [1000, 1])
def test_lost_messages(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch, remembered: int
) -> None:
    """They are replayed. If the engine does not remember them, the index begins anew, and never has
    what is not there."""
    a = engine(buffer_steps=remembered)
    prompts = churn(a, range(3))
    a.settle(lambda: agrees(a, daemon, prompts), "the index is right")
    publisher, lost = a.world.scheduler.kv_event_publisher, [-1]

    def all_is_lost() -> bool:
        sent = not (a.events._expected or publisher._event_queue.unfinished_tasks)
        return sent and lost[-1] == publisher._buffer[-1][0]

    with monkeypatch.context() as losing:
        losing.setattr(a.router, "_take", lambda number, _: lost.append(number))
        prompts += churn(a, range(3, 30))
        a.settle(all_is_lost, "nothing is on its way any more")
    assert len(lost) > 10
    prompts += churn(a, range(1000, 1002))
    if remembered > 1:
        a.settle(lambda: agrees(a, daemon, prompts), "the index is right")
        assert a.router.gaps == 0
    else:
        known = a.router.index.cached
        a.settle(lambda: all(known(p, ["CPU"]) == 96 for p in prompts[-2:]), "what came after it")
        assert a.router.gaps == 1
        found = [known(p, ["CPU"]) for p in prompts]
        assert all(n <= a.matched(p) for n, p in zip(found, prompts, strict=True))
        assert found[0] == 0
        a.settle(a.world.scheduler.reset_prefix_cache, "the tails are stored")
        a.load("again", prompts[0])
        a.settle(lambda: known(prompts[0], ["CPU"]) == 96, "a load tells it")


def test_without_kv_events_nothing_is_asked(daemon: Daemon) -> None:
    one = StubModelEngine(daemon.socket, daemon)
    one.wait_connected()
    one.generate("a", prompt(0))
    assert one.world.connector._planner.events is None
    assert one.world.connector.take_events() == []
    assert not daemon.status()["messages"].get("removals")
    one.close()


def test_lora_adapters(
    daemon: Daemon, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests in the daemon have a salt of the adapter's weights, vLLM's hashes have not."""
    monkeypatch.setattr(row_events, "AWAY_S", 0.3)
    monkeypatch.setattr(adapters, "WAIT_S", 60.0)
    monkeypatch.setattr(adapter_files, "STABLE_NS", 0)
    adapter, a = train(tmp_path / "adapter", b"1234"), engine()
    for name in ("stores", "loads"):
        a.world.add(name, prompt(0), max_tokens=20, lora=adapter)
        a.settle(lambda name=name: name not in a.world.scheduler.requests, "its end")
        a.settle(lambda: a.rows() == 3, "three rows are announced")
        assert a.router.index.cached(prompt(0)) == 0, "a prompt without it has none"
        a.settle(a.world.scheduler.reset_prefix_cache, "the tail is stored, too")
    daemon.kill()
    a.settle(lambda: a.rows() == 0, "they are withdrawn")


@pytest.mark.parametrize("model", ["mixed", "deepseek-v4"])
def test_models_of_several_groups(daemon: Daemon, tmp_path: Path, model: str) -> None:
    """What is announced of each group is what vLLM announces of its own blocks."""
    endpoint = f"ipc://{tmp_path}/events"
    events = {"endpoint": endpoint, "replay_endpoint": f"{endpoint}-again"}
    options: dict[str, Any] = {"shapes": MODELS[model], "blocks": 400, "batched": 128, "chunk": 64}
    one = StubModelEngine(daemon.socket, daemon, kv_events=events, **options)
    one.wait_connected()
    router, seen = Subscriber(*events.values()), list[dict[str, Any]]()
    router.index.apply = seen.append  # type: ignore[method-assign, assignment]
    one.generate("a", prompt(0, 300))
    rows = daemon.status()["rows"]

    def stored(medium: str) -> list[dict[str, Any]]:
        router.poll()
        return [e for e in seen if e["type"] == "BlockStored" and e["medium"] == medium]

    until(lambda: one.step() and len(stored("CPU")) == rows, "every row is announced")
    blocks: dict[tuple[int, bytes], Any] = {}
    for e in stored("GPU"):
        hashes, size = e["block_hashes"], e["block_size"]
        for i, each in enumerate(hashes):
            blocks[e["group_idx"], each] = size, hashes[i - 1] if i else e["parent_block_hash"]
    assert {group for group, _ in blocks} == set(range(len(MODELS[model])))
    for e in stored("CPU"):
        parent, size = e["parent_block_hash"], e["block_size"]
        assert len(e["token_ids"]) == size * len(e["block_hashes"])
        for each in e["block_hashes"]:
            assert blocks[e["group_idx"], each][0] == size
            if e["kv_cache_spec_kind"] == "full_attention":
                assert blocks[e["group_idx"], each][1] == parent
            parent = each
    router.close()
    one.close()


def test_an_event_is_as_vllms_own(daemon: Daemon, engine: Any) -> None:
    """Parents, tokens, hashes and all else are those of the events of vLLM's own blocks."""
    a, seen = engine(), list[Any]()
    take = a.router.index.apply

    def note(event: Any) -> None:
        seen.append(event)
        take(event)

    a.router.index.apply = note
    a.world.add("a", prompt(0), salt="tenant", max_tokens=1)
    a.settle(lambda: a.rows() == 3, "three rows are announced")
    stored = [event for event in seen if event["type"] == "BlockStored"]
    theirs, ours = ([e for e in stored if e["medium"] == medium] for medium in ("GPU", "CPU"))
    for key in {*theirs[0]} - {"medium", "block_hashes", "token_ids", "parent_block_hash"}:
        if key != "extra_keys":
            assert [e[key] for e in ours] == [theirs[0][key]] * 3, key
    for key in ("block_hashes", "token_ids", "extra_keys"):
        flat = [[x for event in events for x in event[key]] for events in (theirs, ours)]
        assert flat[0][: len(flat[1])] == flat[1], key
    assert [e["parent_block_hash"] for e in ours] == [None] + [
        e["block_hashes"][-1] for e in ours[:-1]
    ]
    assert ours[0]["extra_keys"] == [["tenant"], None]
