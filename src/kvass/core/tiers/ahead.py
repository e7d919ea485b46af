"""Loads ahead: those of a prefetch, for which no lookup waits.

Laws of this file:

- A tier gets a load ahead only while no lookup waits for one of its loads, and has ``AT_ONCE`` of
  them at most. So the next lookup finds a thread of the tier free.
- A load for which a lookup comes to wait is passed to its tier at once.
- A load for which nobody waits any more ends, if its tier did not get it: nobody had its slots
  (law 3).

Loads ahead are not part of a tier's measured speed: fewer of them run at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvass.core.effects import TierLoad
from kvass.core.pending.promotion import Promotion
from kvass.core.pending.tier_operations import Loading
from kvass.core.pending.tier_state import TierState
from kvass.core.state import State

AT_ONCE: Final = 2
"""How many loads ahead a tier has at a time. It has four threads for loads."""


def ask(state: State, promotion: Promotion, loads: list[TierLoad]) -> None:
    """Have tiers carry out the ``loads`` of a promotion: at once, or in their turn if they are
    ahead."""
    for load in loads:
        tier = state.tiers.all[load.tier]
        tier.held[load.op] = load
        tier.ahead_bytes += _opened(state, load.op).size_bytes
        if not promotion.ahead:
            _hurry(state, load.op)
    for number in {load.tier for load in loads}:
        go_on(state, state.tiers.all[number])


def go_on(state: State, tier: TierState) -> None:
    """Pass on the loads ahead whose turn it is."""
    while tier.held and not tier.urgent and len(tier.ahead) < AT_ONCE:
        op = next(iter(tier.held))
        tier.ahead.add(op)
        _pass_on(state, tier, op)


def _hurry(state: State, op: int) -> None:
    """A lookup waits for an open load."""
    load = _opened(state, op)
    tier = state.tiers.all[load.tier]
    tier.urgent.add(op)
    if op in tier.held:
        tier.ahead_bytes -= load.size_bytes
        tier.speed.begin(load.size_bytes, state.now)
        _pass_on(state, tier, op)


def wait_for(state: State, promotion: Promotion, op: int) -> None:
    """A promotion waits for an open load, whose rows it has pinned."""
    _opened(state, op).waiters.add(promotion.id)
    if not promotion.ahead:
        _hurry(state, op)


def ended(state: State, tier: TierState, op: int, load: Loading, good: int) -> None:
    """A load of ``tier`` has ended; it loaded ``good`` bytes."""
    tier.urgent.discard(op)
    if op in tier.ahead:
        tier.ahead.discard(op)
        tier.ahead_bytes -= load.size_bytes
    else:
        tier.speed.end(load.size_bytes, good, state.now)
    go_on(state, tier)


def leave(state: State, promotion: Promotion, ops: Iterable[int]) -> None:
    """A promotion no longer waits for the loads ``ops``, and has unpinned their rows."""
    for op in ops:
        load = _opened(state, op)
        load.waiters.discard(promotion.id)
        tier = state.tiers.all[load.tier]
        if not load.waiters and op in tier.held:
            del tier.held[op]
            tier.ahead_bytes -= load.size_bytes
            state.tiers.end(op, Loading)
            state.rows.free(load.part.rows, "unwanted")


def withdraw(tier: TierState) -> list[TierLoad]:
    """The loads that a tier did not get yet. It never gets them; the caller ends them."""
    loads = [*tier.held.values()]
    tier.ahead.update(tier.held)
    tier.held.clear()
    return loads


def _pass_on(state: State, tier: TierState, op: int) -> None:
    _opened(state, op).begun = state.now
    state.out.append(tier.held.pop(op))


def _opened(state: State, op: int) -> Loading:
    load = state.tiers.ops[op]
    assert isinstance(load, Loading), "a LOADING row that nobody loads"
    return load
