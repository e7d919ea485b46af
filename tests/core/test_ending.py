"""The end of a client's session: its own rows go first, and nothing else changes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import Send, TierStore
from kvass.core.rows import session_end, session_tags
from kvass.types import PAGE, Quota
from tests.core.rig import Engine, Rig
from tests.core.tier_rig import TierRig


def end(engine: Engine, session: int, tenant: str = "") -> int:
    reply = engine.rig.ask(engine.scheduler, m.EndSession(seq=9, session=session, tenant=tenant))
    return int(reply.rows)


def held(engine: Engine, *names: object, session: int = 0) -> list[Any]:
    """Which of these one-chunk prompts match. It uses no row that does not match."""
    return [name for name in names if found(engine, name, session=session)]


def found(engine: Engine, *names: object, session: int = 0) -> int:
    reply = engine.lookup(*names, session=session)
    if reply.lease:
        engine.give_back(reply.lease)
    return int(reply.chunks)


@pytest.fixture
def rig() -> Rig:
    return Rig(pages=16)


def test_the_rows_of_an_ended_session_go_before_older_rows(rig: Rig) -> None:
    e = rig.engine()
    for name in range(8):
        e.store(name)
    e.store("a", "b", "c", "d", session=7)
    for name in range(8, 12):
        e.store(name)
    assert end(e, 7) == 4
    assert found(e, "a", session=7) == 1, "it still matches"
    e.store("new1")
    e.store("new2")
    assert held(e, *range(12)) == [*range(12)]
    assert rig.count("evicted_ended") == 2
    assert rig.count("session_rows_ended") == 4


def test_the_deepest_chunk_of_an_ended_session_goes_first(rig: Rig) -> None:
    e = rig.engine()
    for name in range(12):
        e.store(name)
    e.store("a", "b", "c", "d", session=7)
    end(e, 7)
    e.store("new")
    assert found(e, "a", "b", "c", "d", session=7) == 3


def test_without_the_end_they_stay(rig: Rig) -> None:
    """The control of the tests above."""
    e = rig.engine()
    for name in range(12):
        e.store(name)
    e.store("a", "b", "c", "d", session=7)
    e.store("new")
    assert held(e, 0) == []
    assert found(e, "a", "b", "c", "d", session=7) == 4


@pytest.mark.parametrize("other", [0, 8])
def test_a_row_that_another_session_used_is_not_touched(rig: Rig, other: int) -> None:
    """Also if that session is not known."""
    e = rig.engine()
    for name in range(12):
        e.store(name)
    e.store("system", "a", "b", "c", session=7)
    found(e, "system", "x", session=other)
    assert end(e, 7) == 3
    for name in range(20, 24):
        e.store(name)
    assert held(e, "system") == ["system"]
    assert held(e, 0) == [], "only then the oldest"
    assert held(e, *range(1, 12)) == [*range(1, 12)]


def test_what_an_ended_session_still_stores_goes_first_too(rig: Rig) -> None:
    """An engine stores the end of a prompt after it has said that the session ended."""
    e = rig.engine()
    for name in range(12):
        e.store(name)
    e.store("a", "b", session=7)
    end(e, 7)
    e.store("a", "b", "c", "d", session=7)
    for name in range(20, 24):
        e.store(name)
    assert held(e, *range(12)) == [*range(12)]


def test_a_lookup_of_the_session_revokes_its_end(rig: Rig) -> None:
    e = rig.engine()
    for name in range(12):
        e.store(name)
    e.store("a", "b", session=7)
    end(e, 7)
    assert found(e, "a", "b", session=7) == 2
    e.store("a", "b", "c", "d", session=7)
    e.store("new")
    assert held(e, 0) == [], "it is the oldest now"
    assert found(e, "a", "b", "c", "d", session=7) == 4


def test_a_pinned_row_of_an_ended_session_stays(rig: Rig) -> None:
    e = rig.engine()
    e.store("a", "b", session=7)
    lease = e.lookup("a", "b", session=7).lease
    end(e, 7)
    for name in range(20):
        e.store(name)
    e.give_back(lease)
    assert found(e, "a", "b", session=7) == 2


def test_a_tenant_cannot_end_what_another_pays_for() -> None:
    quotas = (Quota("x", 8 * PAGE), Quota("y", 8 * PAGE))
    rig = Rig(pages=16, extent=2, core={"quotas": quotas})
    e = rig.engine()
    e.store("a", "b", session=7, tenant="x")
    assert end(e, 7, tenant="y") == 0
    assert end(e, 7) == 0
    assert end(e, 7, tenant="x") == 2


def test_a_second_end_does_nothing_until_the_session_goes_on(rig: Rig) -> None:
    e = rig.engine()
    e.store("a", "b", "c", session=7)
    assert [end(e, 7) for _ in range(3)] == [3, 0, 0]
    found(e, "x", session=7)
    assert end(e, 7) == 3, "it had gone on; the machine checks that no row is listed twice"
    assert rig.count("sessions_ended") == 2
    for name in range(14):
        e.store(name)
    assert rig.count("evicted_ended") == 1


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A machine that ends sessions in slices of a few rows, with 40 rows of the session 7."""
    monkeypatch.setattr(session_end, "SLICE", 4)
    monkeypatch.setattr(session_end, "_SAMPLED", 2)
    monkeypatch.setattr(session_tags, "LOOK", 4)
    rig = Rig(pages=64, instance_write_share=1.0)
    e = rig.engine()
    for name in range(24):
        e.store(name)
    e.store(*PROMPT, session=7)
    return rig


PROMPT = [f"p{i}" for i in range(40)]


def ended(rig: Rig) -> list[int]:
    """The rows that this step's answers to ``EndSession`` name."""
    sent = [each.message for each in rig.last if isinstance(each, Send)]
    return [each.rows for each in sent if isinstance(each, m.SessionEnded)]


def test_a_session_with_many_rows_ends_in_several_steps_and_is_answered_then(sliced: Rig) -> None:
    command = sliced.open()
    assert sliced.say(command, m.EndSession(seq=5, session=7)) == []
    assert sliced.machine.next_deadline() == sliced.now
    steps = 0
    while not ended(sliced):
        sliced.wait(0)
        steps += 1
    assert 10 < steps <= 40
    assert ended(sliced) == [40]
    assert sliced.machine.next_deadline() != sliced.now
    assert sliced.count("session_rows_ended") == 40


def test_the_deepest_chunks_of_such_a_session_go_first(sliced: Rig) -> None:
    e = Engine(sliced, 1, [2], b"")
    sliced.say(e.scheduler, m.EndSession(seq=5, session=7))
    sliced.finish()
    e.store("new1", "new2", "new3", "new4", "new5", "new6", "new7")
    assert sliced.count("evicted_ended") == 7
    assert found(e, *PROMPT, session=7) == 33


def test_a_session_that_goes_on_meanwhile_keeps_the_rest(sliced: Rig) -> None:
    e = Engine(sliced, 1, [2], b"")
    sliced.say(e.scheduler, m.EndSession(seq=5, session=7))
    while not 4 < sliced.machine.state.endings[0].rows < 20:
        sliced.wait(0)
    assert found(e, *PROMPT, session=7) == 40
    sliced.wait(0)
    (rows,) = ended(sliced)
    assert 4 < rows < 20
    for name in range(100, 124):
        e.store(name)
    assert sliced.count("evicted_ended") == 0
    assert found(e, *PROMPT, session=7) == 40


def test_each_of_two_ends_of_a_session_is_answered_and_no_row_joins_twice(sliced: Rig) -> None:
    e = Engine(sliced, 1, [2], b"")
    sliced.say(e.scheduler, m.EndSession(seq=5, session=7))
    while not sliced.machine.state.endings[0].rows:
        sliced.wait(0)
    found(e, "x", session=7)
    (first,) = sliced.say(e.scheduler, m.EndSession(seq=6, session=7))
    assert (first.seq, 0 < first.rows < 40) == (5, True)
    sliced.wait(0)
    while not ended(sliced):
        sliced.wait(0)
    assert ended(sliced) == [40]


def test_an_end_that_goes_on_is_not_forgotten_for_others(
    sliced: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_tags, "MOST_ENDED", 4)
    command = sliced.open()
    assert sliced.say(command, m.EndSession(seq=5, session=7)) == []
    for other in range(100, 110):
        sliced.say(command, m.EndSession(seq=6, session=other))
        assert ended(sliced) == [0]
    sliced.wait(0)
    while not ended(sliced):
        sliced.wait(0)
    assert ended(sliced) == [40]


def test_an_end_whose_asker_is_gone_goes_on(sliced: Rig) -> None:
    command = sliced.open()
    sliced.say(command, m.EndSession(seq=5, session=7))
    sliced.lose(command)
    sliced.finish()
    assert sliced.count("session_rows_ended") == 40


def test_a_command_may_end_a_session_and_a_rank_may_not(rig: Rig) -> None:
    e = rig.engine()
    e.store("a", session=7)
    assert rig.ask(rig.open(), m.EndSession(seq=4, session=7)).rows == 1
    assert rig.code(e.workers[0], m.EndSession(seq=4, session=7)) == "bad_rank"
    assert rig.code(e.scheduler, m.EndSession(seq=4, session=0)) == "bad_value"


@pytest.mark.parametrize("flush", ["write_through", "on_evict"])
def test_rows_of_an_ended_session_go_to_no_tier(flush: str) -> None:
    """Unless they are queued already."""
    rig = TierRig(pages=16, core={"flush": flush})
    e = rig.ready()
    e.store("a", session=7)
    grant = e.begin("a", "b", session=7)
    end(e, 7)
    e.commit(grant.reservation)
    for name in range(20):
        e.store(name)
        rig.answer_all(TierStore)
    keys = {record[-1][:1] for record in rig.shelves[0]}
    assert keys & {b"a", b"b"} == ({b"a"} if flush == "write_through" else set())
    assert keys & {b"0", b"1", b"2"}, "other rows do"


def test_sessions_that_come_and_go_break_no_invariant() -> None:
    """Random requests of several tenants and sessions; the rig checks the state at each step."""
    random = Random(5)
    quotas = (Quota("x", 9 * PAGE, 3 * PAGE),)
    rig = TierRig(pages=24, extent=2, core={"quotas": quotas})
    e = rig.ready()
    for _ in range(400):
        session, tenant = random.randrange(4), random.choice(["", "x"])
        prompt = [random.randrange(2) for _ in range(random.randint(1, 6))]
        names = ["".join(map(str, prompt[: i + 1])) for i in range(len(prompt))]
        kind = random.random()
        if kind < 0.15 and session:
            end(e, session, tenant)
        elif kind < 0.5:
            for reply in rig.look_up(e, *names, session=session, tenant=tenant):
                if reply.lease:
                    e.give_back(reply.lease)
        else:
            grant = e.begin(*names, session=session, tenant=tenant)
            if grant.reservation and random.random() < 0.9:
                e.commit(grant.reservation)
            elif grant.reservation:
                e.abort(grant.reservation, 0)
        if random.random() < 0.5:
            rig.answer_all()
        rig.replies(e.scheduler)
        rig.wait(random.random())
    assert rig.count("evicted_ended") > 5
