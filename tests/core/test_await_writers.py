"""A lookup that asks for it waits for rows that an engine is writing."""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import TierLoad, TierProbe
from tests.core.rig import RESERVE_S, WIDTH, Engine, digests
from tests.core.tier_rig import TierRig

BUDGET_S = 5.0


def ask(e: Engine, *names: object, seq: int = 7, **fields: Any) -> list[Any]:
    """What comes back at once."""
    fields = {"budget_ms": 1000 * BUDGET_S, "writing": True, **fields}
    message = m.Lookup(seq=seq, request="r", digests=digests(*names), width=WIDTH, **fields)
    return e.rig.say(e.scheduler, message)


@pytest.fixture
def rig() -> TierRig:
    """It has no tier. It notes what is said later."""
    return TierRig(tiers=0)


@pytest.fixture
def writer(rig: TierRig) -> Engine:
    return rig.engine("w")


@pytest.fixture
def reader(rig: TierRig, writer: Engine) -> Engine:
    reader = rig.engine("r")
    assert reader.namespace == writer.namespace
    rig.replies(reader.scheduler)
    return reader


def begin(e: Engine, *names: object, **item: Any) -> int:
    """A reservation of ``names`` that was handed over."""
    return int(e.begin(*names, **item).reservation)


def test_the_answer_comes_with_the_commit(rig: TierRig, writer: Engine, reader: Engine) -> None:
    one = begin(writer, "a", "b")
    assert ask(reader, "a", "b") == []
    assert rig.gauge("promotions", "pins") == (1, 0)
    assert rig.count("lookups_await_stores") == 1
    rig.wait(BUDGET_S / 2)
    assert rig.replies(reader.scheduler) == []
    writer.commit(one)
    (reply,) = rig.replies(reader.scheduler)
    assert (reply.seq, reply.chunks, len(reply.slots[0].slot) // 4) == (7, 2, 2)
    assert rig.gauge("promotions", "leases", "pins") == (0, 1, 2)
    assert rig.count("lookups_await_stores") == 1


def test_who_does_not_ask_for_it_is_answered_at_once(writer: Engine, reader: Engine) -> None:
    begin(writer, "a")
    assert [r.chunks for r in ask(reader, "a", writing=False)] == [0]


@pytest.mark.parametrize(("names", "first"), [("xa", 0), ("ax", 1)])
def test_what_makes_no_hit_longer_is_not_waited_for(
    writer: Engine, reader: Engine, names: str, first: int
) -> None:
    """Behind a chunk that nobody has or writes; or of the chunks that the engine has itself."""
    begin(writer, "a")
    assert [r.chunks for r in ask(reader, *names, first=first)] == [first]


def test_at_the_deadline_the_answer_is_what_is_ready(
    rig: TierRig, writer: Engine, reader: Engine
) -> None:
    writer.store("a")
    rig.replies(reader.scheduler)
    begin(writer, "a", "b", first=1)
    assert ask(reader, "a", "b", prefill_tokens_s=16 / BUDGET_S) == []
    assert rig.machine.next_deadline() == pytest.approx(rig.now + BUDGET_S)
    rig.wait(BUDGET_S)
    assert [r.chunks for r in rig.replies(reader.scheduler)] == [1]
    assert rig.count("promotions_late") == 1


def test_what_computing_brings_sooner_is_not_waited_for_longer(
    rig: TierRig, writer: Engine, reader: Engine
) -> None:
    writer.store("a")
    begin(writer, "a", "b", first=1)
    assert ask(reader, "a", "b", prefill_tokens_s=160.0) == []
    assert rig.machine.next_deadline() == pytest.approx(rig.now + 0.1)


@pytest.mark.parametrize("how", ["abort", "cancel", "lost", "late", "clear"])
def test_rows_that_will_not_be_there_are_waited_for_no_longer(
    rig: TierRig, writer: Engine, reader: Engine, how: str
) -> None:
    one = writer.reserve("a").reservation
    assert ask(reader, "a", budget_ms=1000 * 2 * RESERVE_S) == []
    if how == "abort":
        writer.hand_over(reservations=(one,))
        writer.abort(one, rank=0)
    elif how == "cancel":
        writer.abort(one)
    elif how == "lost":
        writer.hand_over(reservations=(one,))
        rig.lose(*writer.workers)
    elif how == "late":
        rig.wait(RESERVE_S)
    else:
        writer.clear()
    assert [r.chunks for r in rig.replies(reader.scheduler)] == [0]
    assert rig.gauge("promotions") == (0,)


def test_one_wait_is_for_all_that_is_written_meanwhile(
    rig: TierRig, writer: Engine, reader: Engine
) -> None:
    """The writer's prefill takes several steps."""
    one = begin(writer, "a")
    assert ask(reader, "a", "b") == []
    two = begin(writer, "a", "b", first=1)
    writer.commit(one)
    assert rig.replies(reader.scheduler) == []
    writer.commit(two)
    assert [r.chunks for r in rig.replies(reader.scheduler)] == [2]


def test_many_that_wait_for_one_are_answered_in_slices(rig: TierRig, writer: Engine) -> None:
    readers = [rig.engine(f"r{n}") for n in range(40)]
    one = begin(writer, "a")
    for reader in readers:
        rig.replies(reader.scheduler)
        assert ask(reader, "a") == []
    writer.commit(one)
    assert rig.gauge("promotions") == (8,)
    assert rig.machine.next_deadline() == rig.now
    rig.wait(0)
    assert [r.chunks for e in readers for r in rig.replies(e.scheduler)] == [1] * 40


def test_who_leaves_waits_no_more(rig: TierRig, writer: Engine, reader: Engine) -> None:
    one = begin(writer, "a")
    assert ask(reader, "a") == []
    reader.quit()
    assert rig.gauge("promotions") == (0,)
    writer.commit(one)
    assert rig.gauge("rows", "pins", "leases") == (1, 0, 0)


def test_tiers_are_asked_for_what_was_not_written() -> None:
    rig = TierRig()
    writer = rig.ready("w")
    rig.only_in_tiers(writer, "a", "b")
    reader = rig.ready("r")
    one = begin(writer, "a")
    assert [type(r) for r in ask(reader, "a", "b")] == []
    assert rig.asked == []
    writer.commit(one)
    rig.answer_all()
    assert [r.chunks for r in rig.replies(reader.scheduler)] == [2]


def test_an_asker_hears_at_once_that_a_writer_is_awaited(
    rig: TierRig, writer: Engine, reader: Engine
) -> None:
    begin(writer, "a")
    assert ask(reader, "a") == []
    assert rig.promoting == [m.Promoting(seq=7)]


@pytest.mark.parametrize("loading", [False, True])
def test_a_writer_that_is_not_awaited_any_more_wakes_nobody(loading: bool) -> None:
    """The first writer gave up, so the second one's chunks made no hit longer, and the tier was
    asked. The second one commits while the tier probes, or while it is ``loading`` the first two
    chunks. Answered then, the lookup would be lent rows that are still LOADING (law 4)."""
    rig = TierRig()
    writer = rig.ready("w")
    rig.only_in_tiers(writer, "a", "b", "c", "d")
    reader = rig.ready("r")
    first = begin(writer, "a", "b")
    second = begin(writer, "a", "b", "c", "d", first=2)
    assert ask(reader, "a", "b", "c", "d") == []
    writer.abort(first, rank=0)
    if loading:
        rig.answer_all(TierProbe)
    assert rig.open_ops(TierLoad) if loading else rig.open_ops(TierProbe)
    writer.commit(second)
    assert rig.replies(reader.scheduler) == []
    rig.answer_all()
    assert [r.chunks for r in rig.replies(reader.scheduler)] == [2 if loading else 4]
