"""Names that an engine's clients choose, with vLLM's real scheduler: however long, and any text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvass.client.client import Client
from kvass.client.scheduler import SEND_APART
from kvass.messages import ReserveItem
from kvass.testing.daemon import Daemon
from kvass.types import SHORT_NAME
from tests.engine import conftest
from tests.support.vllm.ranks import StubModelEngine, making, until
from tests.support.vllm.scheduler import rig

NAMES = [
    *("a" * 600, "b" * 5_000, "c" * 100_000, "d" * 3_000_000),
    *("\ud800", "\udfff" * 600, "one\ntwo", "\U0001f600" * 4_000),
]

daemon = conftest.own_daemon


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Any]:
    with making(lambda: StubModelEngine(daemon.socket, daemon)) as make:
        yield make


def prompt(number: int) -> list[int]:
    """65 tokens: two chunks and the next token."""
    return [(number * 1_000 + i) % 30_000 for i in range(65)]


def run(engine: Any, requests: dict[str, list[int]], **fields: Any) -> None:
    """Run these requests together, and their stores, to the end."""
    for name, tokens in requests.items():
        engine.world.add(name, tokens, max_tokens=2, **fields)
    until(lambda: engine.step() and not engine.world.scheduler.has_requests(), "the requests")
    engine.daemon.wait_until(reservations=0)


def test_a_requests_name_costs_no_request_its_store(
    daemon: Daemon, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In its id, its salt and its session."""
    a, b = engine(), engine()
    for number, name in enumerate(NAMES):
        names = [*map(str, range(6)), name]
        prompts = {one: prompt(7 * number + i) for i, one in enumerate(names)}
        for one in (a, b, a):  # the last time with notes: its own cache has all
            run(one, prompts, salt=name[:9_999], session=name)
    counters = daemon.status()["counters"]
    assert b.client.counters["hits"] == 7 * len(NAMES), "each was stored, the long ones too"
    assert {name: n for name, n in counters.items() if n and name.startswith("refused_")} == {}
    for one in (a, b):
        assert one.client.counters["connects"] == 1
        assert not one.world.connector._boundary.counters
    assert [r.getMessage() for r in caplog.records if r.name.startswith("kvass")] == []
    with Client(daemon.socket) as client:
        assert max(len(each["request"]) for each in client.explain(limit=200)) <= SHORT_NAME
        for name in NAMES:
            found = {each["request"] for each in client.explain(request=name)}
            assert len(found) == 1, ascii(name[:9])


def test_what_is_refused_for_anothers_sake_is_reserved_without_it() -> None:
    """By a daemon that refuses a whole message for an item of it."""
    client, world = rig()
    granted = client.granted

    def refusing(reserving: Any) -> Any:
        items: list[ReserveItem] = client.reserves[reserving.seq - 1]
        if any(item.request == "bad" for item in items):
            client.awaited.remove(reserving)
            return SEND_APART
        return granted(reserving)

    client.granted = refusing  # type: ignore[method-assign]
    names = ["a", "b", "bad", "c", "d"]
    for number, name in enumerate(names):
        world.add(name, prompt(number), max_tokens=20)
    stores = [store for _ in range(10) for store in world.step().stores]
    assert sorted(store.request for store in stores) == ["a", "b", "c", "d"]
    assert [len(store.blocks[0]) for store in stores] == [4] * 4
    alone = [items for items in client.reserves if [i.request for i in items] == ["bad"]]
    assert len(alone) == 1, "it is not offered again: the answer would be the same"
