"""What passes between the core and its tiers, to a witness.

Law of this file: as ``witness``: events and effects only, and what the tiers themselves say they
did to the arena. What a tier may still read or write is nobody else's; what it brought is judged
when it is matched: by whom each page was written, for which row, and before which clear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvass import messages as m
from kvass.core.effects import (
    Emptied,
    EpochIs,
    FromTier,
    Loaded,
    Probed,
    Records,
    Stored,
    TierClear,
    TierEpoch,
    TierLoad,
    TierProbe,
    TierStore,
    ToTier,
)
from kvass.types import PAGE, U64Array
from tests.support.witness.records import (
    BrokenLawError,
    Fill,
    Namespace,
    Place,
    Reservation,
    RowKey,
    Source,
    Tag,
    list_places,
    pages,
)
from tests.support.witness.waiting import Pending, WaitingWitness

LOADING_SHARE = 0.5

_ENDS: dict[type[ToTier], type[FromTier]] = {
    TierProbe: Probed,
    TierLoad: Loaded,
    TierStore: Stored,
    TierEpoch: EpochIs,
    TierClear: Emptied,
}


def digests_of(keys: U64Array) -> list[bytes]:
    """The chunk hashes of records, without what fills them up (no hash here ends in a zero)."""
    return [row.tobytes().rstrip(b"\0") for row in np.ascontiguousarray(keys)]


@dataclass(eq=False, slots=True)
class Filling:
    """A ``TierLoad`` under way."""

    namespace: Namespace
    epoch: int
    bytes: int
    fills: list[Fill]


class TierWitness(WaitingWitness):
    """The part of the witness that watches tiers."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.last_op = 0
        self.fillings: dict[int, Filling] = {}
        self.filled: dict[int, int] = {}
        """Page -> the load that may write to it."""
        self.stores: dict[int, list[tuple[RowKey, Source, Place]]] = {}
        self.stored: dict[int, set[int]] = {}
        """Page -> the stores that may read it."""
        self.asked: dict[int, int] = {}
        """How often its namespace had been cleared when an epoch was asked for."""
        self.held: set[tuple[int, int, RowKey]] = set()
        """(tier, epoch, row) that a tier said it holds."""
        self.emptied = False
        """A tier was to forget everything, at whatever moment."""

    # ------------------------------------------------------------ what tiers are asked

    def tier_asked(self, effect: ToTier, one: Pending | None, now: float) -> None:
        """An operation begins; ``one``: the clear of this step."""
        if effect.op <= self.last_op or not 0 <= effect.tier < len(self.names):
            raise BrokenLawError(f"an operation's number, or its tier: {effect}")
        self.last_op = effect.op
        self.ops[effect.op] = effect
        if isinstance(effect, TierLoad):
            self._load(effect, now)
        elif isinstance(effect, TierStore):
            self._store(effect, now)
        elif isinstance(effect, TierProbe):
            for batch in effect.batches:
                self._rows(effect.tier, batch)
        elif isinstance(effect, TierClear):
            self.emptied = True
        elif isinstance(effect, TierEpoch):
            if self.by_digest[effect.namespace].private:
                raise BrokenLawError(f"a tier is to note an epoch of one engine's own: {effect}")
            self.asked[effect.op] = self.archive.clears[self.by_digest[effect.namespace].key]
        if isinstance(effect, TierEpoch | TierClear) and one is not None:
            one.awaits.add(effect.op)

    def _rows(self, tier: int, records: Records) -> list[RowKey]:
        namespace = self.by_digest.get(records.namespace)
        if namespace is None or not 0 <= records.group < namespace.groups:
            raise BrokenLawError(f"law 10: a tier is asked for {records}")
        if records.epoch not in self.told.get((records.namespace, tier), ()):
            raise BrokenLawError(f"law 8: tier {tier} never told epoch {records.epoch}")
        return [(namespace, records.group, key) for key in digests_of(records.keys)]

    def _placed(self, effect: TierLoad | TierStore) -> list[tuple[RowKey, Place]]:
        rows = self._rows(effect.tier, effect.records)
        namespace, group = rows[0][:2]
        if effect.shard_bytes != namespace.shard_bytes[group]:
            raise BrokenLawError(f"law 10: shards of another size: {effect}")
        return list(zip(rows, list_places(effect.slots, effect.shard_bytes), strict=True))

    def _load(self, effect: TierLoad, now: float) -> None:
        placed = self._placed(effect)
        namespace = placed[0][0][0]
        size = len(placed) * sum(effect.shard_bytes)
        loading = {f.key for x in self.fillings.values() if self._current(x) for f in x.fills}
        writing = {
            row
            for w in self.reservations.values()
            if w.epoch == w.namespace.epoch and w.holds(now)
            for row in w.keys
        }
        for row, place in placed:
            if row in loading or row in writing:
                raise BrokenLawError(f"{row[1:]} is loaded, but somebody loads or writes it")
            loading.add(row)
            if (effect.tier, effect.records.epoch, row) not in self.held:
                raise BrokenLawError(f"{row[1:]} is loaded from a tier that did not say it has it")
            self.replaced(row)
            for page in pages(place):
                self.claim(page, now)
                self.filled[page] = effect.op
        fills = [Fill(row, place, passing=not self.retain) for row, place in placed]
        self.fillings[effect.op] = Filling(namespace, namespace.epoch, size, fills)
        share = sum(x.bytes for x in self.fillings.values())
        if share > self.arena_pages * PAGE * LOADING_SHARE:
            raise BrokenLawError(f"law 12: {share} bytes are LOADING")

    @staticmethod
    def _current(one: Filling) -> bool:
        """It is not of before a clear."""
        return one.epoch == one.namespace.epoch

    def replaced(self, row: RowKey) -> None:
        """Somebody may fill or write it anew, so it was evicted before."""
        source = self.ready.pop(row, (None,))[0]
        passing = isinstance(source, Fill) and source.passing
        if self.roomy and source is not None and not passing:
            raise BrokenLawError(f"a READY row was given away: {row[1:]}")

    def claim(self, page: int, now: float) -> None:
        """``page`` changes hands: nobody may be using it (laws 3 and 6)."""
        if not 0 <= page < self.arena_pages:
            raise BrokenLawError(f"page {page} lies outside the arena")
        before = self.written.get(page)
        if before is not None and not before.over(now):
            raise BrokenLawError(f"law 3: page {page} may still be written by {before.id}")
        if page in self.filled:
            raise BrokenLawError(f"law 3: a tier may still write to page {page}")
        if any(r.live(now) for r in self.pinned.pop(page, ())):
            raise BrokenLawError(f"law 6: page {page} is pinned, yet was handed out")
        if self.stored.get(page):
            raise BrokenLawError(f"law 6: a tier may still read page {page}")
        row = self.on_page.pop(page, None)
        if row is not None and self.ready.get(row[0], (None,))[0] is row[1]:
            self.replaced(row[0])

    def _store(self, effect: TierStore, now: float) -> None:
        rows = self.stores[effect.op] = []
        for row, place in self._placed(effect):
            source, at = self.ready.get(row, (None, None))
            if source is None or at != place:
                raise BrokenLawError(f"law 4: a tier is given {row[1:]} at {place}, but: {at}")
            rows.append((row, source, place))
            for page in pages(place):
                self.stored.setdefault(page, set()).add(effect.op)

    # ------------------------------------------------------------ what tiers do and answer

    def unread(self, page: int, whose: str, now: float) -> None:
        super().unread(page, whose, now)
        if self.stored.get(page):
            raise BrokenLawError(f"law 6: {whose} hit page {page}, which a tier reads")

    def tier_writes(self, op: int, page: int, now: float) -> None:
        """A tier's bytes arrive on ``page``."""
        if self.filled.get(page) != op:
            raise BrokenLawError(f"law 3: bytes of tier operation {op} hit page {page}")
        self.unread(page, f"bytes of tier operation {op}", now)

    def tier_reads(self, op: int, number: int, shard: int) -> Tag | None:
        """What a tier must see on the pages of a row's shard that it stores."""
        row, source, _ = self.stores[op][number]
        return source.tag(row, shard)

    def brought(self, op: int, number: int, tags: list[Tag | None]) -> None:
        """What a tier says it put into a row, shard by shard."""
        self.fillings[op].fills[number].tags = tags

    def tier_ended(self, event: FromTier) -> None:
        """An operation is over."""
        effect = self.ops.pop(event.op)
        if not isinstance(event, _ENDS[type(effect)]):
            raise BrokenLawError(f"{effect} ended as {event}")
        if isinstance(event, Loaded):
            self._loaded(event)
        elif isinstance(event, Stored):
            for _, _, place in self.stores.pop(event.op):
                for page in pages(place):
                    self.stored[page].discard(event.op)
        elif isinstance(event, Probed) and isinstance(effect, TierProbe):
            rows = [
                (effect.tier, batch.epoch, row)
                for batch in effect.batches
                for row in self._named(batch)
            ]
            self.held.update(row for row, yes in zip(rows, event.held, strict=True) if yes)
        elif isinstance(event, EpochIs) and isinstance(effect, TierEpoch):
            clears = self.archive.clears[self.by_digest[effect.namespace].key]
            if event.epoch is not None and self.asked.pop(event.op) == clears:
                told = self.told.setdefault((effect.namespace, effect.tier), [])
                told.append(event.epoch)
        failed = isinstance(event, EpochIs) and event.epoch is None
        failed = failed or (isinstance(event, Emptied) and not event.done)
        for one in self.pending.values():
            if event.op in one.awaits:
                one.awaits.discard(event.op)
                one.failed = one.failed or failed

    def _named(self, records: Records) -> list[RowKey]:
        namespace = self.by_digest[records.namespace]
        return [(namespace, records.group, key) for key in digests_of(records.keys)]

    def _loaded(self, event: Loaded) -> None:
        filling = self.fillings.pop(event.op)
        for fill, good in zip(filling.fills, event.which, strict=True):
            for page in pages(fill.place):
                del self.filled[page]
            if good and self._current(filling):
                self.ready[fill.key] = fill, fill.place
                for page in pages(fill.place):
                    self.on_page[page] = fill.key, fill

    def judge(self, row: RowKey, source: Source) -> None:
        """What is matched was written for this very row, whole, and not before a clear."""
        namespace, group, key = row
        if isinstance(source, Reservation) or source.tags is None:
            return
        for shard, tag in enumerate(source.tags):
            if tag is None:
                continue  # a shard without pages
            writing = self.archive.reservations.get(tag[:2])
            if writing is None or not writing.published or tag[3] != shard:
                raise BrokenLawError(f"law 4: matched {row[1:]}, but shard {shard} holds {tag}")
            whose, of, what = writing.rows[tag[2]][0]
            if (whose.key, of, what) != (namespace.key, group, key):
                raise BrokenLawError(f"law 4: matched {row[1:]}, but it holds {(of, what)}")
            if writing.clears < namespace.floor:
                raise BrokenLawError(f"law 8: matched {row[1:]}, which was cleared: {tag}")

    def _has(self, *record: Any) -> bool:
        return self.holds is not None and self.holds(*record)

    # ------------------------------------------------------------ the end

    def settled(self, status: dict[str, Any], write_through: bool) -> None:
        """Clients and tiers have ended all they did: what was to stay is there, and no more."""
        sources = [source for source, _ in self.ready.values()]
        stay = sum(not (isinstance(s, Fill) and s.passing and s.lent) for s in sources)
        least = sum(map(self.surely_ready, self.ready)) if self.roomy else 0
        if not least <= status["rows"] <= stay:
            raise BrokenLawError(f"{status['rows']} rows are READY, not {least} to {stay}")
        if self.holds is None:
            return
        if any(tier["flush_queue_rows"] for tier in status["tiers"]):
            raise BrokenLawError(f"rows are queued for tiers that are idle: {status['tiers']}")
        if self.roomy and write_through and not self.emptied:
            self._flushed()

    def _flushed(self) -> None:
        """Tiers that are well have all that is READY, where it is written through and stays."""
        for (namespace, group, key), (source, _) in self.ready.items():
            if namespace.private:
                continue
            digest = next(d for d, s in self.by_digest.items() if s is namespace)
            held = [
                any(self._has(digest, epoch, group, key, tier) for epoch in told[-1:])
                for tier, told in enumerate(self._told(digest))
            ]
            if not (all(held) if isinstance(source, Reservation) else any(held)):
                raise BrokenLawError(f"READY, yet not flushed: {(group, key)}, tiers: {held}")

    def busy(self, now: float) -> bool:
        return bool(self.fillings or self.stores) or super().busy(now)

    def compare(self, status: dict[str, object]) -> None:
        super().compare(status)
        waiting = sum(not isinstance(one.message, m.Clear) for one in self.pending.values())
        loading = sum(len(x.fills) for x in self.fillings.values())
        if (status["promotions"], status["rows_loading"]) != (waiting, loading):
            told = f"{status['promotions']} promotions, {status['rows_loading']} rows LOADING"
            raise BrokenLawError(f"law 2: {told}, but {waiting} and {loading} are open")
