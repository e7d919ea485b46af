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
from tests.client.test_scheduler import CHUNKS, DIGESTS, WIDTH, hasty, match
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

    assert scheduler.ended_by("r") == ""
    daemon.answers[Lookup] = missed
    assert match(scheduler) is None
    assert scheduler.ended_by("r") == "evicted"
    context = RequestContext(
        prompt_tokens=1000, local_tokens=32, if_absent="other_salt", tenant="t"
    )
    scheduler.match("r", DIGESTS, WIDTH, 0, context)
    asked = context_of(daemon.got(Lookup)[-1])
    assert asked.budget_ms, "which the client adds"
    assert asked == msgspec.structs.replace(context, budget_ms=asked.budget_ms)
    daemon.answers[Lookup] = daemon.hit
    match(scheduler, first=1)
    assert scheduler.ended_by("r") == ""
    assert match(scheduler, first=CHUNKS) is None
    assert scheduler.ended_by("r") == "", "nothing was to be asked"
    scheduler.give_back("r")
    assert scheduler.ended_by("r") == ""


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
    scheduler.match("r", DIGESTS, WIDTH, 0, blocks=lambda _: DIGESTS[:WIDTH])
    assert len(daemon.got(Lookup)) == 2
    assert scheduler.ended_by("r") == "absent"


def test_a_daemon_that_is_late_refuses_or_is_gone(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    daemon.answers[Lookup] = lambda m: [Error(seq=m.seq, code="limit", text="no")]
    assert match(scheduler, "refused") is None
    assert scheduler.ended_by("refused") == "refused"
    daemon.answers[Lookup] = lambda m: []
    hasty(scheduler, budget_s=0.05)
    eventually(lambda: match(scheduler, "late") is not PENDING)
    assert scheduler.ended_by("late") == "no_answer"
    eventually(lambda: match(scheduler, "next") is not PENDING)
    assert scheduler.ended_by("next") == "no_answer"
    daemon.kill()
    eventually(lambda: not scheduler.connected)
    assert match(scheduler, "gone") is None
    assert scheduler.ended_by("gone") == "no_daemon"


def test_too_many_requests_are_open_and_a_clear_is_not_confirmed(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    daemon.answers[Ping] = lambda m: []
    while scheduler.submit(Ping()):
        pass
    assert match(scheduler) is None
    assert scheduler.ended_by("r") == "not_sent"
    assert len(daemon.got(Ping, MAX_UNANSWERED)) == MAX_UNANSWERED
    daemon.answers[Clear] = lambda m: []
    daemon.restart()
    eventually(lambda: scheduler.connected)
    assert not scheduler.clear(0.01)
    assert match(scheduler) is None
    assert scheduler.ended_by("r") == "clearing"


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
