"""A rig with tiers: what the core asks of them waits here until a test answers it."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from kvass import messages as m
from kvass.core.effects import (
    Effect,
    Emptied,
    EpochIs,
    Event,
    Loaded,
    Probed,
    Records,
    Send,
    Stored,
    TierClear,
    TierEpoch,
    TierLoad,
    TierProbe,
    TierStore,
    ToTier,
)
from kvass.core.tiers.epochs import to_note
from tests.core.rig import WIDTH, Engine, Rig, digests

BUDGET_S = 0.1
"""How long a lookup waits if it does not say how long."""
Asked = TypeVar("Asked", bound=ToTier)
Record = tuple[bytes, int, int, bytes]


class TierRig(Rig):
    """``shelves[t]`` are the records of tier ``t``, ``notes[t]`` its epochs."""

    def __init__(self, *args: Any, tiers: int = 1, **options: Any) -> None:
        core = {"tiers": tuple(f"tier{t}" for t in range(tiers)), **options.pop("core", {})}
        super().__init__(*args, **{**options, "core": core})
        self.shelves: list[set[Record]] = [set() for _ in range(tiers)]
        self.notes: list[dict[bytes, int]] = [{} for _ in range(tiers)]
        self.asked: list[ToTier] = []
        self.said: list[tuple[int, Any]] = []
        """All messages that were sent, with their connections."""
        self.down = False
        """Every operation fails."""

    def step(self, event: Event) -> list[Effect]:
        effects = super().step(event)
        for effect in effects:
            if isinstance(effect, ToTier):
                self.asked.append(effect)
            elif isinstance(effect, Send) and not isinstance(effect.message, m.Promoting):
                self.said.append((effect.connection, effect.message))
        return effects

    def quiet(self) -> bool:
        """Whether no lease, pin, load or promotion is open."""
        return self.gauge("leases", "pins", "rows_loading", "promotions") == (0, 0, 0, 0)

    def flushing(self) -> bool:
        return self.machine.flushing

    def open_ops(self, kind: type[Asked]) -> list[Asked]:
        return [one for one in self.asked if isinstance(one, kind)]

    def answer_all(self, *kinds: type[Any]) -> None:
        """Answer all open operations (of these kinds) as a tier does, until none is open."""
        while todo := [one for one in self.asked if not kinds or isinstance(one, kinds)]:
            self.answer(todo[0])

    def answer(self, op: ToTier, *which: bool) -> None:
        """As the tier would; or with ``which``."""
        self.asked.remove(op)
        shelf = self.shelves[op.tier]
        if self.down and not which:
            self.step(op.failed())
        elif isinstance(op, TierEpoch):
            notes = self.notes[op.tier]
            notes[op.namespace] = to_note(op, notes.get(op.namespace), self.now)
            self.step(EpochIs(op.op, notes[op.namespace]))
        elif isinstance(op, TierClear):
            shelf.clear()
            self.step(Emptied(op.op, True))
        elif isinstance(op, TierStore):
            good = self._bools(which, names(op.records), lambda one: True)
            shelf |= {one for one, ok in zip(names(op.records), good, strict=True) if ok}
            self.step(Stored(op.op, good, down=self.down))
        elif isinstance(op, TierLoad):
            good = self._bools(which, names(op.records), shelf.__contains__)
            self.step(Loaded(op.op, good))
        else:
            assert isinstance(op, TierProbe), op
            every = [one for batch in op.batches for one in names(batch)]
            self.step(Probed(op.op, self._bools(which, every, shelf.__contains__)))

    def _bools(self, which: tuple[bool, ...], every: list[Record], right: Any) -> Any:
        assert not which or len(which) == len(every), every
        return np.array(which or [bool(right(one)) for one in every], np.bool_)

    def replies(self, connection: int) -> list[Any]:
        """What ``connection`` was sent since the last call."""
        mine = [message for who, message in self.said if who == connection]
        self.said = [(who, message) for who, message in self.said if who != connection]
        return mine

    def ready(self, instance: str = "e", **fields: Any) -> Engine:
        """An engine whose namespace's epochs are known."""
        engine = self.engine(instance, **fields)
        self.answer_all()
        self.replies(engine.scheduler)
        return engine

    def look_up(self, engine: Engine, *wanted: object, **fields: Any) -> list[Any]:
        """Ask, answer the tiers, and the replies."""
        self.begin(engine, *wanted, **fields)
        self.answer_all()
        return self.replies(engine.scheduler)

    def begin(self, engine: Engine, *wanted: object, **fields: Any) -> None:
        """Ask only."""
        self.replies(engine.scheduler)
        message = m.Lookup(seq=7, request="r", digests=digests(*wanted), width=WIDTH, **fields)
        self.say(engine.scheduler, message)

    def only_in_tiers(self, engine: Engine, *wanted: object, **item: Any) -> None:
        """Store these; then L1 has nothing any more."""
        engine.store(*wanted, **item)
        self.answer_all()
        self.forget_l1()
        assert self.status["rows"] == 0
        self.replies(engine.scheduler)

    def forget_l1(self) -> None:
        """L1 loses what it holds, and the tiers do not."""
        self.machine.state.classes.clear(self.machine.state.namespaces.values())
        self.machine.state.allocator.reclaim()


def prefetch(engine: Engine, *chunks: object) -> m.Prefetch:
    """A prefetch by whoever is no engine."""
    return m.Prefetch("p", digests(*chunks), WIDTH, namespace=engine.namespace, seq=5)


def names(records: Records) -> list[Record]:
    """What each of ``records`` is called."""
    return [
        (records.namespace, records.epoch, records.group, key.tobytes()) for key in records.keys
    ]


def another_boot(rig: TierRig) -> TierRig:
    """A daemon that starts now, with the same tiers."""
    again = TierRig(core={"boot": b"another boot 123"})
    again.shelves, again.notes, again.now = rig.shelves, rig.notes, rig.now
    return again
