"""A daemon with tiers says that it is at work, and answers later: how long it is waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest

from kvass.client.client import Client
from kvass.client.lookups import PENDING
from kvass.client.requests import MAX_UNANSWERED
from kvass.client.scheduler import SchedulerClient
from kvass.messages import (
    AHEAD,
    Lookup,
    Matched,
    Ping,
    Pong,
    Prefetch,
    Prefetched,
    Promoting,
    Register,
    Release,
    RequestContext,
    Reserve,
)
from kvass.types import MAX_PATIENCE_S, Timing
from tests.client.test_scheduler import CHUNKS, DIGESTS, ITEMS, WIDTH, match
from tests.support.waiting import eventually
from tests.support.wire.scripted_daemon import ScriptedDaemon

CHUNK_TOKENS = 256
WHOLE_S = CHUNKS * CHUNK_TOKENS / 5_000
"""What computing all of it is taken to take."""


@pytest.fixture
def tiers(daemon: ScriptedDaemon) -> ScriptedDaemon:
    """It takes lookups up, and answers them when a test says so."""
    timing = Timing(lookup_budget_ms=100.0)
    daemon.welcome = lambda w: msgspec.structs.replace(w, tiers=1, timing=timing)
    daemon.answers[Lookup] = lambda m: [Promoting(seq=m.seq)]
    return daemon


@pytest.fixture
def scheduler(tiers: ScriptedDaemon, registration: Register) -> Iterator[SchedulerClient]:
    client = SchedulerClient(tiers.path, registration, reserve_wait_s=5)
    client.connect(5)
    yield client
    client.close()


def later(daemon: ScriptedDaemon, lookup: Lookup) -> Matched:
    """The answer to ``lookup``, at last."""
    (reply,) = daemon.hit(lookup)
    assert isinstance(reply, Matched)
    daemon.push(reply)
    return reply


def test_the_daemon_is_told_how_long(tiers: ScriptedDaemon, scheduler: SchedulerClient) -> None:
    """As long as computing it would take; a little less, so that its answer comes in time."""
    scheduler.match("guess", DIGESTS, WIDTH, 0)
    scheduler.match("fast", DIGESTS, WIDTH, 0, RequestContext(prefill_tokens_s=100_000.0))
    scheduler.match("slow", DIGESTS, WIDTH, 0, RequestContext(prefill_tokens_s=1.0))
    scheduler.match("rest", DIGESTS, WIDTH, CHUNKS - 1, RequestContext(prefill_tokens_s=100.0))
    budgets = [(m.budget_ms / 1000, m.prefill_tokens_s) for m in tiers.got(Lookup, 4)]
    for (budget, speed), (most, told) in zip(
        budgets, [(WHOLE_S, 0), (0.1, 100_000), (MAX_PATIENCE_S, 1), (2.56, 100)], strict=True
    ):
        assert most - 0.05 < budget < most
        assert speed == told


@pytest.mark.parametrize("strange", [float("inf"), float("nan"), -1.0])
def test_strange_budgets_and_speeds_end_no_session(
    tiers: ScriptedDaemon, registration: Register, strange: float
) -> None:
    client = SchedulerClient(tiers.path, registration, lookup_budget_s=strange)
    client.connect(5)
    client.match("r", DIGESTS, WIDTH, 0, RequestContext(prefill_tokens_s=strange))
    assert client.prefetch("r", DIGESTS, WIDTH, budget_s=strange)
    tiers.answers[Prefetch] = lambda m: [Prefetched(seq=m.seq)]
    with Client(tiers.path) as other:
        assert other.prefetch(b"n" * 32, DIGESTS, WIDTH, budget_s=strange) == 0
    assert len(tiers.got(Prefetch, 2)) == 2, "the daemon's decoder lets them through"
    assert not client.counters["lost"]
    client.close()


@pytest.mark.alone
def test_a_daemon_that_hangs_is_not_waited_for(
    tiers: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    """Its tiers may take seconds, but it says at once that they are at work."""
    tiers.answers[Lookup] = lambda _: []
    began = time.monotonic()
    while match(scheduler) is PENDING:
        scheduler.new_step()
        assert time.monotonic() - began < 30
    assert time.monotonic() - began < WHOLE_S
    assert scheduler.counters["timeouts"] == 1
    assert scheduler.silent_s > 0
    late = later(tiers, tiers.got(Lookup)[0])
    scheduler.new_step()
    assert eventually(lambda: any(m.lease == late.lease for m in tiers.got(Release, 0)))


def test_stores_go_on_while_a_lookup_waits(
    tiers: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    assert match(scheduler) is PENDING
    assert scheduler.answering
    assert scheduler.reserve(ITEMS, WIDTH) is not None
    assert len(tiers.got(Reserve)) == 1
    assert match(scheduler) is PENDING


def test_any_number_of_waiting_lookups_keeps_no_other_request_back(
    tiers: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    scheduler.lookups.budget_s = 30.0  # a busy machine is not taken for a daemon that hangs
    for i in range(2 * MAX_UNANSWERED):
        assert match(scheduler, f"r{i}") is PENDING
        scheduler.new_step()
        if i % 64 == 63:
            scheduler.call(Ping())  # what was asked is taken up, on a busy machine too
    assert scheduler.reserve(ITEMS, WIDTH) is not None
    assert len(tiers.got(Lookup, 2 * MAX_UNANSWERED)) == 2 * MAX_UNANSWERED


def test_promoting_for_what_was_not_asked_ends_the_connection(
    tiers: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    assert match(scheduler) is PENDING  # steps read what comes while an answer is owed
    tiers.push(Promoting(seq=1 << 40))
    assert eventually(lambda: scheduler.new_step() or scheduler.counters["lost"] == 1)  # type: ignore[func-returns-value]


@pytest.mark.alone
def test_a_prefetch_waits_for_nothing(tiers: ScriptedDaemon, scheduler: SchedulerClient) -> None:
    began = time.monotonic()
    context = RequestContext(tenant="red", session=7)
    sent = scheduler.prefetch("r", DIGESTS, WIDTH, 1, context, budget_s=12.0)
    assert sent is not None
    assert not scheduler.prefetched(sent)
    scheduler.end_prefetch(sent)
    assert time.monotonic() - began < 1
    asked, ended = tiers.got(Prefetch, 2)
    assert (asked.request, asked.digests, asked.width) == ("r", DIGESTS, WIDTH)
    assert (asked.budget_ms, asked.first) == (12_000, 1)
    assert (asked.tenant, asked.session) == ("red", 7)
    assert (ended.request, ended.digests) == ("r", b"")
    tiers.push(Pong(seq=1))  # of nobody's: the session ends, and nothing else
    assert eventually(lambda: scheduler.counters["lost"] > 0)
    assert scheduler.prefetched(sent), "with its connection it is over"


def test_prefetches_are_for_daemons_with_tiers_that_put_lookups_first(
    tiers: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    connection = scheduler.connection
    assert connection is not None
    for count, features, ahead in [(1, (AHEAD,), True), (0, (AHEAD,), False), (1, (), False)]:
        connection.welcome = msgspec.structs.replace(
            connection.welcome, tiers=count, features=features
        )
        assert scheduler.promotes_ahead is ahead
    tiers.answers[Prefetch] = lambda m: [Prefetched(seq=m.seq, chunks=2)]
    sent = scheduler.prefetch("r", DIGESTS, WIDTH)
    assert sent is not None
    assert eventually(lambda: scheduler.new_step() or scheduler.prefetched(sent))  # type: ignore[func-returns-value]
