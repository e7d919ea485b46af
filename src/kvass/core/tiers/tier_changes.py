"""Changes of the set of tiers, or of their order, while the daemon serves.

A tier keeps its number. A removed tier has place 0: it gets no new operations, its open operations
end as usual, loads that it did not get yet fail, and the rows that are queued for it are dropped. A
tier that is added again gets its old number. It is asked for all epochs again, because its store
may have changed, and then notes the clears of the time in which it was removed.
"""

from __future__ import annotations

import math

from kvass.core.effects import TiersAre
from kvass.core.pending.tier_state import TierState
from kvass.core.state import State
from kvass.core.tiers import ahead, epochs, promote


def change(state: State, event: TiersAre) -> None:
    """Use the tiers that the event names, in its order."""
    before = {tier.number for tier in state.tiers.used}
    state.tiers.use(event.numbers, event.names)
    _make_columns(state)
    for tier in state.tiers.all:
        if tier.number in before and not tier.place:
            _forget_epochs(state, tier)
            tier.report, tier.rests_until = {}, state.now
            for load in ahead.withdraw(tier):
                promote.loaded(state, load.failed())
        elif tier.place and (tier.number not in before or tier.number in event.renewed):
            _forget_epochs(state, tier)
            tier.rests_until = None
            for ns in state.namespaces.values():
                if not ns.private:
                    epochs.ask(state, ns, tier.number)
    for ns in state.namespaces.values():
        state.followers.segments.reaches_tiers(ns.id, epochs.in_tiers(state, ns))
    promote.epoch_known(state)


def _make_columns(state: State) -> None:
    """Make room for new tiers in the columns of namespaces and of their traffic."""
    count = len(state.tiers.all)
    spaces = state.namespaces.values()
    for traffic in (*(ns.traffic for ns in spaces), *state.namespaces.forgotten.values()):
        traffic.from_tiers += [0] * (count - len(traffic.from_tiers))
    for ns in spaces:
        if not ns.private:
            ns.tier_epochs += [None] * (count - len(ns.tier_epochs))
            ns.asked_s += [-math.inf] * (count - len(ns.asked_s))


def _forget_epochs(state: State, tier: TierState) -> None:
    """Forget all epochs in a tier. It is not used for a namespace until it has answered with its
    epoch."""
    for ns in state.namespaces.values():
        if not ns.private:
            ns.tier_epochs[tier.number], ns.asked_s[tier.number] = None, -math.inf
