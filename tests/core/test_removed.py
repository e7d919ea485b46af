"""Which rows left L1: what an engine is told that publishes KV events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvass import messages as m
from kvass.core.handlers import reading
from kvass.core.rows import removed
from tests.core.groups import engine as engine_of
from tests.core.groups import group
from tests.core.rig import WIDTH, Engine, Rig, digests


class Reader:
    """Asks as an engine does, and keeps an index of its rows by what it is told."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.since = 0
        self.rows: set[bytes] = set()
        self.lost = 0

    def ask(self, *names: object, **fields: Any) -> Any:
        asked = {"seq": 5, "since": self.since, "width": WIDTH, "present": (digests(*names),)}
        return self.engine.rig.ask(self.engine.scheduler, m.Removals(**{**asked, **fields}))

    def read(self) -> Any:
        reply = self.ask()
        self.since = reply.upto
        self.lost += reply.lost
        for blob in reply.removed:
            self.rows -= {blob[i : i + WIDTH] for i in range(0, len(blob), WIDTH)}
        return reply

    def store(self, *names: object) -> None:
        self.engine.store(*names)
        self.rows |= {digests(name) for name in names}


def there(engine: Engine, rows: set[bytes]) -> set[bytes]:
    """Which of ``rows`` match."""
    message = m.Removals(seq=5, width=WIDTH, present=(b"".join(sorted(rows)),))
    (bits,) = engine.rig.ask(engine.scheduler, message).present
    return {row for row, bit in zip(sorted(rows), bits, strict=True) if bit}


def test_who_reads_knows_after_churn_what_is_there() -> None:
    rig = Rig(pages=16)
    reader, other = Reader(rig.engine("a")), rig.engine("b")
    assert reader.read().lost, "what left before is not known"
    for i in range(60):
        reader.store(f"a{i}")
        other.store(f"b{i}")
        if i % 3 == 0:
            reader.read()
    reader.read()
    assert reader.lost == 1
    everything = {digests(f"a{i}") for i in range(60)}
    assert reader.rows == there(other, everything)
    assert 0 < len(reader.rows) < 16


def test_present_says_what_may_be_read_now() -> None:
    rig = Rig()
    engine = rig.engine()
    engine.store("a")
    engine.reserve("b")
    assert Reader(engine).ask("a", "b", "c").present == (b"\1\0\0",)


def test_nothing_is_kept_unless_somebody_reads() -> None:
    rig = Rig(pages=4)
    engine = rig.engine()
    ring, names = rig.machine.state.classes.removed, iter(range(100))
    for _ in range(8):
        engine.store(next(names))
    assert ring.end == 1
    assert not len(ring._keys)
    reader = Reader(engine)
    reader.read()
    for _ in range(8):
        engine.store(next(names))
    assert ring.end == 9
    assert len(ring._keys) == removed.ROOM
    rig.lose(engine.scheduler)
    assert not ring.noted
    assert not len(ring._keys)


def test_another_session_does_not_go_on_where_the_last_one_ended() -> None:
    rig = Rig(pages=4)
    engine, witness = rig.engine(), rig.engine("b")
    first = Reader(engine)
    Reader(witness).read()
    first.read()
    rig.lose(engine.scheduler)
    engine.scheduler = rig.open()
    rig.register(engine.scheduler)
    reply = first.read()
    assert reply.lost


def test_a_clear_and_another_generation_are_a_loss() -> None:
    rig = Rig()
    engine = rig.engine()
    reader = Reader(engine)
    reader.read()
    assert not reader.read().lost
    engine.store("a")
    engine.clear()
    assert reader.read().lost
    assert not reader.read().lost
    rig.register(engine.scheduler, generation=b"new")
    assert reader.read().lost


def test_without_a_namespace_nothing_is_said_to_be_there() -> None:
    rig = Rig()
    engine = rig.engine()
    reader = Reader(engine)
    reader.read()
    rig.lose(engine.workers[0])
    assert reader.ask("a") == m.Removed(seq=5, lost=True)
    engine.workers[0] = rig.open()
    rig.register(engine.workers[0], rank=0)
    assert not reader.ask("a").lost, "it went on being noted"
    reader.since = 0
    assert reader.read().lost


def test_who_asks_too_late_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed, "ROOM", 8)
    rig = Rig(pages=4)
    reader = Reader(rig.engine())
    reader.read()
    for i in range(4 + 8):
        reader.store(i)
    assert not reader.read().lost, "eight rows left, and eight are remembered"
    for i in range(9):
        reader.store(f"more{i}")
    assert reader.read().lost
    assert not reader.read().lost


def test_long_answers_come_in_parts_and_say_what_is_there_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(removed, "AT_ONCE", 5)
    rig = Rig(pages=4)
    reader = Reader(rig.engine())
    reader.read()
    for i in range(4 + 8):
        reader.store(i)
    assert reader.ask(11).present == ()
    assert len(reader.read().removed[0]) == 5 * WIDTH
    assert reader.ask(11).present == (b"\1",)
    assert len(reader.read().removed[0]) == 3 * WIDTH
    assert reader.rows == {digests(i) for i in range(8, 12)}


def test_groups_are_told_apart() -> None:
    engine = engine_of(group("full"), group("sliding_window", 20))
    reader = Reader(engine)
    reader.read()
    engine.store("a", "b", groups=3)
    _, window = next(iter(engine.rig.machine.state.namespaces.values())).classes
    engine.rig.machine.state.allocator._evict(window, window.index.rows()[:1], "capacity")
    assert [len(blob) // WIDTH for blob in reader.read().removed] == [0, 1]
    assert reader.ask(present=(digests("a"), digests("a", "b"))).present in (
        (b"\1", b"\0\1"),
        (b"\1", b"\1\0"),
    )


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "AT_ONCE", 3)
    rig = Rig()
    engine = rig.engine()
    reader = Reader(engine)
    assert reader.ask(width=7).code == "bad_value"
    assert reader.ask(present=(b"", b"")).code == "bad_value"
    assert reader.ask(*"abcd").code == "limit"
    assert rig.code(engine.workers[0], m.Removals(seq=5)) == "bad_rank"
    assert rig.code(rig.open(), m.Removals(seq=5)) == "not_registered"
    assert not rig.machine.state.classes.removed.noted


def test_no_step_takes_long() -> None:
    """A full ring is read in parts; a large eviction is noted at once."""
    ring = removed.RemovedRows()
    ring.read(1, 0, 0)
    keys = np.arange(4 * 3 * removed.ROOM, dtype=np.uint64).reshape(-1, 4)
    ring.note(0, 0, keys)
    assert ring.read(1, 0, 1).lost
    part = ring.read(1, 0, ring.end - removed.ROOM)
    assert (part.keys[0] == keys[-removed.ROOM :][: removed.AT_ONCE]).all()
