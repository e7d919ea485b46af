"""Which tiers are used, and in which order, may change while the daemon serves.

A tier keeps its number. One that is removed has place 0: it is asked nothing more, what it was
asked ends as always, and what is queued for it is lost. If it comes back it has its number again,
and with it what it owes: clears of the time in between. Its epochs are asked for anew, because its
store may have changed meanwhile.
"""

from __future__ import annotations

import math

from kvass.core.effects import TiersAre
from kvass.core.pending.tier_state import TierState
from kvass.core.state import State
from kvass.core.tiers import epochs, promote


def change(state: State, event: TiersAre) -> None:
    """Tiers are the event's from now on."""
    before = {tier.number for tier in state.tiers.used}
    state.tiers.become(event.numbers, event.names)
    _make_columns(state)
    for tier in state.tiers.all:
        if tier.number in before and not tier.place:
            _forget_epochs(state, tier)
            tier.report, tier.rests_until = {}, state.now
        elif tier.place and (tier.number not in before or tier.number in event.renewed):
            _forget_epochs(state, tier)
            tier.rests_until = None
            for ns in state.namespaces.values():
                if not ns.private:
                    epochs.ask(state, ns, tier.number)
    for ns in state.namespaces.values():
        state.classes.segments.reaches_tiers(ns.id, epochs.in_tiers(state, ns))
    promote.resume(state)


def _make_columns(state: State) -> None:
    """Of new tiers."""
    count = len(state.tiers.all)
    spaces = state.namespaces.values()
    for traffic in (*(ns.traffic for ns in spaces), *state.forgotten.values()):
        traffic.from_tiers += [0] * (count - len(traffic.from_tiers))
    for ns in spaces:
        if not ns.private:
            ns.tier_epochs += [None] * (count - len(ns.tier_epochs))
            ns.asked_s += [-math.inf] * (count - len(ns.asked_s))


def _forget_epochs(state: State, tier: TierState) -> None:
    """Under none of them it is used."""
    for ns in state.namespaces.values():
        if not ns.private:
            ns.tier_epochs[tier.number], ns.asked_s[tier.number] = None, -math.inf
