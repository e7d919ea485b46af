"""Carries out the core's effects on a tier: calls the tier, and makes the event with the result.

``OPERATIONS`` has how each is carried out. A new one is a line there, and the effect and its end in
``core/effects.py``.

Law of this file: the tier gets the arena's bytes as views; this file never reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import msgspec
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


def _probe(effect: effects.TierProbe, tier: Tier, arena: Buffer) -> effects.Probed:
    keys = [key for batch in effect.batches for key in _keys(batch)]
    return effects.Probed(effect.op, _flags(tier.probe(keys), len(keys)))


def _load(effect: effects.TierLoad, tier: Tier, arena: Buffer) -> effects.Loaded:
    keys = _keys(effect.records)
    into = shards(arena, effect.slots, effect.shard_bytes)
    return effects.Loaded(effect.op, _flags(tier.load(keys, into), len(keys)))


def _store(effect: effects.TierStore, tier: Tier, arena: Buffer) -> effects.Stored:
    """Store the records that the tier does not hold.

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
    return effects.Stored(effect.op, held)


def _epoch(effect: effects.TierEpoch, tier: Tier, arena: Buffer) -> effects.EpochIs:
    return effects.EpochIs(effect.op, _note(effect, tier))


def _note(effect: effects.TierEpoch, tier: Tier) -> int | None:
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


def _clear(effect: effects.TierClear, tier: Tier, arena: Buffer) -> effects.Emptied:
    tier.clear()
    return effects.Emptied(effect.op, True)


def _flags(answers: Sequence[bool], count: int) -> npt.NDArray[np.bool_]:
    if len(answers) != count:
        raise TierDown(f"it gave {len(answers)} answers about {count} records")
    return np.array([bool(answer) for answer in answers], np.bool_)


class StoreCheck(msgspec.Struct, frozen=True):
    """Have the tier prove its store. The executor asks for it by itself, so it ends with no event.
    ``whole``: with a write. ``proven`` is called if it is, with whether it was written to."""

    whole: bool
    proven: Callable[[bool], None] = lambda written: None

    def failed(self) -> None:
        return None


def _check(effect: StoreCheck, tier: Any, arena: Buffer) -> None:
    effect.proven(bool(tier.check_store(effect.whole)))


class Operation(NamedTuple):
    """How an operation is carried out.

    ``work``: the kind of work, of ``executor``. ``carry_out``: does it in the calling thread.
    ``slots``: whether the tier reads or writes slots of the arena. Then it has not failed before
    the tier's process has ended, and one that writes not before its devices have stopped, either.
    ``bounded``: whether the tier is down if it takes too long. ``alone``: whether it is one request
    to the store, so that an ``ItemRefused`` says nothing of others.
    """

    work: Literal["check", "probe", "epoch", "load", "store"]
    carry_out: Callable[[Any, Tier, Buffer], effects.FromTier | None]
    slots: Literal["none", "read", "written"] = "none"
    bounded: bool = True
    alone: bool = False


OPERATIONS: Final[dict[type[effects.ToTier | StoreCheck], Operation]] = {
    effects.TierProbe: Operation("probe", _probe),
    effects.TierLoad: Operation("load", _load, slots="written"),
    effects.TierStore: Operation("store", _store, slots="read"),
    effects.TierEpoch: Operation("epoch", _epoch, alone=True),
    # A clear may take long if there are many records. The tier serves meanwhile.
    effects.TierClear: Operation("store", _clear, bounded=False, alone=True),
    StoreCheck: Operation("check", _check),
}


def how(effect: effects.ToTier | StoreCheck) -> Operation:
    return OPERATIONS[type(effect)]


def perform(
    effect: effects.ToTier | StoreCheck, tier: Tier, arena: Buffer
) -> effects.FromTier | None:
    """Carry out ``effect`` on ``tier`` in the calling thread, and return the result. Blocks until
    the tier has finished. Raises ``TierDown``, and anything that a faulty tier raises."""
    return how(effect).carry_out(effect, tier, arena)
