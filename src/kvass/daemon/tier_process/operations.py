"""Carries out the core's effects on a tier: calls the tier, and makes the event with the result.

Law of this file: the tier gets the arena's bytes as views; this file never reads them.
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
"""The prefix of the names of epoch notes. Notes with the older prefix ``epoch.`` are ignored: their
values were not ordered."""
_EPOCH_BYTES: Final = 8
_MEET_S: Final = 0.2
"""Seconds between writing a new note and reading it again. Several daemons may find no note at
about the same time, and each write one. All then use the epoch that was written last."""


def perform(effect: effects.ToTier, tier: Tier, arena: Buffer) -> effects.FromTier:
    """Carry out ``effect`` on ``tier`` in the calling thread, and return the result. Blocks until
    the tier has finished. Raises ``TierDown``, and anything that a faulty tier raises."""
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


def failed_result(effect: effects.ToTier) -> effects.FromTier:
    """Return the result of an effect that failed, or was not passed to the tier."""
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
    """Return views of the slots: for each row a list with one view per shard."""
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
    """Store the records that the tier does not hold. Returns for each whether it is held now.

    Another daemon may have stored a record already. It is not written again, because equal keys
    mean equal bytes.
    """
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
    """Read the epoch's note, write it if the epoch changes, and return the epoch.

    No other thread of this process writes the note meanwhile (``Executor``). Another daemon may; if
    our epoch is lower than its own, it writes its own again.
    """
    name = _NOTE + effect.namespace.hex()
    noted = _noted(tier, name)
    epoch = to_note(effect, noted, time.time())
    if epoch == noted:
        return epoch
    tier.set_note(name, epoch.to_bytes(_EPOCH_BYTES, "big"))
    if effect.renew or effect.known:
        return epoch
    time.sleep(_MEET_S)
    return _noted(tier, name)  # another daemon may have written one, too: the last one counts


def _noted(tier: Tier, name: str) -> int | None:
    note = tier.note(name)
    return int.from_bytes(note, "big") if note is not None and len(note) == _EPOCH_BYTES else None


def _flags(answers: Sequence[bool], count: int) -> npt.NDArray[np.bool_]:
    if len(answers) != count:
        raise TierDown(f"it gave {len(answers)} answers about {count} records")
    return np.array([bool(answer) for answer in answers], np.bool_)


def _none(count: int) -> npt.NDArray[np.bool_]:
    return np.zeros(count, np.bool_)
