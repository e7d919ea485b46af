"""Epochs in tiers: what makes records of before a clear match never again.

Law of this file: a tier is used for a namespace only under an epoch that the tier itself has noted.
One that has no note gets a fresh epoch, which no record goes by, so a lost note costs records and
never makes old ones match. A clear is done when every tier has noted a fresh one; a tier that could
not is asked again, and is of no use to the namespace until it has.
"""

from __future__ import annotations

import math
from typing import Final

from kvass.core.effects import Emptied, EpochIs, TierClear, TierEpoch
from kvass.core.l1 import Namespace
from kvass.core.state import State
from kvass.core.tiers import Asking, Clearing, Emptying
from kvass.messages import Cleared, Error

ASK_AGAIN_S: Final = 1.0
"""How long a tier that could not tell an epoch is left alone."""


def welcome(state: State, ns: Namespace) -> None:
    """A new namespace: ask every tier what it goes by there. A private one uses none."""
    if ns.private:
        return
    ns.tier_epochs = [None] * len(state.config.tiers)
    ns.asked_s = [-math.inf] * len(state.config.tiers)
    for tier in range(len(state.config.tiers)):
        _ask(state, ns, tier)


def usable(state: State, ns: Namespace) -> list[int]:
    """The tiers whose epoch is known, in order; those that failed to tell are asked again."""
    for tier, epoch in enumerate(ns.tier_epochs):
        if epoch is None and state.now - ns.asked_s[tier] >= ASK_AGAIN_S:
            _ask(state, ns, tier)
    return [tier for tier, epoch in enumerate(ns.tier_epochs) if epoch is not None]


def rest_no_more(state: State) -> None:
    """Tiers that failed to tell an epoch may be asked again now."""
    for ns in state.namespaces.values():
        ns.asked_s = [when if when == math.inf else -math.inf for when in ns.asked_s]


def awaited(ns: Namespace) -> bool:
    """Whether no tier is usable, and one may be soon: it has been asked."""
    return math.inf in ns.asked_s and all(epoch is None for epoch in ns.tier_epochs)


def clear(state: State, ns: Namespace, clearing: Clearing) -> None:
    """Have every tier begin a new epoch of ``ns``; ``clearing`` waits for it."""
    for tier in range(len(ns.tier_epochs)):
        ns.tier_epochs[tier] = None
        state.tiers.owed.add((ns.digest, tier))
        clearing.awaits += 1
        _ask(state, ns, tier, clearing)


def empty(state: State, clearing: Clearing) -> None:
    """Have every tier forget all its records."""
    for tier in range(len(state.config.tiers)):
        clearing.awaits += 1
        op = state.tiers.begin(Emptying(tier, clearing))
        state.out.append(TierClear(tier, op))


def _ask(state: State, ns: Namespace, tier: int, clearing: Clearing | None = None) -> None:
    ns.asked_s[tier] = math.inf  # not again before the answer
    named = ns.digest, tier
    if _open(state, named):
        state.tiers.crossed.add(named)
    renew = named in state.tiers.owed
    op = state.tiers.begin(Asking(tier, ns, renew, clearing))
    fresh = state.tiers.fresh_epoch(ns.digest)
    state.out.append(TierEpoch(tier, op, ns.digest, fresh, renew))


def _open(state: State, named: tuple[bytes, int]) -> bool:
    """Whether this tier is asked for this namespace's epoch: a clear asks in any case."""
    return any(
        isinstance(op, Asking) and (op.namespace.digest, op.tier) == named
        for op in state.tiers.ops.values()
    )


def answered(state: State, event: EpochIs) -> int:
    """A tier told what epoch it has noted, or could not; which tier that was.

    Of questions that crossed, which note has stayed is not known: then it is asked once more.
    """
    op = state.tiers.end(event.op, Asking)
    tiers, tier, named = state.tiers, op.tier, (op.namespace.digest, op.tier)
    if event.epoch is None:
        tiers.counters[tier]["epochs_unknown"] += 1
    if not _open(state, named):
        _last_answer(state, named, None if named in tiers.owed and not op.renew else event.epoch)
    if op.clearing is not None:
        _cleared(state, op.clearing, tier, event.epoch is not None)
    return tier


def _last_answer(state: State, named: tuple[bytes, int], epoch: int | None) -> None:
    """No other question about this namespace is open to this tier."""
    digest, tier = named
    crossed = named in state.tiers.crossed
    state.tiers.crossed.discard(named)
    if epoch is not None:
        state.tiers.owed.discard(named)
    number = state.by_digest.get(digest)
    if number is None:
        return  # nobody has it any more
    ns = state.namespaces[number]
    ns.asked_s[tier] = state.now
    if epoch is not None and crossed:
        _ask(state, ns, tier)
    elif epoch is not None:
        ns.tier_epochs[tier] = epoch


def emptied(state: State, event: Emptied) -> None:
    """A tier was emptied, or could not be."""
    op = state.tiers.end(event.op, Emptying)
    _cleared(state, op.clearing, op.tier, event.done)


def _cleared(state: State, one: Clearing, tier: int, done: bool) -> None:
    one.awaits -= 1
    if not done:
        one.failed = one.failed | {tier}
    session = state.sessions.get(one.session)
    if one.awaits or session is None or session.ending:
        return
    if not one.failed:
        state.send(one.session, Cleared(seq=one.seq, rows=one.rows))
        return
    names = ", ".join(state.config.tiers[i] for i in sorted(one.failed))
    text = f"{names}: could not take note, and is not used until it has: clear again"
    state.send(one.session, Error(seq=one.seq, code="tier_down", text=text))
