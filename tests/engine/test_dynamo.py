"""KV events, as Dynamo's own indexer takes them: it claims all that an engine has, and no more.

The indexer is a process of its own. vLLM's real schedulers and publishers, real ranks' copies and a
real daemon; no model. What the indexer claims is compared with the engine's block pool and with
what the daemon answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvass import Client
from kvass.messages import Presence, Present
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.test_scheduler_events import ROW, churn, prompt, tell_one_less
from tests.support.servers.routers import Claim, DynamoIndexer
from tests.support.vllm.ranks import StubModelEngine, making, until
from tests.support.vllm.scheduler import BLOCK, CHUNK

NUMBERS = itertools.count(1)
"""Of workers, as Dynamo calls what it listens to. An engine that was started again is another."""


@pytest.fixture(scope="module")
def indexer() -> Iterator[DynamoIndexer]:
    one = DynamoIndexer()
    yield one
    one.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """With room for 32 rows. Patient: a busy machine makes no miss of a hit."""
    with running_daemon(tmp_path, l1_size=str(64 * ROW), lookup_budget_ms=10_000) as one:
        yield one


class BusyEngine(StubModelEngine):
    """An engine that publishes something in each step. So who missed a message notices it."""

    def step(self) -> Any:
        output = super().step()
        self.world.scheduler.kv_event_publisher.publish(KVEventBatch(ts=0.0, events=[]))
        return output


class Engine(BusyEngine):
    """An engine that the indexer listens to."""

    def __init__(
        self, daemon: Daemon, indexer: DynamoIndexer, name: str = "a", **options: Any
    ) -> None:
        folder = Path(daemon.socket).parent
        self._endpoints = [f"ipc://{folder}/{name}-{number}" for number in (1, 2)]
        endpoint, again = self._endpoints
        events = {"endpoint": endpoint, "replay_endpoint": again}
        super().__init__(daemon.socket, daemon, kv_events=events, **options)
        self.wait_connected()
        self._indexer = indexer
        self.number = self.listen()

    def listen(self, *, replay: bool = True) -> int:
        """Have the indexer listen to it, once more, as to another worker; its number."""
        number = next(NUMBERS)
        endpoint, again = self._endpoints
        self._indexer.register(number, endpoint, again if replay else None, BLOCK)
        return number

    def claims(self, prompts: list[list[int]], number: int = 0) -> list[Claim]:
        """What the indexer says."""
        return [self._indexer.claim(number or self.number, tokens) for tokens in prompts]

    def truth(self, prompts: list[list[int]]) -> list[Claim]:
        """What is there: the blocks of the engine's own cache, then those of whole rows in L1."""
        return [self._truth(tokens) for tokens in prompts]

    def _truth(self, tokens: list[int]) -> Claim:
        hashes = self.world._hasher(Request("look", tokens, SamplingParams(), None))
        gpu = [self.world.pool.get_cached_block(each, [0]) is not None for each in hashes]
        own = [*gpu, False].index(False)
        with_l1 = [*([True] * own), *self.present(hashes, False)[own:], False].index(False)
        return Claim(own * BLOCK, with_l1 * BLOCK, with_l1 * BLOCK)

    def present(self, hashes: list[bytes], tiers: bool) -> list[bool]:
        """Which blocks are in whole rows in L1, or with ``tiers`` in L1 or a tier."""
        width = CHUNK // BLOCK
        question = Present(digests=b"".join(hashes[width - 1 :: width]), tiers=tiers)
        found = self.client.wait(self.client.submit(question), 10.0)
        assert isinstance(found, Presence)
        return [bool(held) for held in found.held for _ in range(width)]

    def excess(self, number: int = 0) -> tuple[int, int]:
        """How many blocks more than there are the indexer knows, of the engine's own and in L1."""
        assert self.daemon is not None
        gpu, cpu, _ = self._indexer.held(number or self.number)
        rows = self.daemon.status()["rows"]
        return gpu - len(self.world.pool.cached_block_hash_to_block), cpu - rows * CHUNK // BLOCK

    def settle(self, prompts: list[list[int]], what: str, number: int = 0) -> None:
        """Step until the indexer claims what is there."""

        def right() -> bool:
            same = self.excess(number) == (0, 0)
            return same and self.claims(prompts, number) == self.truth(prompts)

        until(lambda: self.step() and right(), what)


@pytest.fixture
def engine(daemon: Daemon, indexer: DynamoIndexer) -> Iterator[Callable[..., Engine]]:
    with making(partial(Engine, daemon, indexer)) as make:
        yield make


@pytest.fixture
def a(engine: Callable[..., Engine]) -> Engine:
    return engine()


class Lossy:
    """A publisher's socket that sends nothing while it is ``losing``. Replays have one of their
    own."""

    def __init__(self, publisher: Any) -> None:
        self.losing, self.lost = False, 0
        self._socket, publisher._pub = publisher._pub, self

    def send_multipart(self, parts: tuple[bytes, ...]) -> None:
        if self.losing:
            self.lost += 1
        else:
            self._socket.send_multipart(parts)

    def close(self, linger: int) -> None:
        self._socket.close(linger=linger)


def test_blocks_grow_and_shrink_by_medium(a: Engine) -> None:
    first = [prompt(0)]
    assert a.claims(first) == [(0, 0, 0)]
    a.generate("first", first[0])
    a.settle(first, "a store")
    assert a.claims(first) == [(96, 96, 96)]
    prompts = churn(a, range(40))
    a.settle(prompts, "evictions from both")
    assert {*a.claims(prompts)} == {(64, 64, 64), (64, 96, 96), (96, 96, 96)}
    until(a.world.scheduler.reset_prefix_cache, "nothing is stored any more")
    until(lambda: a.step() and a.excess()[0] == 0, "vLLM says that all is cleared")
    assert {*a.claims(prompts)} == {(0, 0, 0)}
    a.load("again", prompts[-1])
    until(lambda: a.step() and a.claims(prompts[-1:]) == [(96, 96, 96)], "a load tells it")


def test_what_is_cleared_is_not_claimed(a: Engine, engine: Any, daemon: Daemon) -> None:
    """Nor is it of an engine that only loaded it."""
    b, prompts = engine("b"), churn(a, range(20))
    b.load("b", prompts[0])
    a.settle(prompts, "stores")
    until(lambda: b.step() and b.claims(prompts[:1]) == [(96, 96, 96)], "a load")
    with Client(daemon.socket) as client:
        assert client.clear(everything=True) > 20
    for one in (a, b):
        one.settle(prompts, "L1 is empty")
        assert one.excess() == (0, 0)


def test_rows_of_a_session_that_ended_are_claimed_until_they_are_evicted(
    a: Engine, daemon: Daemon
) -> None:
    a.world.add("a", prompt(2000), max_tokens=1, session="one")
    prompts = [prompt(2000), *churn(a, range(20))]
    a.settle(prompts, "stores")
    with Client(daemon.socket) as client:
        assert client.end_session("one") == 3
    assert a.claims(prompts[:1])[0].cpu == 96
    prompts += churn(a, range(20, 24))
    a.settle(prompts, "its rows are the first to go")
    assert a.claims(prompts[:1])[0].cpu < 96


def test_a_removal_that_is_not_told_is_seen(a: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above."""
    tell_one_less(monkeypatch)
    prompts = churn(a, range(40))
    until(lambda: a.step() and a.excess() == (0, CHUNK // BLOCK), "all else was told")
    claims = zip(a.claims(prompts), a.truth(prompts), strict=True)
    assert [claim.cpu - true.cpu for claim, true in claims if claim != true] == [CHUNK]


def test_after_a_restart_of_the_daemon_nothing_of_before_is_claimed(
    a: Engine, daemon: Daemon, indexer: DynamoIndexer
) -> None:
    prompts = churn(a, range(20))
    a.settle(prompts, "stores")
    assert indexer.held(a.number)[1] > 0
    daemon.restart()
    a.wait_connected()
    a.settle(prompts, "L1 is empty")
    assert indexer.held(a.number)[1] == 0
    prompts += churn(a, range(20, 24))
    a.settle(prompts, "stores after it")


def test_after_a_restart_of_the_engine_what_it_loads_is_claimed(
    engine: Any, indexer: DynamoIndexer
) -> None:
    former = engine()
    prompts = churn(former, range(8))
    former.settle(prompts, "stores")
    indexer.unregister(former.number)
    former.close()
    a = engine()
    a.step()
    assert {*a.claims(prompts)} == {(0, 0, 0)}
    churn(a, range(8))
    a.settle(prompts, "loads")
    assert {*a.claims(prompts)} == {(96, 96, 96)}


def test_lost_messages_are_asked_for_again(a: Engine) -> None:
    """By whom can. One that cannot is the control. One that comes late asks for all."""
    deaf = a.listen(replay=False)
    until(lambda: hears(a, deaf), "it is connected")
    prompts = churn(a, range(3))
    a.settle(prompts, "stores")
    until(lambda: a.step() and a.claims(prompts, deaf) == a.truth(prompts), "it hears of them")
    socket = Lossy(a.world.scheduler.kv_event_publisher)
    socket.losing = True
    prompts += churn(a, range(3, 40))
    until(lambda: a.step() and not a.world.connector._planner.events.pending, "all is told")
    socket.losing = False
    assert socket.lost > 40
    late = a.listen()
    for number in (a.number, late):
        a.settle(prompts, "what was lost", number)
    stale = zip(a.claims(prompts[:3], deaf), a.truth(prompts[:3]), strict=True)
    assert all(claim.gpu > true.gpu and claim.cpu > true.cpu for claim, true in stale)


def hears(engine: Engine, number: int) -> bool:
    """Whether the worker hears of another prompt."""
    new = 1000 + next(NUMBERS)
    engine.generate(f"{new}", tokens := prompt(new))
    return engine.claims([tokens], number)[0].gpu > 0
