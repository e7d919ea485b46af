"""Lookup and reserve as an engine's scheduler lives them: budgets, held matches, late answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvass.client.connection import DaemonConnection
from kvass.client.lookups import PENDING, Match
from kvass.client.requests import MAX_UNANSWERED
from kvass.client.scheduler import SEND_APART, Reserving, SchedulerClient
from kvass.errors import ErrorCode
from kvass.messages import (
    NO_CONTEXT,
    Abort,
    Error,
    FromClient,
    FromDaemon,
    Grant,
    Granted,
    HandedOver,
    Lookup,
    Matched,
    Ping,
    Register,
    Release,
    RequestContext,
    Reserve,
    ReserveItem,
)
from kvass.types import SHORT_NAME, short_name
from tests.support.waiting import eventually
from tests.support.wire.scripted_daemon import Answer, ScriptedDaemon

WIDTH = 32
DIGESTS = bytes(range(8)) * 4 * WIDTH  # 32 chunks
CHUNKS = len(DIGESTS) // WIDTH
ITEMS = [ReserveItem(request="r", digests=DIGESTS), ReserveItem(request="s", digests=DIGESTS)]


@pytest.fixture
def scheduler(daemon: ScriptedDaemon, registration: Register) -> Iterator[SchedulerClient]:
    """Patient within a step, so that a busy machine changes no outcome."""
    client = SchedulerClient(
        daemon.path, registration, lookup_budget_s=0.5, reserve_wait_s=5, step_wait_s=5
    )
    client.connect(5)
    yield client
    client.close()


def hasty(client: SchedulerClient, budget_s: float = 0.1) -> None:
    """Waits of the real size, for tests in which the daemon does not answer."""
    client._reserve_wait_s, client.step.wait_s, client.lookups.budget_s = 0.001, 0.002, budget_s
    client.new_step()


def match(
    client: SchedulerClient,
    request: str = "r",
    first: int = 0,
    context: RequestContext = NO_CONTEXT,
) -> object:
    return client.match(request, DIGESTS, WIDTH, first, context)


def held(
    client: SchedulerClient,
    request: str = "r",
    first: int = 0,
    context: RequestContext = NO_CONTEXT,
) -> Match:
    found = match(client, request, first, context)
    assert isinstance(found, Match)
    return found


def sync(client: SchedulerClient, daemon: ScriptedDaemon) -> None:
    """Everything sent so far has reached the daemon."""
    client.call(Ping())


def test_short_names_are_short_printable_and_differ() -> None:
    longer = ["x" * (SHORT_NAME + 1), "x" * (SHORT_NAME + 2), "", "\n", "\ud800", "\udfff" * 999]
    short = [*map(short_name, longer)]
    assert all(0 < len(one) <= SHORT_NAME and one.isprintable() for one in short)
    assert short[0].startswith("x" * 223 + "~")
    again = [*map(short_name, short)]  # a client may choose one that is a short name of another
    assert len({*longer, *short, *again}) == 3 * len(longer)
    for same in ("a", "x" * SHORT_NAME, "chatcmpl-~\u00e4\U0001f600"):
        assert short_name(same) == same


def test_a_step_reads_the_socket_only_if_an_answer_is_owed(
    scheduler: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, receive = [], DaemonConnection.receive

    def reading(connection: DaemonConnection, timeout_s: float) -> list[FromDaemon]:
        if threading.current_thread() is threading.main_thread():
            reads.append(timeout_s)
        return receive(connection, timeout_s)

    monkeypatch.setattr(DaemonConnection, "receive", reading)
    scheduler.new_step()
    assert reads == []
    asked = scheduler.submit(Ping())
    scheduler.new_step()
    assert reads == [0.0]
    assert scheduler.wait(asked, 5) is not None


def test_hit_take_and_hand_over(daemon: ScriptedDaemon, scheduler: SchedulerClient) -> None:
    daemon.answers[Lookup] = daemon.hit
    found = held(scheduler, first=3)
    assert (found.first, found.chunks, found.boot) == (3, CHUNKS, daemon.boot)
    assert match(scheduler, first=3) is found  # held, not asked again
    assert scheduler.take("r") is found
    assert scheduler.take("r") is None
    scheduler.give_back("r")  # it is the caller's now
    scheduler.handed_over([found.lease], [], found.boot)
    scheduler.handed_over([], [], found.boot)  # says nothing
    sync(scheduler, daemon)
    assert len(daemon.got(Lookup)) == 1
    assert daemon.got(HandedOver) == [HandedOver(boot=daemon.boot, leases=(found.lease,))]
    assert daemon.got(Release, 0) == []
    assert scheduler.counters["hits"] == 1


def test_miss_is_looked_up_again(daemon: ScriptedDaemon, scheduler: SchedulerClient) -> None:
    assert match(scheduler) is None
    assert match(scheduler) is None
    assert len(daemon.got(Lookup)) == 2
    assert match(scheduler, first=CHUNKS) is None  # nothing to look up
    assert len(daemon.got(Lookup)) == 2
    assert scheduler.counters["misses"] == 2


def test_a_cold_prompt_takes_one_lookup(daemon: ScriptedDaemon, scheduler: SchedulerClient) -> None:
    block = DIGESTS[:WIDTH]
    assert scheduler.match("r", DIGESTS, WIDTH, 1, blocks=lambda _: block) is None
    asked = daemon.got(Lookup)
    assert [(each.again, each.first_blocks) for each in asked] == [(False, block)]


def test_a_match_of_a_lost_connection_is_void_though_its_second_lookup_has_another(
    daemon: ScriptedDaemon, scheduler: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon lived on, and has given its slots to others."""

    def one_chunk(message: FromClient) -> list[FromDaemon]:
        assert isinstance(message, Lookup)
        (reply,) = daemon.hit(message)
        assert isinstance(reply, Matched)
        reply.chunks = 1
        return [daemon.miss(message)[0] if message.again else reply]

    def reconnect(*args: Any) -> object:
        end = answer(*args)
        monkeypatch.undo()
        assert scheduler.connection is not None
        scheduler.fault(scheduler.connection, "lost")
        scheduler.connect(5)
        return end

    daemon.answers[Lookup] = one_chunk
    answer = scheduler.lookups._answer
    monkeypatch.setattr(scheduler.lookups, "_answer", reconnect)
    assert scheduler.match("r", DIGESTS, WIDTH, 0, blocks=lambda _: DIGESTS[:WIDTH]) is None
    assert scheduler.take("r") is None
    assert daemon.got(Release, 0) == []


def test_settle_gives_back_once(daemon: ScriptedDaemon, scheduler: SchedulerClient) -> None:
    daemon.answers[Lookup] = daemon.hit
    found = held(scheduler)
    for _ in range(3):
        scheduler.give_back("r")
    scheduler.give_back("never asked")
    sync(scheduler, daemon)
    assert daemon.got(Release) == [Release(boot=daemon.boot, lease=found.lease)]
    assert scheduler.take("r") is None


def test_another_first_is_another_lookup(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    daemon.answers[Lookup] = daemon.hit
    one, two = held(scheduler, first=4), held(scheduler, first=2)
    assert two.first == 2
    sync(scheduler, daemon)
    assert [m.lease for m in daemon.got(Release)] == [one.lease]
    assert scheduler.take("r") is two


@pytest.mark.parametrize(("left_s", "again"), [(40, False), (29, True), (-1, True)])
def test_half_a_lease_is_too_old(
    daemon: ScriptedDaemon, scheduler: SchedulerClient, left_s: float, again: bool
) -> None:
    daemon.answers[Lookup] = lambda m: daemon.hit(m, left_s)  # the lease's time is 60 s
    one, two = held(scheduler), held(scheduler)
    sync(scheduler, daemon)
    assert len(daemon.got(Release, 0)) == again
    assert (one.lease != two.lease) == again


class Slow:
    """Answers lookups when told to, and everything else at once."""

    def __init__(self, daemon: ScriptedDaemon) -> None:
        self.daemon = daemon
        self.held: list[FromDaemon | bytes] = []
        daemon.answers[Lookup] = self.hold(daemon.hit)

    def hold(self, answer: Answer) -> Answer:
        def keep(message: FromClient) -> list[FromDaemon]:
            self.held += answer(message)
            return []

        return keep

    def let_go(self, count: int = 1) -> None:
        assert eventually(lambda: len(self.held) >= count)
        for reply in self.held:
            self.daemon.push(reply)
        self.held.clear()


def test_pending_then_found(daemon: ScriptedDaemon, scheduler: SchedulerClient) -> None:
    slow = Slow(daemon)
    hasty(scheduler, budget_s=30)
    assert match(scheduler) is PENDING
    assert match(scheduler) is PENDING  # polls
    slow.let_go()
    assert eventually(lambda: isinstance(match(scheduler), Match))
    assert len(daemon.got(Lookup)) == 1
    assert scheduler.take("r") is not None


def test_pending_has_an_end_and_the_late_match_is_released(
    daemon: ScriptedDaemon, scheduler: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, now_s = Slow(daemon), time.monotonic
    hasty(scheduler, budget_s=60)
    assert match(scheduler) is PENDING
    monkeypatch.setattr(time, "monotonic", lambda: now_s() + 30)
    assert match(scheduler) is PENDING
    monkeypatch.setattr(time, "monotonic", lambda: now_s() + 60)
    assert match(scheduler) is None
    # Told once, it is not told to wait again, whatever it asks.
    assert match(scheduler) is None
    assert match(scheduler, first=1) is None
    assert scheduler.counters["timeouts"] >= 1
    slow.let_go()
    late = daemon.got(Release)  # settled by the thread: nobody calls
    assert late[0].rank == -1
    assert scheduler.take("r") is None
    scheduler.give_back("r")
    assert eventually(lambda: scheduler.counters["late_replies"] >= 1)


@pytest.mark.parametrize("how", ["settle", "take", "another first", "clear"])
def test_a_lookup_given_up_is_released_when_it_answers(
    daemon: ScriptedDaemon, scheduler: SchedulerClient, how: str
) -> None:
    slow = Slow(daemon)
    hasty(scheduler, budget_s=30)
    assert match(scheduler) is PENDING
    if how == "settle":
        scheduler.give_back("r")
    elif how == "take":
        assert scheduler.take("r") is None
    elif how == "clear":
        assert scheduler.clear(10)
    else:
        assert match(scheduler, first=1) is PENDING
    slow.let_go()
    assert [m.lease for m in daemon.got(Release)] == [1]


def test_a_step_has_one_budget(daemon: ScriptedDaemon, scheduler: SchedulerClient) -> None:
    Slow(daemon)
    hasty(scheduler, budget_s=30)
    scheduler.step.left_s = 0.1
    began_s = time.monotonic()
    for i in range(200):
        assert match(scheduler, f"r{i}") is PENDING
    assert time.monotonic() - began_s < 5  # and not 200 times 0.1
    assert scheduler.step.left_s == 0 or scheduler.silent_s > 0


def test_a_silent_daemon_is_asked_little_and_then_nothing(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    hasty(scheduler)
    daemon.reading.clear()
    told = {id(match(scheduler, f"r{i}")) for i in range(2 * MAX_UNANSWERED)}
    assert told == {id(PENDING), id(None)}  # no more than that many are asked
    assert scheduler.counters["lookups"] <= 2 * MAX_UNANSWERED
    assert scheduler.reserve(ITEMS, WIDTH) is None
    assert eventually(lambda: scheduler.silent_s > 0.1)
    scheduler.new_step()
    before = scheduler.counters["lookups"]
    assert match(scheduler, "new") is None  # its patience would be wasted
    assert scheduler.counters["lookups"] == before
    daemon.reading.set()

    def answered() -> bool:
        scheduler.new_step()
        return scheduler.silent_s == 0

    assert eventually(answered)
    assert daemon.got(Reserve, 0) == []


def test_lost_while_pending_is_a_miss(daemon: ScriptedDaemon, scheduler: SchedulerClient) -> None:
    Slow(daemon)
    hasty(scheduler, budget_s=30)
    assert match(scheduler) is PENDING
    daemon.kill()
    assert eventually(lambda: match(scheduler) is None)
    assert match(scheduler, "other") is None


def test_a_held_match_dies_with_its_connection(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    daemon.answers[Lookup] = daemon.hit
    for request in ("kept", "asked again"):
        assert isinstance(match(scheduler, request), Match)
    old = daemon.boot
    daemon.restart()
    assert eventually(lambda: scheduler.connected and scheduler.counters["connects"] == 2)
    assert scheduler.take("kept") is None
    found = held(scheduler, "asked again")
    assert found.boot == daemon.boot != old
    sync(scheduler, daemon)
    assert daemon.got(Release, 0) == []  # nothing of another life is named to it


@pytest.mark.parametrize(
    "change",
    [
        {"boot": b"another boot 16b"},
        {"first": 1},
        {"chunks": CHUNKS + 1},
        {"chunks": -1},
        {"lease": 0},
        {"spare": 1},
    ],
)
def test_a_match_of_what_was_not_asked_for_ends_the_connection(
    daemon: ScriptedDaemon, scheduler: SchedulerClient, change: dict[str, object]
) -> None:
    daemon.answers[Lookup] = lambda m: [msgspec.structs.replace(daemon.hit(m)[0], **change)]
    assert match(scheduler) is None
    assert scheduler.counters["lost"] == 1
    assert eventually(lambda: scheduler.connected)
    daemon.answers[Lookup] = daemon.hit
    assert isinstance(match(scheduler), Match)


def test_spare_chunks_are_asked_for(daemon: ScriptedDaemon, registration: Register) -> None:
    daemon.answers[Lookup] = lambda m: [msgspec.structs.replace(daemon.hit(m)[0], spare=1)]
    client = SchedulerClient(daemon.path, registration, spare=1, step_wait_s=5)
    client.connect(5)
    assert isinstance(match(client), Match)
    assert [asked.spare for asked in daemon.got(Lookup)] == [1]
    client.close()


def test_a_refused_lookup_is_a_miss(daemon: ScriptedDaemon, scheduler: SchedulerClient) -> None:
    daemon.answers[Lookup] = lambda m: [Error(seq=m.seq, code="limit", text="fewer leases")]
    assert match(scheduler) is None
    assert scheduler.counters["refused_limit"] == 1
    assert scheduler.connected


@pytest.mark.alone
def test_an_absent_daemon_is_a_miss_at_once(tmp_path: Path, registration: Register) -> None:
    scheduler = SchedulerClient(str(tmp_path / "none"), registration)
    began_s = time.monotonic()
    scheduler.new_step()
    assert match(scheduler) is None
    assert scheduler.take("r") is None
    scheduler.give_back("r")
    assert scheduler.reserve(ITEMS, WIDTH) is None
    scheduler.handed_over([1], [2], b"b" * 16)
    assert time.monotonic() - began_s < 0.25
    assert not scheduler.clear(5)
    assert not scheduler.connected
    scheduler.close()


def test_reserve(daemon: ScriptedDaemon, scheduler: SchedulerClient) -> None:
    granted = scheduler.reserve(ITEMS, WIDTH)
    assert granted is not None
    assert [grant.reservation for grant in granted.grants] == [1, 2]
    assert scheduler.reserve([], WIDTH) is None
    scheduler.abort(granted.boot, 1)
    scheduler.handed_over([], [2], granted.boot)
    sync(scheduler, daemon)
    assert daemon.got(Abort) == [Abort(boot=daemon.boot, reservation=1)]
    assert len(daemon.got(Reserve)) == 1


def test_a_late_grant_is_aborted_and_nothing_reserved_meanwhile(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    slow = Slow(daemon)
    daemon.answers[Reserve] = slow.hold(daemon.grant)
    hasty(scheduler)
    assert scheduler.reserve(ITEMS, WIDTH) is None
    assert scheduler.reserve(ITEMS, WIDTH) is None
    slow.let_go()
    assert [m.reservation for m in daemon.got(Abort, 2)] == [1, 2]
    assert {m.rank for m in daemon.got(Abort)} == {-1}
    assert len(daemon.got(Reserve)) == 1
    daemon.answers[Reserve] = daemon.grant
    scheduler._reserve_wait_s = 5
    assert scheduler.reserve(ITEMS, WIDTH) is not None  # it answers again


def refusing(code: ErrorCode) -> Answer:
    """The answer of a daemon that refuses with this code."""
    return lambda message: [Error(seq=message.seq, code=code, text="no")]


def test_a_refused_reserve_says_whether_its_items_may_be_sent_apart(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    codes: dict[ErrorCode, object] = {"bad_value": SEND_APART, "limit": SEND_APART}
    for code, answer in {**codes, "not_registered": None}.items():
        daemon.answers[Reserve] = refusing(code)
        reserving = scheduler.begin_reserve(ITEMS, WIDTH)
        assert reserving is not None
        assert scheduler.granted(reserving) is answer
        assert scheduler.reserve(ITEMS, WIDTH) is None


def test_a_refused_item_is_counted_and_logged_once(
    daemon: ScriptedDaemon, scheduler: SchedulerClient, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(message: FromClient) -> list[FromDaemon]:
        grants = [Grant(reservation=1, chunks=(0,)), Grant(error="request: too long")]
        return [Granted(seq=message.seq, boot=daemon.boot, grants=grants)]

    daemon.answers[Reserve] = answer
    for _ in range(2):
        assert scheduler.reserve(ITEMS, WIDTH) is not None
    assert scheduler.counters["refused_bad_value"] == 2
    assert len([r for r in caplog.records if "request: too long" in r.getMessage()]) == 1


@pytest.mark.parametrize("name", ["x" * 5_000, "\ud800", ""])
def test_a_request_of_any_name_is_looked_up_under_a_short_one(
    daemon: ScriptedDaemon, scheduler: SchedulerClient, name: str
) -> None:
    daemon.answers[Lookup] = daemon.hit
    found = held(scheduler, name)
    assert daemon.got(Lookup)[0].request == short_name(name) != name
    assert scheduler.take(name) is found


def test_grants_that_come_in_a_later_step_are_handed_over(
    daemon: ScriptedDaemon, scheduler: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several may be on their way; none is waited for once the daemon is slow."""
    monkeypatch.setattr("kvass.client.scheduler.LATE_S", 60.0)
    slow = Slow(daemon)
    daemon.answers[Reserve] = slow.hold(daemon.grant)
    hasty(scheduler)
    first, second = (asked(scheduler) for _ in range(2))
    assert second.wait_s == 0
    assert scheduler.granted(second) is PENDING
    assert scheduler.answering
    time.sleep(0.4)  # the daemon of a busy machine
    assert scheduler.granted(first) is PENDING
    slow.let_go(2)
    daemon.answers[Reserve] = daemon.grant
    scheduler.call(Ping())  # behind them
    scheduler.new_step()
    reservations = []
    for one in (first, second):
        granted = scheduler.granted(one)
        assert isinstance(granted, Granted)
        reservations += [grant.reservation for grant in granted.grants]
    assert scheduler.handed_over([], reservations, daemon.boot)
    assert daemon.got(HandedOver)[0].reservations == tuple(reservations) == (1, 2, 3, 4)
    assert daemon.got(Abort, 0) == []


def test_a_lookup_is_waited_for_once_the_late_answer_is_there(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    """Also if nobody has read that answer yet."""
    slow = Slow(daemon)

    def answer(message: FromClient) -> list[FromDaemon]:
        time.sleep(0.05)  # not there yet when it is first looked for
        return daemon.hit(message)

    daemon.answers |= {Reserve: slow.hold(daemon.grant), Lookup: answer}
    hasty(scheduler)
    asked(scheduler)
    slow.let_go()
    scheduler.step.left_s = 5
    assert isinstance(match(scheduler), Match)


def asked(scheduler: SchedulerClient) -> Reserving:
    """A reserve that is not answered at once."""
    reserving = scheduler.begin_reserve(ITEMS, WIDTH)
    assert reserving is not None
    assert scheduler.granted(reserving) is PENDING
    return reserving


def test_a_reserve_need_not_wait_for_its_grant(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    slow = Slow(daemon)
    daemon.answers[Reserve] = slow.hold(daemon.grant)
    reserving = scheduler.begin_reserve(ITEMS, WIDTH, wait=False)
    assert reserving is not None
    assert scheduler.granted(reserving) is PENDING
    assert scheduler.silent_s == 0.0, "the daemon is not late"
    slow.let_go()
    assert eventually(lambda: scheduler.granted(reserving) is not PENDING)


def test_a_daemon_that_answers_no_reserve_is_asked_no_more(
    daemon: ScriptedDaemon, scheduler: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a reserve, so nobody else would notice it: an engine may only store."""
    monkeypatch.setattr("kvass.client.scheduler.LATE_S", soon_s := 0.25)
    slow = Slow(daemon)
    daemon.answers[Reserve] = slow.hold(daemon.grant)
    reserving = scheduler.begin_reserve(ITEMS, WIDTH, wait=False)
    assert reserving is not None
    assert eventually(lambda: scheduler.granted(reserving) is None)
    assert scheduler.silent_s >= soon_s
    assert not scheduler.answering
    slow.let_go()
    assert daemon.got(Abort, 2)
    assert eventually(lambda: scheduler.answering)


def test_a_daemon_whose_late_answer_has_just_come_is_not_silent(
    daemon: ScriptedDaemon, scheduler: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread reads it just after the scheduler has looked for it. No answer is owed then, so no
    message would end the silence."""
    slow = Slow(daemon)
    daemon.answers[Reserve] = slow.hold(daemon.grant)
    hasty(scheduler)
    reserving, look = asked(scheduler), scheduler.wait

    def answered() -> bool:
        scheduler.poll()
        return scheduler.connection is not None and not scheduler.connection.requests.owed

    def wait(seq: int, timeout_s: float) -> FromDaemon | None:
        assert look(seq, timeout_s) is None
        slow.let_go()
        assert eventually(answered)
        return None

    monkeypatch.setattr(scheduler, "wait", wait)
    monkeypatch.setattr("kvass.client.scheduler.LATE_S", 0.0)
    assert scheduler.granted(reserving) is None
    assert scheduler.silent_s == 0
    assert scheduler.answering
    assert daemon.got(Abort)


@pytest.mark.parametrize("how", ["gone", "silent", "refuses"])
def test_a_grant_that_will_not_come_is_not_awaited(
    daemon: ScriptedDaemon, scheduler: SchedulerClient, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvass.client.scheduler.LATE_S", 60.0)
    slow = Slow(daemon)
    daemon.answers[Reserve] = slow.hold(daemon.grant)
    hasty(scheduler)
    one = asked(scheduler)
    if how == "silent":
        monkeypatch.setattr("kvass.client.scheduler.LATE_S", soon_s := 0.25)
    elif how == "gone":
        daemon.kill()
    else:
        assert eventually(lambda: bool(slow.held))
        slow.held[:] = [Error(seq=one.seq, code="limit", text="too much")]
        slow.let_go()
    assert eventually(lambda: scheduler.granted(one) is None)
    if how != "silent":
        return
    assert time.monotonic() - one.asked_s >= soon_s
    assert eventually(lambda: not scheduler.answering)
    assert scheduler.begin_reserve(ITEMS, WIDTH) is None
    slow.let_go()
    assert [m.reservation for m in daemon.got(Abort, 2)] == [1, 2]
    assert scheduler.answering


def test_grants_of_something_else_end_the_connection(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    daemon.answers[Reserve] = lambda m: [Granted(seq=m.seq, boot=daemon.boot)]
    assert scheduler.reserve(ITEMS, WIDTH) is None
    assert scheduler.counters["lost"] == 1


def test_lookups_are_cut_to_the_daemons_limits(
    daemon: ScriptedDaemon, registration: Register
) -> None:
    daemon.welcome = lambda welcome: msgspec.structs.replace(
        welcome,
        limits=msgspec.structs.replace(welcome.limits, keys_per_message=8, frame_bytes=600),
    )
    daemon.answers[Lookup] = daemon.hit
    scheduler = SchedulerClient(daemon.path, registration, step_wait_s=5)
    scheduler.connect(5)
    found = held(scheduler)
    assert found.chunks == 8
    assert scheduler.reserve(ITEMS, WIDTH) is None  # more than one frame may hold
    assert scheduler.counters["too_large"] == 1
    assert scheduler.connected
    scheduler.close()
