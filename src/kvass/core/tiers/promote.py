"""Promotion: rows of a prompt that L1 lacks are loaded from the tiers.

``begin`` starts a promotion. Its steps are in the files beside this one, in this order:
``await_writers``, ``probe``, ``plan``, ``load``, ``answer``. ``continue_some`` continues
promotions whose wait is over. ``pending/promotion.py`` has the states.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from kvass.core.effects import Loaded
from kvass.core.pending.follow_ups import Woken
from kvass.core.pending.promotion import DUPLICATE, INSTANCE_SHARE, Promotion, PromotionState
from kvass.core.rows.index import repeated
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_table import READY
from kvass.core.state import State
from kvass.core.tiers import answer, await_writers, load, probe
from kvass.messages import Promoting


def begin(state: State, promotion: Promotion, writing: bool) -> bool:
    """Start a promotion. It is answered in this step or a later one.

    ``writing``: wait for rows that engines are writing before tiers are asked. Returns False, and
    starts nothing, if the waiting promotions would take more memory than they may.
    """
    waiting, most = state.promotions.bytes_of, state.config.limits.waiting_bytes
    mine = waiting.get(promotion.instance, 0) + promotion.size_bytes
    if sum(waiting.values()) + promotion.size_bytes > most or mine > most * INSTANCE_SHARE:
        state.counters["lookups_not_waited"] += 1
        return False
    state.promotions.add(promotion)
    state.send(promotion.connection, Promoting(seq=promotion.seq))
    for home in promotion.homes:
        home[repeated(promotion.keys)] = DUPLICATE
    if writing:
        await_writers.wait_or_probe(state, promotion)
        state.counters["lookups_await_stores"] += len(promotion.writers) > 0
    else:
        probe.probe_next(state, promotion)
    return True


def woken(state: State, told: list[Woken]) -> None:
    """The wait of some promotions may be over."""
    continue_some(state, (each.promotion for each in told))


def continue_some(state: State, woken: Iterable[int] = ()) -> None:
    """Record that the wait of the promotions ``woken`` is over. Continue some of the promotions
    whose wait is over."""
    going = state.promotions.going
    going.update(dict.fromkeys(woken))
    for number in [*islice(going, state.config.slice_ends)]:
        del going[number]
        promotion = state.promotions.all.get(number)
        if promotion is not None:
            _continue(state, promotion)


def _continue(state: State, promotion: Promotion) -> None:
    """Continue a promotion whose wait is over. In one step it may be woken twice, by two writers:
    the second time it waits for a tier already, and nothing is to be done."""
    if promotion.void:
        answer.answer(state, promotion)
    elif promotion.state is PromotionState.AWAITING_WRITERS:
        await_writers.wait_or_probe(state, promotion)
    elif promotion.state is PromotionState.AWAITING_EPOCH:
        probe.probe_next(state, promotion)
    elif promotion.state is PromotionState.LOADING and not promotion.awaits:
        answer.answer(state, promotion)


# ---------------------------------------------------------------- what ends a wait


def epoch_known(state: State) -> None:
    """A tier answered with an epoch, or failed. Continue the promotions that wait for epochs."""
    for promotion in state.promotions.all.values():
        if promotion.state is PromotionState.AWAITING_EPOCH:
            state.follow_ups.add(Woken(promotion.id))


def loaded(state: State, event: Loaded) -> None:
    """A tier has finished a load. Continue the promotions that wait for no other load."""
    for promotion in load.loaded(state, event):
        if not promotion.awaits:
            state.follow_ups.add(Woken(promotion.id))


def lapse(state: State) -> None:
    """Answer the promotions whose deadline has passed with what is READY by now."""
    for promotion in state.promotions.due(state.now, state.config.slice_ends):
        state.counters["promotions_late"] += 1
        promotion.why = "late"
        answer.pin_hit(state, promotion, READY)


def stop(state: State, owner: str, request: str) -> None:
    """Answer the prefetches of an owner's request with what is READY by now."""
    for promotion in [*state.promotions.of(owner).values()]:
        if promotion.ahead and promotion.request == request:
            answer.pin_hit(state, promotion, READY)


def connection_lost(state: State, connection: int) -> None:
    """End a connection's promotions. Rows that are LOADING for them are loaded all the same."""
    left = [p for p in state.promotions.all.values() if p.connection == connection]
    for promotion in left:
        promotion.asker_gone = True
    continue_some(state, (promotion.id for promotion in left))


def cancel(state: State, cleared: Iterable[Namespace]) -> None:
    """These namespaces were cleared: end their promotions with a miss."""
    ids = {ns.id for ns in cleared}
    continue_some(state, (p.id for p in state.promotions.all.values() if p.namespace.id in ids))
