"""Why a match was not longer, as a scheduler's client says it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kvass.client.lookups import PENDING
from kvass.client.requests import MAX_UNANSWERED
from kvass.client.scheduler import SchedulerClient
from kvass.messages import (
    Clear,
    Error,
    FromClient,
    FromDaemon,
    Lookup,
    LookupNote,
    LookupNotes,
    Matched,
    Ping,
    Register,
    RequestContext,
    Welcome,
    context_of,
)
from tests.client.test_scheduler import CHUNKS, DIGESTS, WIDTH, hasty
from tests.support.waiting import eventually
from tests.support.wire.scripted_daemon import ScriptedDaemon

NOTES = [LookupNote(request="r", why="no_daemon")]


@pytest.fixture
def scheduler(daemon: ScriptedDaemon, registration: Register) -> Iterator[SchedulerClient]:
    client = SchedulerClient(
        daemon.path, registration, lookup_budget_s=0.5, reserve_wait_s=5, step_wait_s=5
    )
    client.connect(5)
    yield client
    client.close()


def ended_by(client: SchedulerClient, request: str = "r", first: int = 0) -> str:
    """Why a miss is one; empty while the answer is pending, too."""
    found = client.look_up(request, DIGESTS, WIDTH, first)
    assert found.match is PENDING or found.match is None
    return found.why


def explains(daemon: ScriptedDaemon) -> None:
    """From the next connection on, the daemon knows notes."""

    def welcome(given: Welcome) -> Welcome:
        given.features = ("explain",)
        return given

    daemon.welcome = welcome


def test_the_daemon_says_it(daemon: ScriptedDaemon, scheduler: SchedulerClient) -> None:
    def missed(message: FromClient) -> list[FromDaemon]:
        assert isinstance(message, Lookup)
        first = message.first
        return [
            Matched(seq=message.seq, boot=daemon.boot, first=first, chunks=first, why="evicted")
        ]

    daemon.answers[Lookup] = missed
    assert ended_by(scheduler) == "evicted"
    context = RequestContext(
        prompt_tokens=1000, local_tokens=32, if_absent="other_salt", tenant="t"
    )
    scheduler.look_up("r", DIGESTS, WIDTH, 0, context)
    asked = context_of(daemon.got(Lookup)[-1])
    assert asked.budget_ms, "which the client adds"
    assert asked == msgspec.structs.replace(context, budget_ms=asked.budget_ms)
    daemon.answers[Lookup] = daemon.hit
    assert scheduler.look_up("r", DIGESTS, WIDTH, 1).why == ""
    assert ended_by(scheduler, first=CHUNKS) == "", "nothing was to be asked"


def test_the_second_lookup_does_not_change_the_reason(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    def one_chunk(message: FromClient) -> list[FromDaemon]:
        assert isinstance(message, Lookup)
        (reply,) = daemon.hit(message)
        assert isinstance(reply, Matched)
        reply.chunks, reply.why = 1, "absent"
        return [daemon.miss(message)[0] if message.again else reply]

    daemon.answers[Lookup] = one_chunk
    found = scheduler.look_up("r", DIGESTS, WIDTH, 0, blocks=lambda _: DIGESTS[:WIDTH])
    assert len(daemon.got(Lookup)) == 2
    assert found.why == "absent"


def test_a_daemon_that_is_late_refuses_or_is_gone(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    daemon.answers[Lookup] = lambda m: [Error(seq=m.seq, code="limit", text="no")]
    assert ended_by(scheduler, "refused") == "refused"
    daemon.answers[Lookup] = lambda m: []
    hasty(scheduler, budget_s=0.05)
    assert eventually(lambda: ended_by(scheduler, "late") == "no_answer")
    assert eventually(lambda: ended_by(scheduler, "next") == "no_answer")
    daemon.kill()
    eventually(lambda: not scheduler.connected)
    assert ended_by(scheduler, "gone") == "no_daemon"


def test_too_many_requests_are_open_and_a_clear_is_not_confirmed(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    daemon.answers[Ping] = lambda m: []
    while scheduler.submit(Ping()):
        pass
    assert ended_by(scheduler) == "not_sent"
    assert len(daemon.got(Ping, MAX_UNANSWERED)) == MAX_UNANSWERED
    daemon.answers[Clear] = lambda m: []
    daemon.restart()
    eventually(lambda: scheduler.connected)
    assert not scheduler.clear(0.01)
    assert ended_by(scheduler) == "clearing"


def test_notes_wait_for_a_daemon_and_an_older_one_gets_none(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    assert scheduler.note_lookups(NOTES), "they need not be kept"
    explains(daemon)
    daemon.kill()
    eventually(lambda: not scheduler.connected)
    assert not scheduler.note_lookups(NOTES)
    daemon.restart()
    eventually(lambda: scheduler.connected)
    assert scheduler.note_lookups(NOTES)
    (sent,) = daemon.got(LookupNotes)
    assert (sent.boot, sent.notes) == (daemon.boot, tuple(NOTES))
