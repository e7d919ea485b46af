"""Weights replaced in place: what an engine's scheduler says to the real daemon, and to one that
starts again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvass.client import reconnecting
from kvass.client.connection import open_connection
from kvass.client.lookups import Match
from kvass.client.scheduler import SchedulerClient
from kvass.messages import Clear, Error, FromClient, Lookup, Register
from kvass.testing.daemon import Daemon
from tests.client.test_real_daemon import Engine, reconnect
from tests.client.test_real_daemon import daemon as real_daemon
from tests.client.test_scheduler import ITEMS, WIDTH, match, sync
from tests.support.waiting import eventually
from tests.support.wire.scripted_daemon import ScriptedDaemon

real = real_daemon
Pair = tuple[Engine, Engine]


def named(registration: Register, name: str) -> Register:
    return msgspec.structs.replace(registration, instance=name)


@pytest.fixture
def pair(real: Daemon, registration: Register, worker_registration: Register) -> Iterator[Pair]:
    """Two engines that share a namespace, and a row of both."""
    a, b = (
        Engine(real.socket, named(registration, name), named(worker_registration, name))
        for name in "ab"
    )
    assert eventually(lambda: a.connected and b.connected)
    assert a.store("old")
    assert eventually(lambda: a.load("old") and b.load("old"))
    yield a, b
    a.close()
    b.close()


def check_apart(a: Engine, b: Engine) -> None:
    """Neither finds what the other stores from now on, and each what it stores itself."""
    for who, prompt in ((a, "of a"), (b, "of b")):
        assert eventually(lambda who=who, prompt=prompt: who.store(prompt) or who.load(prompt))  # type: ignore[misc]
        assert eventually(lambda who=who, prompt=prompt: who.load(prompt))  # type: ignore[misc]
    assert not a.load("of b")
    assert not b.load("of a")


@pytest.mark.parametrize("restart", [False, True])
def test_whoever_connects_again_is_of_the_same_generation(
    real: Daemon, pair: Pair, restart: bool
) -> None:
    a, b = pair
    a.scheduler.new_generation()
    assert a.store("x")
    if restart:
        real.restart()
        assert eventually(lambda: a.scheduler.counters["connects"] == 2 and a.worker.connected)
        assert eventually(lambda: b.connected)
    else:
        reconnect(a.scheduler)
        assert eventually(lambda: a.load("x")), "a lost connection loses no row"
    assert not a.load("old")
    check_apart(a, b)


@pytest.mark.parametrize("clears", [False, True])
def test_a_reset_that_no_daemon_hears_is_known_to_the_next(
    real: Daemon, pair: Pair, clears: bool
) -> None:
    a, b = pair
    real.kill()
    assert eventually(lambda: not a.connected)
    if clears:
        assert not a.scheduler.clear(0.05)
    a.scheduler.new_generation()
    real.start()
    assert eventually(lambda: a.connected and b.connected)
    check_apart(a, b)


@pytest.mark.parametrize("clears", [False, True])
def test_a_suspended_daemon_gives_no_row_of_before(real: Daemon, pair: Pair, clears: bool) -> None:
    a, b = pair
    a.scheduler.step.wait_s = a.scheduler.step.left_s = 0.02
    real.suspend()
    if clears:
        assert not a.scheduler.clear(0.05)
    a.scheduler.new_generation()
    assert not a.scheduler.answering
    assert not a.load("old")
    assert not a.store("meanwhile")
    a.scheduler.new_generation()  # the first is still on its way
    real.resume()

    def known() -> bool:
        assert not a.load("old")
        return a.scheduler.answering

    assert eventually(known)
    a.scheduler.step.wait_s = 20
    assert not a.load("old")
    assert b.load("old") != clears
    check_apart(a, b)


# ---------------------------------------------------------------- what is said, and when


@pytest.fixture
def scheduler(daemon: ScriptedDaemon, registration: Register) -> Iterator[SchedulerClient]:
    """Of a daemon that hits every lookup."""
    daemon.answers[Lookup] = daemon.hit
    client = SchedulerClient(daemon.path, registration, reserve_wait_s=5, step_wait_s=5)
    client.connect(5)
    yield client
    client.close()


def said(daemon: ScriptedDaemon) -> list[FromClient]:
    """Who said what it is, and what was cleared, in order."""
    return [one for one in daemon.received if isinstance(one, Register | Clear)]


def test_a_clear_is_confirmed_in_the_namespace_that_is_left(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    """So a clear that no tier could note is not one of the generation that nobody has yet."""
    clears = daemon.answers[Clear]
    daemon.answers[Clear] = lambda m: [Error(seq=m.seq, code="tier_down", text="later")]
    assert isinstance(match(scheduler), Match)
    assert not scheduler.clear(5)
    scheduler.new_generation()
    assert match(scheduler) is None
    daemon.restart()
    assert eventually(lambda: scheduler.counters["connects"] == 2)
    daemon.answers[Clear] = clears
    scheduler._reset._not_before_s = 0.0
    assert eventually(lambda: scheduler.new_step() or scheduler.answering)  # type: ignore[func-returns-value]
    assert isinstance(match(scheduler), Match)
    old, *others, new = said(daemon)
    assert [type(one) for one in others] == [Clear, Register, Clear]
    assert [one.generation for one in (old, others[1]) if isinstance(one, Register)] == [b"", b""]
    assert isinstance(new, Register)
    assert len(new.generation) == 16
    daemon.restart()
    assert eventually(lambda: scheduler.counters["connects"] == 3)
    last = daemon.got(Register, 4)[-1]
    assert last.generation == new.generation


def test_every_generation_is_another(daemon: ScriptedDaemon, scheduler: SchedulerClient) -> None:
    for _ in range(3):
        scheduler.new_generation()
        assert isinstance(match(scheduler), Match)
    sync(scheduler, daemon)
    generations = [m.generation for m in daemon.got(Register, 4)]
    assert len(set(generations)) == 4


def test_a_refused_move_is_said_again_but_not_in_every_step(
    daemon: ScriptedDaemon, scheduler: SchedulerClient
) -> None:
    registers = daemon.answers[Register]
    daemon.answers[Register] = lambda m: [Error(seq=m.seq, code="limit", text="namespaces")]
    scheduler.new_generation()
    for _ in range(20):
        scheduler._reset._not_before_s += 60  # as if no time passed
        scheduler.new_step()
        assert match(scheduler) is None
        assert scheduler.reserve(ITEMS, WIDTH) is None
    sync(scheduler, daemon)
    assert len(daemon.got(Register)) == 2
    daemon.answers[Register] = registers
    scheduler._reset._not_before_s = 0.0
    assert eventually(lambda: scheduler.new_step() or scheduler.answering)  # type: ignore[func-returns-value]
    assert isinstance(match(scheduler), Match)
    assert scheduler.counters["refused_limit"] == 1


def test_who_was_just_connecting_as_before_is_not_let_in(
    daemon: ScriptedDaemon, registration: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a lookup that saw no connection could go out on one that is of the old weights."""
    client = SchedulerClient(daemon.path, registration)

    def slowly(*args: Any, **options: Any) -> Any:
        opened = open_connection(*args, **options)
        if not client._reset.registration.generation:
            client.new_generation()
        return opened

    monkeypatch.setattr(reconnecting, "open_connection", slowly)
    client.connect(5)
    connection = client.connection
    assert connection is not None
    assert connection.registration is not None
    assert connection.registration.generation
    client.close()
