"""Simulated tiers: they are slow, fail, lose records and give wrong answers to probes.

They do what a real tier may do, at any moment between an operation's begin and end. A record holds
what the slot's pages held when the tier read them; a failed load may have written garbage. Tiers
outlive the daemon: operations that were open when it ended may still take effect.

A tier may be restored from a snapshot of records and notes. Then old records would match again if
no daemon knew better. So only those notes are restored whose highest epoch the daemon has seen. If
it reads such a note later, it must correct it; if it ends before, the note is corrected here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvass.core import effects as fx
from kvass.core.tiers.epochs import to_note
from tests.support.witness.records import BrokenLawError, Place, Tag, list_places
from tests.support.witness.tiers import digests_of

if TYPE_CHECKING:
    from tests.support.simulation.world import World

RecordKey = tuple[bytes, int, int, bytes]
"""(namespace, epoch, group, chunk hash)."""

Content = list[list[Tag | None]]
"""What the pages of a row held, per shard."""


@dataclass(eq=False, slots=True)
class SimTier:
    """The state of one tier. ``ill``: the probability that an operation fails."""

    ill: float
    mean_s: float
    records: dict[RecordKey, Content] = field(default_factory=dict)
    notes: dict[bytes, int] = field(default_factory=dict)
    down_until: float = 0.0
    snapshot: tuple[dict[RecordKey, Content], dict[bytes, int]] = field(
        default_factory=lambda: ({}, {})
    )
    put_back: dict[bytes, int] = field(default_factory=dict)
    """Notes from before the tier was restored, which nobody has asked for since."""
    highest: dict[bytes, int] = field(default_factory=dict)
    """By namespace: the highest epoch that was ever noted."""
    told: dict[bytes, int] = field(default_factory=dict)
    """By namespace: the highest epoch that the daemon of this boot was told."""
    went_back: float = 0.0


@dataclass(eq=False, slots=True)
class Operation:
    """One open operation."""

    effect: fx.ToTier
    tier: SimTier
    began: float
    ends: float
    keys: list[RecordKey] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    contents: dict[int, Content | None] = field(default_factory=dict)
    told: int | None = None


class SimTiers:
    """All tiers of a world, and their open operations."""

    def __init__(self, world: World, seed: int, count: int, healthy: bool) -> None:
        rng = world.rng
        self.world = world
        self.healthy = healthy
        self.tiers = [
            SimTier(0.0 if healthy else rng.choice([0.02, 0.1, 0.3]), rng.choice([0.002, 0.02]))
            for _ in range(count)
        ]
        self._chance = random.Random(f"tiers {seed}")  # the histories of other worlds stay
        self._at_start, self.used = count, [*range(count)]
        self.changing = bool(count) and not healthy and self._chance.random() < 0.5
        """Whether an operator adds tiers, removes them and names them in another order."""
        if self.changing:
            self.tiers.append(SimTier(0.1, 0.002))
        self.goes_back = rng.choice([0.0, 0.02, 0.1])
        self.open: dict[int, Operation] = {}
        self.unsettled = False
        """A tier was restored and the daemon has seen it: a hard moment for a restart."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"tier{i}" for i in range(self._at_start))

    def holds(self, digest: bytes, epoch: int, group: int, key: bytes, tier: int) -> bool:
        """Whether a tier has the record."""
        return (digest, epoch, group, key) in self.tiers[tier].records

    # ------------------------------------------------------------ the daemon

    def boot(self) -> None:
        """The daemon is gone: of its open operations some take effect, and some do not."""
        rng = self.world.rng
        for under in self.open.values():
            if rng.random() < 0.5:
                self._outlives(under)
        self.open.clear()
        self.unsettled = False
        for tier in self.tiers:
            tier.notes.update(tier.put_back)
            tier.put_back.clear()
            tier.told.clear()
        for number in {*range(len(self.tiers))} - {*self.used}:
            self.tiers[number].records.clear()  # as its operator is told: it missed clears
        self.used = [*range(self._at_start)]

    def change(self) -> None:
        """Now and then other tiers are used. One that owes answers does not come back yet."""
        if not self.changing or self._chance.random() > 0.02:
            return
        busy = {under.effect.tier for under in self.open.values()}
        numbers = self._chance.sample(
            range(len(self.tiers)), self._chance.randint(0, len(self.tiers))
        )
        numbers = [n for n in numbers if n in self.used or n not in busy]
        idle = [n for n in numbers if n in self.used and n not in busy]
        self.used = numbers
        names = tuple(f"tier{n}" for n in numbers)
        renewed = tuple(n for n in idle if self._chance.random() < 0.3)
        self.world.step(fx.TiersAre(tuple(numbers), names, renewed))

    def _outlives(self, under: Operation) -> None:
        effect, tier = under.effect, under.tier
        if isinstance(effect, fx.TierStore):
            for i, key in enumerate(under.keys):
                content = under.contents[i]
                if content is not None and all(
                    len(seen) == len(run)
                    for seen, run in zip(content, under.places[i], strict=True)
                ):
                    tier.records[key] = content
        elif isinstance(effect, fx.TierEpoch):
            self._note(under)
        elif isinstance(effect, fx.TierClear):
            tier.records.clear()

    def take(self, effect: fx.ToTier) -> None:
        """Begin an operation that the core asks for."""
        world, rng = self.world, self.world.rng
        tier = self.tiers[effect.tier]
        if rng.random() < tier.ill / 4:
            self._decay(tier)
        if rng.random() < tier.ill / 4:
            tier.down_until = world.now + rng.random() * 4
        if tier.ill and rng.random() < self.goes_back:
            if rng.random() < 0.3 or not tier.snapshot[1]:
                self.take_snapshots()
            else:
                self.go_back(effect.tier)
        lasts = rng.expovariate(1 / tier.mean_s)
        if rng.random() < tier.ill:
            lasts = rng.random() * 9
        under = Operation(effect, tier, world.now, world.now + lasts)
        self.open[effect.op] = under
        if isinstance(effect, fx.TierProbe):
            under.keys = [key for batch in effect.batches for key in _keys(batch)]
            self._at(under, self._look)
        elif isinstance(effect, fx.TierLoad | fx.TierStore):
            under.keys = _keys(effect.records)
            under.places = list_places(effect.slots, effect.shard_bytes)
            self._move(under, isinstance(effect, fx.TierStore))
        elif isinstance(effect, fx.TierEpoch):
            if not self._fails(tier):
                self._at(under, self._note)
        elif isinstance(effect, fx.TierClear):
            self._at(under, self._empty)
        world.later(under.ends, partial(self._finish, under))
        if rng.random() < 0.02:
            report = fx.TierReport(effect.tier, {"mood": "so so"})
            world.later(under.ends, partial(self._tell, report))

    def _at(self, under: Operation, what: Callable[[Operation], None]) -> None:
        """Do ``what`` at some moment before the operation ends."""
        when = under.began + self.world.rng.random() * (under.ends - under.began)
        self.world.later(when, partial(what, under))

    def _fails(self, tier: SimTier) -> bool:
        return self.world.now < tier.down_until or self.world.rng.random() < tier.ill

    def _decay(self, tier: SimTier) -> None:
        """Records are evicted, or lost; notes are lost."""
        rng = self.world.rng
        for key in [key for key in tier.records if rng.random() < 0.3]:
            del tier.records[key]
        if rng.random() < 0.3:
            tier.notes.clear()

    def take_snapshots(self) -> None:
        """Take a snapshot of every tier."""
        for tier in self.tiers:
            tier.snapshot = dict(tier.records), dict(tier.notes)

    def go_back(self, number: int) -> None:
        """Restore a tier from its last snapshot, and tell the core that it was down."""
        tier = self.tiers[number]
        records, notes = tier.snapshot
        tier.records, tier.notes, tier.went_back = dict(records), dict(notes), self.world.now
        for namespace, epoch in tier.highest.items():
            if tier.told.get(namespace) == epoch:
                tier.put_back[namespace] = epoch
            else:  # the daemon could not notice
                tier.notes[namespace] = epoch
        for up in (False, True):
            when = self.world.now + up * self.world.rng.random()
            self.world.later(when, partial(self._tell, fx.TierReport(number, {"up": up})))

    # ------------------------------------------------------------ operations

    def _look(self, under: Operation) -> None:
        if self._fails(under.tier):
            return
        rng, ill = self.world.rng, under.tier.ill
        under.held = [(key in under.tier.records) != (rng.random() < ill / 4) for key in under.keys]

    def _note(self, under: Operation) -> None:
        effect, tier = under.effect, under.tier
        assert isinstance(effect, fx.TierEpoch)
        clock_s = self.world.now * 1000  # it runs faster than clears come
        under.told = to_note(effect, tier.notes.get(effect.namespace), clock_s)
        if effect.renew and tier.ill and self.world.rng.random() < 0.5:
            tier.snapshot = (
                dict(tier.records),
                dict(tier.notes),
            )  # just before the note: a hard moment
        tier.notes[effect.namespace] = under.told
        tier.highest[effect.namespace] = max(under.told, tier.highest.get(effect.namespace, 0))
        if under.began >= tier.went_back:
            seen = tier.put_back.pop(effect.namespace, None)
            self.unsettled = self.unsettled or (seen is not None and self.world.rng.random() < 0.3)

    def _empty(self, under: Operation) -> None:
        records = under.tier.records
        under.told = 0 if self._fails(under.tier) else 1
        for key in [key for key in records if under.told or self.world.rng.random() < 0.5]:
            del records[key]

    def _move(self, under: Operation, store: bool) -> None:
        """Copy every shard of every row, each at its own moment."""
        for i, place in enumerate(under.places):
            if store:
                under.contents[i] = [[] for _ in place]
            for shard in range(len(place)):
                move = self._read if store else self._write
                self._at(under, partial(move, number=i, shard=shard))

    def _read(self, under: Operation, number: int, shard: int) -> None:
        content = under.contents[number]
        assert content is not None
        due = self.world.witness.tiers.reads(under.effect.op, number, shard)
        for page in under.places[number][shard]:
            seen = self.world.memory.pages.get(page)
            if seen != due:
                raise BrokenLawError(f"law 6: a tier read {seen} on page {page}, not {due}")
            content[shard].append(seen)

    def _write(self, under: Operation, number: int, shard: int) -> None:
        rng, op = self.world.rng, under.effect.op
        content = self._found(under, number)
        run = under.places[number][shard]
        if content is None and rng.random() < 0.5:
            return
        for i, page in enumerate(run):
            if content is not None and len(content[shard]) != len(run):
                raise BrokenLawError(
                    f"law 10: a record with other shard sizes: {under.keys[number]}"
                )
            self.world.witness.tiers.writes(op, page, self.world.now)
            garbage = b"garbage", op, number, shard
            self.world.memory.pages[page] = garbage if content is None else content[shard][i]

    def _found(self, under: Operation, number: int) -> Content | None:
        """The record; None: it is missing, or its checksum will be wrong."""
        if number not in under.contents:
            found = under.tier.records.get(under.keys[number])
            under.contents[number] = None if self._fails(under.tier) else found
        return under.contents[number]

    # ------------------------------------------------------------ ends

    def _finish(self, under: Operation) -> None:
        del self.open[under.effect.op]
        self.world.step(self._end(under))

    def _tell(self, report: fx.TierReport) -> None:
        self.world.step(report)

    def _end(self, under: Operation) -> fx.FromTier:
        effect, rng = under.effect, self.world.rng
        if isinstance(effect, fx.TierProbe):
            held = under.held or [False] * len(under.keys)
            return fx.Probed(effect.op, np.array(held, np.bool_))
        if isinstance(effect, fx.TierLoad):
            found = [self._found(under, i) for i in range(len(under.keys))]
            for i, content in enumerate(found):
                if content is not None:
                    tags = [_one(shard) for shard in content]
                    self.world.witness.tiers.brought(effect.op, i, tags)
            which = np.array([content is not None for content in found], np.bool_)
            return fx.Loaded(effect.op, which)
        if isinstance(effect, fx.TierStore):
            if self.world.now < under.tier.down_until:
                return fx.Stored(effect.op, np.zeros(len(under.keys), np.bool_), down=True)
            return fx.Stored(effect.op, self._keep(under))
        if isinstance(effect, fx.TierEpoch):
            late = under.told is None or self._fails(under.tier)
            if late and rng.random() < 0.5:  # it takes effect after the timeout
                self.world.later(self.world.now + rng.random() * 5, partial(self._note, under))
            if late or under.told is None:
                return fx.EpochIs(effect.op, None)
            told = under.tier.told
            told[effect.namespace] = max(under.told, told.get(effect.namespace, 0))
            return fx.EpochIs(effect.op, under.told)
        if isinstance(effect, fx.TierClear):
            return fx.Emptied(effect.op, bool(under.told))
        return effect.failed()

    def _keep(self, under: Operation) -> npt.NDArray[np.bool_]:
        which = np.ones(len(under.keys), np.bool_)
        for i, key in enumerate(under.keys):
            which[i] = not self._fails(under.tier)
            content = under.contents[i]
            if content is not None and (which[i] or self.world.rng.random() < 0.3):
                under.tier.records[key] = content
        return which


def _keys(records: fx.Records) -> list[RecordKey]:
    named = records.namespace, records.epoch, records.group
    return [(*named, key) for key in digests_of(records.keys)]


def _one(seen: list[Tag | None]) -> Tag | None:
    """The tag that all pages of a shard hold."""
    if any(tag != seen[0] for tag in seen):
        raise BrokenLawError(f"a record of several writers' pages: {seen}")
    return seen[0] if seen else None
