"""The reference engine's tier: bytes by record key, at once. A load may fail and write garbage."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from kvass.core import effects as fx
from kvass.core.tiers.epochs import to_note
from kvass.transfer.base import U8Array

RecordKey = tuple[bytes, int, int, bytes]


class ReferenceTier:
    """A tier that outlives the cores that use it. ``ill``: the probability that a load fails."""

    def __init__(self, rng: random.Random, arena: U8Array, ill: float) -> None:
        self._rng, self._arena, self._ill = rng, arena, ill
        self._records: dict[RecordKey, list[U8Array]] = {}
        self._notes: dict[bytes, int] = {}

    def perform(self, effect: fx.ToTier) -> fx.FromTier:
        """Carry out an operation; its end."""
        if isinstance(effect, fx.TierProbe):
            held = [key in self._records for batch in effect.batches for key in _keys(batch)]
            return fx.Probed(effect.op, np.array(held, np.bool_))
        if isinstance(effect, fx.TierLoad):
            return fx.Loaded(effect.op, self._load(effect))
        if isinstance(effect, fx.TierStore):
            for key, runs in zip(_keys(effect.records), self._runs(effect), strict=True):
                self._records[key] = [run.copy() for run in runs]
            return fx.Stored(effect.op, np.ones(len(effect.records.keys), np.bool_))
        if isinstance(effect, fx.TierEpoch):
            epoch = to_note(effect, self._notes.get(effect.namespace), 0.0)
            self._notes[effect.namespace] = epoch
            return fx.EpochIs(effect.op, epoch)
        if isinstance(effect, fx.TierClear):
            self._records.clear()
            return fx.Emptied(effect.op, True)
        return effect.failed()

    def _load(self, effect: fx.TierLoad) -> npt.NDArray[np.bool_]:
        which = np.ones(len(effect.records.keys), np.bool_)
        for i, (key, runs) in enumerate(
            zip(_keys(effect.records), self._runs(effect), strict=True)
        ):
            which[i] = key in self._records and self._rng.random() >= self._ill
            for run, kept in zip(runs, self._records.get(key, runs), strict=True):
                run[:] = kept if which[i] else self._rng.randrange(256)
        return which

    def _runs(self, effect: fx.TierLoad | fx.TierStore) -> list[list[U8Array]]:
        """The arena's bytes of each row, shard by shard."""
        sizes = effect.shard_bytes
        offsets = [effect.slots.offsets(s, size).tolist() for s, size in enumerate(sizes)]
        return [
            [self._arena[at : at + size] for at, size in zip(row, sizes, strict=True)]
            for row in zip(*offsets, strict=True)
        ]


def _keys(records: fx.Records) -> list[RecordKey]:
    named = records.namespace, records.epoch, records.group
    return [(*named, row.tobytes()) for row in np.ascontiguousarray(records.keys)]
