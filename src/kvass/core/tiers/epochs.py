"""Epochs in tiers: records from before a clear never match again.

A record's key contains an epoch, and each tier keeps a note of each namespace's epoch. A tier is
used for a namespace only under an epoch that the tier itself has noted. A tier without a note gets
a fresh epoch, which no record has. So when a note is lost, its records never match again. A clear
is done when every tier has noted a fresh epoch. A tier that could not note it is not used for that
namespace until it has.

Of two epochs the higher one is newer. An epoch is a counter (high 32 bits) and random bits. The
counter of a fresh epoch is above every counter seen in that tier, and at least the time in seconds
since 1970, so that it is higher also where the earlier note was lost.

A store that goes back to a snapshot has the note and the records of that time. A daemon that reads
a note below the highest epoch it has seen notes the highest again. It reads notes when it first
sees a namespace, when a tier that was down is back, and every ``LOOK_AGAIN_S``.
"""

from __future__ import annotations

import math
from typing import Final

from kvass.core.effects import Emptied, EpochIs, Records, TierClear, TierEpoch
from kvass.core.pending.tier_operations import Clearing, Emptying, NotingEpoch
from kvass.core.pending.tier_state import TierState
from kvass.core.rows.row_class import RowClass
from kvass.core.rows.row_classes import Namespace
from kvass.core.state import State
from kvass.messages import Cleared, Error
from kvass.types import U64Array

ASK_AGAIN_S: Final = 1.0
"""How long a tier that could not read or write an epoch is not asked again."""
LOOK_AGAIN_S: Final = 30.0
"""How often a tier's note is read again: a request per namespace and tier each time."""
_RANDOM_BITS: Final = 32
_RANDOM: Final = (1 << _RANDOM_BITS) - 1
_MOST: Final = (1 << 32) - 1
"""Counters are lower than this. A note with this counter is damaged."""
_LATEST: Final = _MOST - (1 << 24)
"""The highest counter that is taken from a clock. Only clears use higher ones."""


def to_note(question: TierEpoch, noted: int | None, clock_s: float) -> int:
    """The epoch that a tier must note as the answer to ``question``.

    ``noted``: the epoch in its note; ``None``: it has no note. ``clock_s``: seconds since 1970.
    """
    if noted is None or noted >> _RANDOM_BITS >= _MOST:
        noted = 0
    highest = max(question.known, noted)
    if highest and not question.renew:
        return highest
    counter = max((highest >> _RANDOM_BITS) + 1, min(int(clock_s), _LATEST))
    if counter >= _MOST:  # of a note that is as good as damaged: it still has 2^32 epochs above it
        return highest + 1
    return counter << _RANDOM_BITS | question.fresh & _RANDOM


def namespace_added(state: State, ns: Namespace) -> None:
    """Ask every tier for the epoch of a new namespace. A private namespace uses no tiers."""
    if ns.private:
        return
    ns.tier_epochs = [None] * len(state.tiers.all)
    ns.asked_s = [-math.inf] * len(state.tiers.all)
    for tier in state.tiers.used:
        ask(state, ns, tier.number)


def in_tiers(state: State, ns: Namespace) -> bool:
    """Whether rows of ``ns`` may be in tiers."""
    return bool(state.tiers.used and ns.tier_epochs)


def usable(state: State, ns: Namespace) -> list[int]:
    """The tiers in which the epoch of ``ns`` is known, in order. The others are asked for it,
    unless they were asked just now."""
    used = [] if ns.private else [tier.number for tier in state.tiers.used]
    for tier in used:
        if ns.tier_epochs[tier] is None and state.now - ns.asked_s[tier] >= ASK_AGAIN_S:
            ask(state, ns, tier)
    return [tier for tier in used if ns.tier_epochs[tier] is not None]


def retry_now(state: State) -> None:
    """Forget when tiers were last asked for epochs, so that ``usable`` asks again at once."""
    for ns in state.namespaces.values():
        ns.asked_s = [when if when == math.inf else -math.inf for when in ns.asked_s]


def read_again(state: State, back: int | None = None) -> None:
    """Read every note that was not read for ``LOOK_AGAIN_S``, and all notes of tier ``back``. That
    tier was down, and its store may have gone back to an older state."""
    for ns in state.namespaces.values():
        for tier in [] if ns.private else [tier.number for tier in state.tiers.used]:
            when = ns.asked_s[tier]
            if when != math.inf and (tier == back or state.now - when >= LOOK_AGAIN_S - 1):
                ask(state, ns, tier)


def pending(ns: Namespace) -> bool:
    """Whether the epoch of ``ns`` is known in no tier, and some tier has not answered yet."""
    return math.inf in ns.asked_s and all(epoch is None for epoch in ns.tier_epochs)


def clear(state: State, ns: Namespace, clearing: Clearing) -> None:
    """Have every tier note a new epoch of ``ns``. ``clearing`` is answered after that."""
    for tier in range(len(ns.tier_epochs)):
        ns.tier_epochs[tier] = None
        state.tiers.owed.add((ns.digest, tier))
        if state.tiers.all[tier].place:
            clearing.awaits += 1
            ask(state, ns, tier, clearing)


def empty(state: State, clearing: Clearing, tiers: list[TierState]) -> None:
    """Have ``tiers`` delete all their records. ``clearing`` is answered after that."""
    for tier in tiers:
        clearing.awaits += 1
        op = state.tiers.begin(Emptying(tier.number, clearing))
        state.out.append(TierClear(tier.number, op))


def records(ns: Namespace, tier: int, row_class: RowClass, keys: U64Array) -> Records:
    epoch = ns.tier_epochs[tier]
    assert epoch is not None, "a tier was asked under no epoch"
    return Records(ns.digest, epoch, row_class.spec.group, keys)


def ask(state: State, ns: Namespace, tier: int, clearing: Clearing | None = None) -> None:
    """Ask a tier for the epoch of ``ns``. Only a clear asks while an earlier question is open."""
    ns.asked_s[tier] = math.inf  # not again before the answer
    named = ns.digest, tier
    renew = named in state.tiers.owed
    op = state.tiers.begin(NotingEpoch(tier, ns, ns.epoch, renew, clearing))
    fresh, known = state.tiers.fresh_epoch(ns.digest), state.tiers.known.get(named, 0)
    state.out.append(TierEpoch(tier, op, ns.digest, fresh, renew, known))


def epoch_answered(state: State, event: EpochIs) -> int:
    """A tier answered with the epoch that it has noted, or failed. Returns the tier's number.

    If the namespace was cleared after the question, the answer is not used, because the clear
    has asked again.
    """
    op = state.tiers.end(event.op, NotingEpoch)
    tiers, tier, ns, named = state.tiers, op.tier, op.namespace, (op.namespace.digest, op.tier)
    if event.epoch is None:
        tiers.all[tier].counters["epochs_unknown"] += 1
    else:
        tiers.known[named] = max(event.epoch, tiers.known.get(named, 0))
    if op.epoch == ns.epoch and tiers.all[tier].place:
        ns.asked_s[tier] = state.now
        if event.epoch is not None and (op.renew or ns.tier_epochs[tier] is None):
            tiers.owed.discard(named)
            ns.tier_epochs[tier] = event.epoch
    if op.clearing is not None:
        _noted(state, op.clearing, tier, event.epoch is not None)
    return tier


def emptied(state: State, event: Emptied) -> None:
    """A tier has deleted all its records, or failed to."""
    op = state.tiers.end(event.op, Emptying)
    _noted(state, op.clearing, op.tier, event.done, event.why)


def _noted(state: State, clearing: Clearing, tier: int, done: bool, why: str = "") -> None:
    clearing.awaits -= 1
    if not done:
        clearing.failed = {**clearing.failed, tier: why or clearing.failed.get(tier, "")}
    answer_clear(state, clearing)


def answer_clear(state: State, clearing: Clearing) -> None:
    """Answer a clear, if it waits for nothing more."""
    connection = state.connections.get(clearing.connection)
    if clearing.to_clear or clearing.awaits or connection is None or connection.ending:
        return
    if not clearing.failed:
        state.send(clearing.connection, Cleared(seq=clearing.seq, rows=clearing.rows))
        return
    named = ((state.tiers.all[i].name, why) for i, why in sorted(clearing.failed.items()))
    names = ", ".join(f"{name} ({why})" if why else name for name, why in named)
    text = f"{names} could not be emptied: say it again"
    if clearing.of_l1:
        text = (
            f"L1 is cleared ({clearing.rows} rows), but not {names}, which is not used until it "
            "could note it: clear again"
        )
    state.send(clearing.connection, Error(seq=clearing.seq, code="tier_down", text=text))
