"""Observes what passes between the core and its tiers.

A page that a tier may still read or write belongs to nobody else. The observer sees events and
effects, and what the tiers report of the arena's pages; never the core.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvass.core import effects as fx
from kvass.types import U64Array
from tests.support.witness.records import (
    BrokenLawError,
    LoadedRow,
    Pending,
    Place,
    RowKey,
    Tag,
    TierLoading,
    list_places,
    pages,
)
from tests.support.witness.state import ObservedState

LOADING_SHARE = 0.5
"""Of the arena: the most that may be LOADING at a time."""


def digests_of(keys: U64Array) -> list[bytes]:
    """The chunk hashes of records without their padding (no hash here ends in a zero)."""
    return [row.tobytes().rstrip(b"\0") for row in np.ascontiguousarray(keys)]


class TierWitness:
    """Checks every tier operation."""

    def __init__(self, state: ObservedState) -> None:
        self.state = state
        self.emptied = False
        """Whether a tier was to forget everything."""
        self._last_op = 0
        self._began = set[int]()
        """Operations that have begun."""
        self._clears: dict[int, int] = {}
        """By ``TierEpoch``: how often its namespace had been cleared when it began."""
        self._held: set[tuple[int, int, RowKey]] = set()
        """(tier, epoch, row) that a tier said it holds."""

    def began(self, effect: fx.ToTier, clear: Pending | None) -> None:
        """An operation begins; ``clear`` is the clear that caused it, if one did."""
        state = self.state
        late = isinstance(effect, fx.TierLoad) and effect.op not in self._began  # it was held
        if (effect.op <= self._last_op and not late) or effect.tier not in state.tiers:
            raise BrokenLawError(f"an operation's number, or its tier: {effect}")
        self._last_op = max(self._last_op, effect.op)
        self._began.add(effect.op)
        state.ops[effect.op] = effect
        if isinstance(effect, fx.TierLoad):
            self._load(effect)
        elif isinstance(effect, fx.TierStore):
            self._store(effect)
        elif isinstance(effect, fx.TierProbe):
            for batch in effect.batches:
                self._check_named(effect.tier, batch)
        elif isinstance(effect, fx.TierClear):
            self.emptied = True
        elif isinstance(effect, fx.TierEpoch):
            namespace = state.by_digest[effect.namespace]
            if namespace.private:
                raise BrokenLawError(f"a tier is to note an epoch of one instance's own: {effect}")
            self._clears[effect.op] = state.archive.clears[namespace.key]
        notes = isinstance(effect, fx.TierEpoch) and effect.renew
        if clear is not None and (notes or isinstance(effect, fx.TierClear)):
            clear.awaits.add(effect.op)

    def changed(self, event: fx.TiersAre) -> None:
        """Others are used: what comes, or may have changed, is to tell its epochs first."""
        kept = {*self.state.tiers} & {*event.numbers} - {*event.renewed}
        self.state.tiers = [*event.numbers]
        self.state.epochs = {of: told for of, told in self.state.epochs.items() if of[1] in kept}

    def ended(self, event: fx.FromTier) -> None:
        """An operation is over."""
        state = self.state
        effect = state.ops.pop(event.op)
        if not isinstance(event, fx.ENDS[type(effect)]):
            raise BrokenLawError(f"{effect} ended as {event}")
        if isinstance(event, fx.Loaded):
            self._loaded(event)
        elif isinstance(event, fx.Stored):
            for _, _, place in state.stores.pop(event.op):
                for page in pages(place):
                    state.storing[page].discard(event.op)
        elif isinstance(event, fx.Probed) and isinstance(effect, fx.TierProbe):
            rows = (
                (effect.tier, batch.epoch, row)
                for batch in effect.batches
                for row in self._rows(batch)
            )
            self._held.update(row for row, yes in zip(rows, event.held, strict=True) if yes)
        elif isinstance(event, fx.EpochIs) and isinstance(effect, fx.TierEpoch):
            clears = state.archive.clears[state.by_digest[effect.namespace].key]
            if event.epoch is not None and self._clears.pop(event.op) == clears:
                state.epochs.setdefault((effect.namespace, effect.tier), []).append(event.epoch)
        failed = isinstance(event, fx.EpochIs) and event.epoch is None
        failed = failed or (isinstance(event, fx.Emptied) and not event.done)
        for pending in state.pending.values():
            if event.op in pending.awaits:
                pending.awaits.discard(event.op)
                pending.failed = pending.failed or failed

    # ------------------------------------------------------------ loads and stores

    def _rows(self, records: fx.Records) -> Iterator[RowKey]:
        namespace = self.state.by_digest[records.namespace]
        return ((namespace, records.group, key) for key in digests_of(records.keys))

    def _check_named(self, tier: int, records: fx.Records) -> None:
        """Their namespace, group and epoch exist."""
        namespace = self.state.by_digest.get(records.namespace)
        if namespace is None or not 0 <= records.group < namespace.groups:
            raise BrokenLawError(f"law 10: a tier is asked for {records}")
        if records.epoch not in self.state.epochs.get((records.namespace, tier), ()):
            raise BrokenLawError(f"law 8: tier {tier} never told epoch {records.epoch}")

    def _places(self, effect: fx.TierLoad | fx.TierStore) -> list[tuple[RowKey, Place]]:
        self._check_named(effect.tier, effect.records)
        rows = list(self._rows(effect.records))
        namespace, group = rows[0][:2]
        if effect.shard_bytes != namespace.shard_bytes[group]:
            raise BrokenLawError(f"law 10: shards of another size: {effect}")
        return list(zip(rows, list_places(effect.slots, effect.shard_bytes), strict=True))

    def _load(self, effect: fx.TierLoad) -> None:
        state, placed = self.state, self._places(effect)
        namespace = placed[0][0][0]
        taken = state.being_loaded() | state.being_written()
        for row, place in placed:
            if row in taken:
                raise BrokenLawError(f"{row[1:]} is loaded, but somebody loads or writes it")
            taken.add(row)
            if (effect.tier, effect.records.epoch, row) not in self._held:
                raise BrokenLawError(f"{row[1:]} is loaded from a tier that did not say it has it")
            state.replace(row)
            for page in pages(place):
                state.claim(page)
                state.loading[page] = effect.op
        passing = not state.config.keep_loaded
        rows = [LoadedRow(row, place, passing=passing) for row, place in placed]
        size = len(placed) * sum(effect.shard_bytes)
        state.loads[effect.op] = TierLoading(namespace, namespace.epoch, size, rows)
        total = sum(load.bytes for load in state.loads.values())
        if total > state.config.arena_bytes * LOADING_SHARE:
            raise BrokenLawError(f"law 12: {total} bytes are LOADING")

    def _loaded(self, event: fx.Loaded) -> None:
        load = self.state.loads.pop(event.op)
        for row, good in zip(load.rows, event.which, strict=True):
            for page in pages(row.place):
                del self.state.loading[page]
            if good and load.current:
                self.state.publish(row.key, row, row.place)

    def _store(self, effect: fx.TierStore) -> None:
        state = self.state
        rows = state.stores[effect.op] = []
        for row, place in self._places(effect):
            source, at = state.ready.get(row, (None, None))
            if source is None or at != place:
                raise BrokenLawError(f"law 4: a tier is given {row[1:]} at {place}, but: {at}")
            rows.append((row, source, place))
            for page in pages(place):
                state.storing.setdefault(page, set()).add(effect.op)

    # ------------------------------------------------------------ what tiers do to pages

    def writes(self, op: int, page: int, now: float) -> None:
        """A tier's bytes arrive on ``page``."""
        if self.state.loading.get(page) != op:
            raise BrokenLawError(f"law 3: bytes of tier operation {op} hit page {page}")
        self.state.unread(page, f"bytes of tier operation {op}", now)

    def reads(self, op: int, number: int, shard: int) -> Tag | None:
        """What a tier must see on the pages of a shard that it stores."""
        row, source, _ = self.state.stores[op][number]
        return source.tag(row, shard)

    def brought(self, op: int, number: int, tags: list[Tag | None]) -> None:
        """What a tier has put into a row, by shard."""
        self.state.loads[op].rows[number].tags = tags
