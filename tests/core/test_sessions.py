"""Law 11 and the handshake: who may speak, and how a session ends."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.effects import Faulted, HalfClose, PopulatedTo, Send
from kvass.core.handlers import sessions
from kvass.types import PAGE
from tests.core.rig import BOOT, GRACE_S, Rig


def fault(rig: Rig, session: int) -> None:
    rig.step(Faulted(session, "bad_frame", "too long"))


# ---------------------------------------------------------------- handshake


def test_welcome_tells_boot_limits_and_timing(rig: Rig) -> None:
    session = rig.open(hello=False)
    reply = rig.ask(session, m.Hello(seq=4, clock_s=rig.now, features=("unheard-of",)))
    assert (reply.seq, reply.boot, reply.version, reply.clock_s) == (4, BOOT, "test", rig.now)
    assert (reply.arena_bytes, reply.features) == (64 * PAGE, ())
    assert reply.limits == rig.machine.state.config.limits
    assert reply.timing == rig.machine.state.config.timing


@pytest.mark.parametrize(
    ("theirs", "both"), [((), ()), (("a",), ("a",)), (("b", "later"), ("b",)), (("later",), ())]
)
def test_a_feature_is_used_if_both_sides_name_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, theirs: tuple[str, ...], both: tuple[str, ...]
) -> None:
    """No feature exists yet: these are made up."""
    monkeypatch.setattr(sessions, "FEATURES", ("a", "b"))
    session = rig.open(hello=False)
    reply = rig.ask(session, m.Hello(seq=4, clock_s=rig.now, features=theirs))
    assert reply.features == rig.machine.state.sessions[session].features == both


@pytest.mark.parametrize("wants", [True, False])
def test_the_arena_rides_on_welcome_if_asked_for(rig: Rig, wants: bool) -> None:
    rig.open(wants_arena=wants)
    (effect,) = rig.last
    assert isinstance(effect, Send)
    assert effect.with_arena is wants


@pytest.mark.parametrize(("low", "high"), [(2, 9), (-3, 0), (9, 2)])
def test_version_ranges_that_do_not_meet_end_the_session(rig: Rig, low: int, high: int) -> None:
    session = rig.open(hello=False)
    hello = m.Hello(seq=1, clock_s=rig.now, protocol_min=low, protocol_max=high)
    reply = rig.ask(session, hello)
    assert (reply.code, reply.fatal, reply.seq) == ("incompatible_version", True, 1)
    assert rig.ended() == ["Close"]


@pytest.mark.parametrize(("low", "meets"), [(1, 1), (2, None)])
def test_a_client_that_names_no_version_range_speaks_protocol_1(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, low: int, meets: int | None
) -> None:
    """A range that is not said means what it meant when there was one protocol only."""
    monkeypatch.setattr(sessions, "PROTOCOL_MIN", low)
    monkeypatch.setattr(sessions, "PROTOCOL_MAX", 3)
    reply = rig.ask(rig.open(hello=False), m.Hello(seq=1, clock_s=rig.now))
    if meets is not None:
        assert reply.protocol == meets
    else:
        assert reply.code == "incompatible_version"
        assert f"{low}..3" in reply.text
        assert "1..1" in reply.text
    both = m.Hello(seq=1, clock_s=rig.now, protocol_min=1, protocol_max=9)
    assert rig.ask(rig.open(hello=False), both).protocol == 3


@pytest.mark.parametrize("off", [0.01, 1e6, -1000.0])
def test_another_clock_ends_the_session(rig: Rig, off: float) -> None:
    session = rig.open(hello=False)
    reply = rig.ask(session, m.Hello(seq=1, clock_s=rig.now + off))
    assert (reply.code, reply.fatal) == ("incompatible_clock", True)
    assert rig.ended() == ["Close"]


def test_a_hello_may_have_waited_a_while(rig: Rig) -> None:
    session = rig.open(hello=False)
    assert isinstance(rig.ask(session, m.Hello(seq=1, clock_s=rig.now - 5)), m.Welcome)


def test_hello_comes_first_and_once(rig: Rig) -> None:
    session = rig.open(hello=False)
    reply = rig.ask(session, m.Ping(seq=6))
    assert (reply.code, reply.seq, rig.ended()) == ("bad_message", 6, ["Close"])
    session = rig.open()
    assert rig.code(session, m.Hello(seq=2, clock_s=rig.now)) == "bad_message"
    assert rig.ended() == []


# ---------------------------------------------------------------- ends


def test_a_malformed_frame_ends_a_session_that_owes_nothing(rig: Rig) -> None:
    e = rig.engine()
    fault(rig, e.workers[0])
    error = rig.last[0]
    assert isinstance(error, Send)
    assert isinstance(error.message, m.Error)
    assert (error.message.code, error.message.fatal, error.message.seq) == ("bad_frame", True, 0)
    assert rig.ended() == ["Close"]
    rig.lose(e.workers[0])  # may follow, need not


@pytest.mark.parametrize("owing", ["commit", "release"])
def test_a_worker_that_owes_is_half_closed_until_its_eof(rig: Rig, owing: str) -> None:
    e = rig.engine()
    e.store("a")
    if owing == "commit":
        e.reserve("b")
    else:
        e.lookup("a")
    fault(rig, e.workers[0])
    assert rig.last[-1] == HalfClose(e.workers[0])
    assert rig.gauge("leases", "reservations") != (0, 0)
    assert rig.say(e.workers[0], m.Ping(seq=3)) == []
    fault(rig, e.workers[0])
    assert rig.last == []
    rig.lose(e.workers[0])
    rig.wait(GRACE_S)
    assert rig.gauge("leases", "reservations", "quarantined_bytes") == (0, 0, 0)


def test_while_a_rank_is_half_closed_nothing_new_is_promised_to_it(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    e.reserve("b")
    fault(rig, e.workers[0])
    assert e.lookup("a").chunks == 0
    again = rig.open()
    assert rig.register(again, rank=0).code == "rank_taken"
    rig.lose(e.workers[0])
    assert rig.register(again, rank=0).namespace == e.namespace


def test_what_a_garbled_scheduler_was_given_counts_as_handed_over(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    lease, grant = e.lookup("a").lease, e.reserve("b")
    fault(rig, e.scheduler)
    assert rig.ended() == ["Close"]
    assert rig.gauge("leases", "reservations") == (1, 1)
    e.release(lease)
    e.commit(grant.reservation)
    assert rig.gauge("leases", "reservations", "rows") == (0, 0, 2)


def test_a_fault_of_one_session_touches_no_other(rig: Rig) -> None:
    e, stranger = rig.engine(), rig.open()
    e.store("a")
    e.lookup("a")
    fault(rig, stranger)
    assert {getattr(x, "session", None) for x in rig.last} == {stranger}
    assert rig.gauge("leases", "sessions") == (1, 2)


# ---------------------------------------------------------------- looking


def test_the_watermark_goes_to_those_who_mapped_the_arena(rig: Rig) -> None:
    mapped, _, unready = rig.open(wants_arena=True), rig.open(), rig.open(hello=False)
    rig.step(PopulatedTo(3 * PAGE))
    assert rig.last == [Send(mapped, m.Populated(bytes=3 * PAGE))]
    late = rig.ask(unready, m.Hello(seq=1, clock_s=rig.now, wants_arena=True))
    assert late.populated_bytes == 3 * PAGE
