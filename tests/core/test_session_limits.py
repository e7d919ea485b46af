"""Who may have a session: nobody takes all places, and the daemon's own user can always look."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.clients.session_limits import OBSERVERS
from kvass.core.effects import Close, Opened, Send, Tick
from kvass.types import PAGE, Timing
from tests.core.rig import Rig, layout

HELLO_S = Timing().hello_s
OWN, OTHER, THIRD = 1, 2, 3


def knock(rig: Rig, uid: int = OWN, hello: bool = True) -> int:
    """A session of a user; ``OWN`` is the daemon's."""
    return rig.open(hello, uid=uid, own=uid == OWN)


def gone(rig: Rig) -> list[int]:
    """Which sessions the last event ended, each with a reason."""
    told = [e.session for e in rig.last if isinstance(e, Send) and isinstance(e.message, m.Error)]
    closed = [e.session for e in rig.last if isinstance(e, Close)]
    assert told == closed
    return closed


def test_who_does_not_say_hello_in_time_is_ended() -> None:
    rig = Rig()
    early, polite = knock(rig, hello=False), knock(rig)
    rig.wait(HELLO_S / 2)
    late = knock(rig, hello=False)
    assert rig.machine.next_deadline() == rig.now + HELLO_S / 2
    rig.wait(HELLO_S / 2)
    assert gone(rig) == [early]
    error = rig.last[0]
    assert isinstance(error, Send)
    assert isinstance(error.message, m.Error)
    assert (error.message.code, error.message.fatal) == ("limit", True)
    rig.wait(HELLO_S / 2)
    assert gone(rig) == [late]
    assert rig.machine.next_deadline() is None
    rig.wait(1000)
    assert isinstance(rig.ask(polite, m.Ping(seq=3)), m.Pong)


def test_a_hello_that_waited_for_a_daemon_that_stood_still_counts() -> None:
    """What has arrived is read before time is looked at."""
    rig = Rig()
    session = knock(rig, hello=False)
    rig.now += 2 * HELLO_S
    assert isinstance(rig.ask(session, m.Hello(seq=1, clock_s=rig.now)), m.Welcome)
    rig.step(Tick())
    assert gone(rig) == []


def test_who_has_said_nothing_gives_way() -> None:
    rig = Rig(sessions=4)
    silent = [knock(rig, OTHER, hello=False) for _ in range(3)]
    polite = knock(rig, OTHER)
    for session in silent:
        newcomer = knock(rig, OTHER, hello=False)
        assert gone(rig) == [session]
        rig.say(newcomer, m.Hello(seq=1, clock_s=rig.now))
    assert polite in rig.machine.state.sessions
    assert gone_at_opening(rig, OTHER)
    assert rig.status["sessions"] == 4


def gone_at_opening(rig: Rig, uid: int) -> bool:
    """Whether the next session of a user is refused."""
    session = knock(rig, uid, hello=False)
    assert gone(rig) in ([], [session])
    return bool(gone(rig))


def test_no_user_takes_all_places() -> None:
    rig = Rig(sessions=4, sessions_per_uid=3)
    mine = [knock(rig, OTHER) for _ in range(3)]
    assert gone_at_opening(rig, OTHER)
    third = knock(rig, THIRD, hello=False)
    assert gone(rig) == []
    assert gone_at_opening(rig, OTHER)  # only a silent session of its own would have to go
    assert third in rig.machine.state.sessions
    rig.lose(mine[0])
    knock(rig, OTHER)
    assert gone(rig) == []


@pytest.mark.parametrize("limits", [{"sessions": 2}, {"sessions_per_uid": 2}])
def test_the_daemons_own_user_can_always_look(limits: dict[str, int]) -> None:
    rig = Rig(**limits)
    e = rig.engine(uid=OWN, own=True)
    for _ in range(3 * OBSERVERS):
        session = knock(rig)
        assert isinstance(rig.ask(session, m.Status(seq=3)), m.StatusReply)
        assert rig.ask(session, m.Clear(seq=4, everything=True)).rows == 0
    assert rig.status["sessions"] == 2 + OBSERVERS
    assert isinstance(rig.ask(e.scheduler, m.Ping(seq=5)), m.Pong)


def test_who_may_only_look_does_not_register_until_there_is_a_place() -> None:
    rig = Rig(sessions=2)
    first, _ = knock(rig), knock(rig)
    looker = knock(rig)
    refused = rig.register(looker, rank=0, layout=layout(1))
    assert (refused.code, refused.fatal) == ("limit", False)
    assert rig.status["instances"] == 0
    rig.lose(first)
    assert isinstance(rig.register(looker, rank=0, layout=layout(1)), m.Registered)
    for _ in range(2 * OBSERVERS):
        knock(rig)
    assert isinstance(rig.register(looker, rank=0, layout=layout(1)), m.Registered)
    assert rig.register(knock(rig), "another").code == "limit"


def test_an_engine_is_never_ended_for_a_place() -> None:
    """Law 3: it may owe."""
    rig = Rig(sessions=3)
    e = rig.engine(uid=OTHER)
    silent = knock(rig, OTHER, hello=False)
    for _ in range(3 * OBSERVERS):
        knock(rig)
    assert silent not in rig.machine.state.sessions
    assert {e.scheduler, *e.workers} <= rig.machine.state.sessions.keys()
    assert e.store("a").chunks == (0,)


def test_who_may_not_connect_takes_nobodys_place() -> None:
    rig = Rig(sessions=1)
    silent = knock(rig, hello=False)
    rig.step(Opened(99, OTHER, refusal="not you"))
    assert gone(rig) == [99]
    error = rig.last[0]
    assert isinstance(error, Send)
    assert error.message == m.Error(code="forbidden", text="not you", fatal=True)
    assert silent in rig.machine.state.sessions


def test_places_come_back() -> None:
    rig = Rig(sessions=3, sessions_per_uid=2, pages=4 * PAGE)
    for _ in range(5):
        sessions = [knock(rig, uid, hello) for uid in (OWN, OTHER) for hello in (False, True)]
        rig.lose(*sessions)
    assert rig.status["sessions"] == 0
    assert not gone_at_opening(rig, OTHER)
