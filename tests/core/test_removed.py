"""Which rows left L1: what an engine is told that publishes KV events."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvass import messages as m
from kvass.core.rows import removed
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


def test_nothing_is_kept_unless_somebody_reads() -> None:
    rig = Rig(pages=4)
    engine = rig.engine()
    ring, names = rig.machine.state.followers.removed, iter(range(100))
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


def test_no_step_takes_long() -> None:
    """A full ring is read in parts; a large eviction is noted at once."""
    ring = removed.RemovedRows()
    ring.read(1, 0, 0)
    keys = np.arange(4 * 3 * removed.ROOM, dtype=np.uint64).reshape(-1, 4)
    ring.note(0, 0, keys)
    assert ring.read(1, 0, 1).lost
    part = ring.read(1, 0, ring.end - removed.ROOM)
    assert (part.keys[0] == keys[-removed.ROOM :][: removed.AT_ONCE]).all()
