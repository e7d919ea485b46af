"""The course of a promotion: what L1 lacks of a prompt comes from the tiers.

``begin`` waits for rows that engines are writing, if the lookup says so; they are not pinned. Then
the tiers are asked what they hold (``probing``), the longest hit that these and L1 make together is
chosen and cut to what fits (``planning``), the rest is loaded (``loading``), and the hit is pinned
until the answer (``answering``). Rows that another promotion is loading are shared.

Law of this file: a promotion goes on when what it waits for has happened (``PromotionState``), and
is answered at its deadline with what is READY by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from kvass.core.effects import Loaded
from kvass.core.pending.promotions import DUPLICATE, INSTANCE_SHARE, Promotion, PromotionState
from kvass.core.rows.index import repeated
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_table import READY
from kvass.core.state import State
from kvass.core.tiers import answering, loading, probing
from kvass.messages import Promoting


def begin(state: State, promotion: Promotion) -> bool:
    """Find out what the tiers hold of a prompt, and promote it; the answer comes by itself.

    False: so many wait that nothing was begun. The asker is given what L1 has.
    """
    waiting, most = state.promotions.bytes_of, state.config.limits.waiting_bytes
    mine = waiting.get(promotion.instance, 0) + promotion.size_bytes
    if sum(waiting.values()) + promotion.size_bytes > most or mine > most * INSTANCE_SHARE:
        state.counters["lookups_not_waited"] += 1
        return False
    state.promotions.add(promotion)
    if "promoting" in state.sessions[promotion.session].features:
        state.send(promotion.session, Promoting(seq=promotion.seq))
    for home in promotion.homes:
        home[repeated(promotion.keys)] = DUPLICATE
    _await_stores(state, promotion)
    state.counters["lookups_await_stores"] += len(promotion.writers) > 0
    return True


def _await_stores(state: State, promotion: Promotion) -> None:
    """Wait for what is being written of the prompt, if it shall; if nothing is: ask the tiers."""
    if promotion.waits_for_stores:
        promotion.writers = promotion.view(state.rows).writers()
    for number in promotion.writers:
        state.reservations.all[number].waiters.add(promotion.id)
    if promotion.writers:
        promotion.move(PromotionState.AWAITS_STORES)
    else:
        probing.probe_next(state, promotion)


def go_on(state: State, more: Iterable[int] = ()) -> None:
    """Something has happened for the promotions ``more``: go on with a slice of all such."""
    going = state.promotions.going
    going.update(dict.fromkeys(more))
    for number in [*islice(going, state.config.slice_ends)]:
        del going[number]
        if (promotion := state.promotions.all.get(number)) is None:
            continue
        if promotion.state is PromotionState.AWAITS_STORES and not promotion.void:
            _await_stores(state, promotion)
        elif promotion.state is PromotionState.AWAITS_EPOCH and not promotion.void:
            probing.probe_next(state, promotion)
        else:
            answering.answer(state, promotion)


def loaded(state: State, event: Loaded) -> None:
    """A tier is done with some slots: go on with those who waited for nothing else."""
    go_on(state, [promotion.id for promotion in loading.finish(state, event)])


def resume(state: State) -> None:
    """A tier has told an epoch, or that it cannot: go on with those who came before that."""
    early = PromotionState.AWAITS_EPOCH
    go_on(state, [p.id for p in state.promotions.all.values() if p.state is early])


def lapse(state: State) -> None:
    """Answer those whose time is up with what is READY by now."""
    for promotion in state.promotions.due(state.now, state.config.slice_ends):
        state.counters["promotions_late"] += 1
        promotion.why = "late"
        answering.hold(state, promotion, READY)


def session_lost(state: State, session: int) -> None:
    """Nobody waits for a session's promotions any more. What is LOADING goes on loading."""
    gone = [p for p in state.promotions.all.values() if p.session == session]
    for promotion in gone:
        promotion.gone = True
    go_on(state, (promotion.id for promotion in gone))


def cancel(state: State, cleared: Iterable[Namespace]) -> None:
    """Namespaces are cleared: what waits for rows of before misses."""
    ids = {ns.id for ns in cleared}
    go_on(state, (p.id for p in state.promotions.all.values() if p.namespace.id in ids))
