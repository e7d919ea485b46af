"""Weights replaced in place: an engine that says a new generation shares rows with nobody."""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import Received, TierEpoch, TierLoad, TierStore
from tests.core.rig import Engine, Rig, layout
from tests.core.tier_rig import TierRig

NEW = b"a new generation"


def move(engine: Engine, instance: str = "e", generation: bytes = NEW, **fields: Any) -> Any:
    """The engine's weights were replaced; the reply. Its namespace is the new one."""
    reply = engine.rig.register(engine.scheduler, instance, generation=generation, **fields)
    if isinstance(reply, m.Registered):
        engine.namespace = reply.namespace
    return reply


def test_neither_of_two_engines_finds_what_the_other_stored_after_one_moved(rig: Rig) -> None:
    a, b = rig.engine("a"), rig.engine("b")
    assert a.namespace == b.namespace
    a.store("old")
    assert move(a, "a").missing == ()
    assert a.namespace not in (b"", b.namespace)
    a.store("of a")
    b.store("of b")
    assert [a.holds(one) for one in ("old", "of b", "of a")] == [0, 0, 1]
    assert [b.holds(one) for one in ("old", "of b", "of a")] == [1, 1, 0]
    a.store("old")
    assert a.holds("old") == 1


def test_two_engines_that_move_do_not_meet_either(rig: Rig) -> None:
    a, b = rig.engine("a"), rig.engine("b")
    move(a, "a")
    move(b, "b", b"another one")
    a.store("x")
    assert b.holds("x") == 0


def test_without_a_generation_the_namespace_is_what_it_always_was(rig: Rig) -> None:
    known = "dcc174f9ed6dbb8f0dccb4963d5f6259cf99d799272985994e2c918614b3e0eb"
    assert rig.engine("e").namespace.hex() == known


@pytest.mark.parametrize("handed_over", [True, False])
def test_what_is_being_written_when_its_engine_moves_is_never_published(
    rig: Rig, handed_over: bool
) -> None:
    """It may have been computed by both weights."""
    a, b = rig.engine("a"), rig.engine("b")
    open_one = a.reserve("x").reservation
    if handed_over:
        a.hand_over(reservations=(open_one,))
    move(a, "a")
    a.commit(open_one)
    assert (a.holds("x"), b.holds("x")) == (0, 0)
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)
    assert rig.count("discarded_moved") == 1
    b.store("x")  # the key is nobody's
    b_open = b.reserve("y").reservation
    move(a, "a", b"a third one")
    b.commit(b_open)
    assert b.holds("x", "y") == 2, "what others write is none of its business"


def test_a_lease_of_before_is_given_back_as_ever(rig: Rig) -> None:
    a = rig.engine("a")
    a.store("x")
    held, read = a.lookup("x"), a.lookup("x")
    a.hand_over(leases=(read.lease,))
    move(a, "a")
    assert rig.gauge("leases", "pins") == (2, 2)
    assert a.give_back(held.lease) == []
    assert a.release(read.lease) == []
    assert rig.gauge("leases", "pins") == (0, 0)


def test_rows_of_a_generation_that_was_left_make_room_at_once(rig: Rig) -> None:
    a = rig.engine("a")
    a.store("base")
    used_bytes = rig.status["l1_used_bytes"]
    move(a, "a")
    a.store("x", "y")
    read = a.lookup("x")
    a.hand_over(leases=(read.lease,))
    move(a, "a", b"a third one")
    assert rig.status["rows"] == 1, "the one of the namespace that others have"
    rig.wait(0)
    assert rig.status["l1_used_bytes"] > used_bytes, "one row is being read"
    a.release(read.lease)
    rig.wait(0)
    assert rig.status["l1_used_bytes"] == used_bytes
    assert a.holds("x") == 0


def test_many_generations_leave_nothing_behind() -> None:
    rig = TierRig()
    a = rig.ready("a")
    a.store("base")
    rig.answer_all()
    state = rig.machine.state
    terms: dict[str, Any] = {"instance": "a", "identity": {"model": "m"}, "chunk_tokens": 16}
    for i in range(1000):
        if i % 100 == 1:
            a.store("x")
        move = m.Register(seq=2, generation=b"%d" % i, **terms)
        rig.machine.step(Received(a.scheduler, move), rig.now)  # validated below, once
    rig.machine.validate()
    assert len(state.namespaces) <= 3
    assert len(state.by_digest) == len(state.namespaces) == len(state.classes.by_id)
    assert (len(state.tiers.ops), state.tiers.owed, rig.status["rows"]) == (0, set(), 1)


def test_a_generation_has_no_records_in_tiers() -> None:
    rig = TierRig()
    a, b = rig.ready("a"), rig.ready("b")
    a.store("old")
    rig.answer_all()
    move(a, "a")
    a.store("x")
    assert a.holds("x") == 1
    assert not [one for one in rig.asked if isinstance(one, TierEpoch | TierStore | TierLoad)]
    assert rig.status["tiers"][0]["flush_queue_rows"] == 0
    rig.forget_l1()
    assert rig.look_up(a, "old")[0].chunks == 0
    assert rig.look_up(b, "old")[0].chunks == 1, "b has the weights of before"
    assert {record[0] for record in rig.shelves[0]} == {b.namespace}
    assert rig.ask(a.scheduler, m.Clear(seq=11)) == m.Cleared(seq=11, rows=0)


def test_a_promotion_that_its_engine_does_not_wait_for_any_more_is_a_miss() -> None:
    rig = TierRig()
    a = rig.ready("a")
    rig.only_in_tiers(a, "x")
    rig.begin(a, "x")
    move(a, "a")
    rig.answer_all()
    (reply,) = [one for one in rig.replies(a.scheduler) if isinstance(one, m.Matched)]
    assert (reply.chunks, reply.lease) == (0, 0)
    assert rig.gauge("leases", "pins", "promotions") == (0, 0, 0)


def test_a_scheduler_that_comes_back_says_its_generation(rig: Rig) -> None:
    a = rig.engine("a")
    a.store("old")
    move(a, "a")
    a.store("x")
    rig.lose(a.scheduler)
    a.scheduler = rig.open()
    assert move(a, "a").namespace == a.namespace
    assert (a.holds("x"), a.holds("old")) == (1, 0)
    rig.lose(a.scheduler)
    a.scheduler = rig.open()  # a new process: its weights are those of the files
    rig.register(a.scheduler, "a")
    assert (a.holds("x"), a.holds("old")) == (0, 1)


def test_an_engine_may_move_while_a_rank_is_missing(rig: Rig) -> None:
    a, b = rig.engine("a"), rig.engine("b")
    a.store("old")
    rig.lose(a.workers[0])
    assert move(a, "a").missing == (0,)
    assert a.lookup("old").chunks == 0
    a.workers[0] = rig.open()
    assert rig.register(a.workers[0], "a", rank=0).namespace not in (b"", b.namespace)
    a.store("x")
    assert (a.holds("x"), a.holds("old"), b.holds("x")) == (1, 0, 0)


def test_said_twice_it_is_only_answered_twice(rig: Rig) -> None:
    a = rig.engine("a")
    first = move(a, "a")
    open_one = a.reserve("x").reservation
    assert move(a, "a").namespace == first.namespace
    a.commit(open_one)
    assert a.holds("x") == 1


def test_a_move_that_is_refused_moves_nobody() -> None:
    rig = Rig(namespaces=2)
    a, b = rig.engine("a"), rig.engine("b", identity={"model": "n"})
    open_one = a.reserve("x").reservation
    assert move(a, "a").code == "limit"
    a.commit(open_one)
    assert a.holds("x") == 1
    b.quit()
    assert move(a, "a").namespace


def test_only_a_scheduler_says_a_generation(rig: Rig) -> None:
    a = rig.engine("a")
    assert move(a, "a", b"x" * 65).code == "bad_value"
    assert move(a, "a", identity={"model": "n"}).code == "already_registered"
    fields: dict[str, Any] = {"rank": 0, "layout": layout(1), "generation": NEW}
    assert rig.register(a.workers[0], "a", **fields).code == "bad_value"
    assert rig.register(rig.open(), "c", **fields).code == "bad_value"
    a.store("x")
    assert a.holds("x") == 1
