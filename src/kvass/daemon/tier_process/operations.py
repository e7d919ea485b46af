"""The calls of a tier that an effect needs, and the event that ends the effect.

Law of this file: the tier gets views of the arena's bytes; this file never reads the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core import effects
from kvass.core.tiers.epochs import to_note
from kvass.errors import TierDown
from kvass.tiers.base import Buffer, DividedTier, Shards, Tier
from kvass.tiers.codec import record_key
from kvass.types import Slots

_NOTE: Final = "epoch2."
"""``epoch.`` were notes whose values have no order."""
_EPOCH_BYTES: Final = 8
_MEET_S: Final = 0.2
"""Daemons that find no note within this time of each other agree about its epoch."""


def perform(effect: effects.ToTier, tier: Tier, arena: Buffer) -> effects.FromTier:
    """Carry out an effect in the caller's thread, however long the tier takes. Raises ``TierDown``,
    and any exception of a tier that breaks its promises."""
    if isinstance(effect, effects.TierProbe):
        keys = [key for batch in effect.batches for key in _keys(batch)]
        return effects.Probed(effect.op, _flags(tier.probe(keys), len(keys)))
    if isinstance(effect, effects.TierLoad):
        keys = _keys(effect.records)
        into = shards(arena, effect.slots, effect.shard_bytes)
        return effects.Loaded(effect.op, _flags(tier.load(keys, into), len(keys)))
    if isinstance(effect, effects.TierStore):
        return effects.Stored(effect.op, _store(effect, tier, arena))
    if isinstance(effect, effects.TierEpoch):
        return effects.EpochIs(effect.op, _epoch(effect, tier))
    tier.clear()
    return effects.Emptied(effect.op, True)


def failure(effect: effects.ToTier) -> effects.FromTier:
    """The event that ends an effect if the tier was not called, or failed."""
    if isinstance(effect, effects.TierProbe):
        return effects.Probed(effect.op, _none(sum(len(batch.keys) for batch in effect.batches)))
    if isinstance(effect, effects.TierLoad):
        return effects.Loaded(effect.op, _none(len(effect.records.keys)))
    if isinstance(effect, effects.TierStore):
        return effects.Stored(effect.op, _none(len(effect.records.keys)), down=True)
    if isinstance(effect, effects.TierEpoch):
        return effects.EpochIs(effect.op, None)
    assert isinstance(effect, effects.TierClear)
    return effects.Emptied(effect.op, False)


def shards(arena: Buffer, slots: Slots, shard_bytes: tuple[int, ...]) -> list[Shards]:
    """Views of the slot of each row, one per shard."""
    ranks = [slots.offsets(rank, size).tolist() for rank, size in enumerate(shard_bytes)]
    for offsets, size in zip(ranks, shard_bytes, strict=True):
        assert max(offsets, default=0) + size <= len(arena), "a slot outside the arena"
    return [
        [arena[at : at + size] for at, size in zip(row, shard_bytes, strict=True)]
        for row in zip(*ranks, strict=True)
    ]


def _keys(records: effects.Records) -> list[bytes]:
    return [
        record_key(records.namespace, records.epoch, records.group, chunk.tobytes())
        for chunk in records.keys
    ]


def _store(effect: effects.TierStore, tier: Tier, arena: Buffer) -> npt.NDArray[np.bool_]:
    """Store rows; returns which of them the tier holds now. A row that it holds already (another
    daemon may have stored it) is not written again: equal keys mean equal bytes."""
    keys = _keys(effect.records)
    held = _flags(tier.probe(keys), len(keys))
    missing = np.flatnonzero(~held).tolist()
    if missing:
        data = shards(arena, effect.slots, effect.shard_bytes)
        store = tier.store
        if isinstance(tier, DividedTier):
            store = partial(tier.store_for, effect.tenant)
        done = store([keys[i] for i in missing], [data[i] for i in missing])
        held[missing] = _flags(done, len(missing))
    return held


def _epoch(effect: effects.TierEpoch, tier: Tier) -> int | None:
    """Read the note, and set it if it has to say something else. No other thread of this process
    does so meanwhile (``Executor``). Another daemon may; it sets its own again if ours is lower."""
    name = _NOTE + effect.namespace.hex()
    noted = _noted(tier, name)
    epoch = to_note(effect, noted, time.time())
    if epoch == noted:
        return epoch
    tier.set_note(name, epoch.to_bytes(_EPOCH_BYTES, "big"))
    if effect.renew or effect.known:
        return epoch
    time.sleep(_MEET_S)
    return _noted(tier, name)  # another daemon may have found none either: the last one counts


def _noted(tier: Tier, name: str) -> int | None:
    note = tier.note(name)
    return int.from_bytes(note, "big") if note is not None and len(note) == _EPOCH_BYTES else None


def _flags(answers: Sequence[bool], count: int) -> npt.NDArray[np.bool_]:
    if len(answers) != count:
        raise TierDown(f"it gave {len(answers)} answers about {count} records")
    return np.array([bool(answer) for answer in answers], np.bool_)


def _none(count: int) -> npt.NDArray[np.bool_]:
    return np.zeros(count, np.bool_)
