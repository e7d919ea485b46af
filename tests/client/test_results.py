"""Results of lookups: each is sent once, to the daemon that answered, with what is sent anyway."""

from __future__ import annotations

import msgspec
import pytest

from kvass.client import results
from kvass.client.scheduler import SchedulerClient
from kvass.messages import (
    MOST_RESULTS,
    RESULTS,
    HandedOver,
    Lookup,
    LookupResult,
    Ping,
    Register,
    RequestContext,
    Welcome,
)
from tests.client.test_scheduler import DIGESTS, WIDTH, held, match
from tests.support.wire.scripted_daemon import ScriptedDaemon

ONE, OTHER = LookupResult("r", 64, 48), LookupResult("s", 64)
REPORTED = RequestContext(reported=True)


def connected(daemon: ScriptedDaemon, registration: Register) -> SchedulerClient:
    client = SchedulerClient(daemon.path, registration, lookup_budget_s=0.5, step_wait_s=5)
    client.connect(5)
    daemon.answers[Lookup] = daemon.hit
    return client


def knows_results(welcome: Welcome) -> Welcome:
    return msgspec.structs.replace(welcome, features=(RESULTS,))


def got(daemon: ScriptedDaemon, client: SchedulerClient) -> list[HandedOver]:
    client.call(Ping())
    return daemon.got(HandedOver, 0)


def test_results_are_sent_with_the_next_message_and_once(
    daemon: ScriptedDaemon, registration: Register
) -> None:
    daemon.welcome = knows_results
    client = connected(daemon, registration)
    for result in (ONE, OTHER):
        client.report(result, daemon.boot)
    client.new_step()
    assert got(daemon, client) == []
    assert not client.handed_over([7], [], daemon.boot), "of another connection"
    client.speed(9.5)
    for _ in range(2):
        lease = held(client, context=REPORTED).lease
        assert client.take("r")
        assert client.handed_over([lease], [], daemon.boot)
    assert daemon.got(Lookup)[0].reported
    first, second = got(daemon, client)
    assert (first.results, first.prefill_tokens_s) == ((ONE, OTHER), 9.5)
    assert (second.results, second.prefill_tokens_s) == ((), 0.0)
    client.close()


def test_without_another_message_they_are_sent_a_little_later_or_at_once_if_asked(
    daemon: ScriptedDaemon, registration: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.welcome = knows_results
    client = connected(daemon, registration)
    client.report(ONE, daemon.boot)
    monkeypatch.setattr(results, "SEND_S", 0.0)
    client.new_step()
    client.new_step()
    assert [m.results for m in got(daemon, client)] == [(ONE,)]
    client.report_all()
    assert len(got(daemon, client)) == 1, "there is nothing to say"
    client.speed(9.5)
    client.report_all()
    client.report_all()
    told = got(daemon, client)[1:]
    assert [(m.results, m.prefill_tokens_s) for m in told] == [((), 9.5)], "a speed that is new"
    for _ in range(MOST_RESULTS + 1):
        client.report(OTHER, daemon.boot)
    assert [len(m.results) for m in got(daemon, client)[2:]] == [MOST_RESULTS]
    client.close()
    assert [len(m.results) for m in daemon.got(HandedOver, 4)[3:]] == [1]


def test_a_daemon_that_counts_answers_gets_none(
    daemon: ScriptedDaemon, registration: Register
) -> None:
    """Nor does one that counts results, of lookups of another run or that are not reported."""
    client = connected(daemon, registration)
    assert match(client, context=REPORTED)
    assert not daemon.got(Lookup)[0].reported
    assert client.look_up("r", DIGESTS, WIDTH, 0).boot == b""
    client.close()
    daemon.welcome = knows_results
    client = connected(daemon, registration)
    assert match(client)
    assert not daemon.got(Lookup, 2)[1].reported
    client.report(ONE, b"another run")
    client.report_all()
    assert client.take("r")
    assert client.handed_over([7], [], daemon.boot)
    assert [m.results for m in got(daemon, client)] == [()]
    client.close()


def test_a_result_of_a_former_run_of_the_daemon_costs_those_of_this_one_nothing(
    daemon: ScriptedDaemon, registration: Register
) -> None:
    daemon.welcome = knows_results
    client = connected(daemon, registration)
    client.report(ONE, daemon.boot)
    client.report(OTHER, b"the boot before")
    client.report_all()
    assert [each.results for each in got(daemon, client)] == [(ONE,)]
