"""Pinning the hit of a promotion, and answering it.

A promotion is answered once (law 11): when nothing of its hit is LOADING any more, or at its
deadline with the longest hit that is READY then.
"""

from __future__ import annotations

import numpy as np

from kvass.core import explain, results
from kvass.core.explain import Ending, why_ended
from kvass.core.matching.coverage import BoolArray
from kvass.core.matching.prefix import NO_HIT, PrefixView
from kvass.core.pending.promotion import Promotion, PromotionState
from kvass.core.rows.row_table import FAILED, LOADING, ClassRows
from kvass.core.state import State
from kvass.core.tiers import ahead
from kvass.messages import LookupResult, Matched, Prefetched


def pin_hit(state: State, promotion: Promotion, least: int) -> None:
    """Pin the longest hit of rows in state ``least`` or above. Answer if none of it is LOADING."""
    if promotion.void:
        answer(state, promotion)
        return
    before, view, table = promotion.pinned, promotion.view(state.rows), state.rows.table
    awaited = promotion.awaits
    promotion.hit = view.use(view.longest(view.there(least)), session=promotion.session)
    promotion.awaits = set()
    for part in promotion.pinned:
        state.rows.pin(part.rows)
        loading = part.rows[table.state[part.rows] == LOADING]
        promotion.awaits.update(np.unique(table.loader[loading]).tolist())
    _unpin(state, promotion, before)  # after the pins: a TRANSIENT row is freed at its last unpin
    ahead.leave(state, promotion, awaited - promotion.awaits)
    for op in promotion.awaits:
        ahead.wait_for(state, promotion, op)
    promotion.await_writers(set(), state.reservations.all)
    if promotion.awaits:
        promotion.move(PromotionState.LOADING)
    else:
        answer(state, promotion)


def _unpin(state: State, promotion: Promotion, parts: tuple[ClassRows, ...]) -> None:
    for part in parts:
        state.rows.unpin(part.rows, ahead=promotion.ahead)


def _unpin_hit(state: State, promotion: Promotion) -> None:
    pinned, awaited = promotion.pinned, promotion.awaits
    promotion.hit, promotion.awaits = NO_HIT._replace(chunks=promotion.first), set()
    _unpin(state, promotion, pinned)
    ahead.leave(state, promotion, awaited)


def answer(state: State, promotion: Promotion) -> None:
    """Answer a promotion with the hit that is pinned, and end it.

    If a pinned row could not be loaded, a shorter hit is pinned instead. If rows of the shorter hit
    are LOADING, the promotion goes on.
    """
    if promotion.asker_gone:
        _end(state, promotion)
        return
    instance = state.instances.get(promotion.instance)
    there = instance is not None and state.namespace_of(instance) is promotion.namespace
    if (not promotion.ahead and not there) or promotion.epoch != promotion.namespace.epoch:
        _unpin_hit(state, promotion)
        promotion.why = "cleared"
    elif any((state.rows.table.state[p.rows] == FAILED).any() for p in promotion.pinned):
        promotion.why = "load_failed"
        pin_hit(state, promotion, LOADING)
        return
    if promotion.ahead:
        reply: Prefetched | Matched = Prefetched(chunks=promotion.hit.chunks)
    else:
        state.counters["promoted_chunks"] += promotion.hit.chunks - promotion.first
        why, tiers = _note(state, promotion)
        matched = state.matched(
            promotion.instance,
            promotion.request,
            promotion.first,
            promotion.hit,
            promotion.readers,
            promotion.spare,
        )
        matched.why, matched.tiers, reply = why, tiers, matched
        view = promotion.view(state.rows)
        matched.whole = view.whole(_known(promotion, view))
        to_keep = view.to_keep(promotion.hit.chunks)
        matched.kept = state.keep(promotion.namespace, to_keep, promotion.context)
    reply.seq = promotion.seq
    state.send(promotion.connection, reply)
    _end(state, promotion)


def _note(state: State, promotion: Promotion) -> tuple[str, tuple[int, ...]]:
    """Note the answer, and count it unless its scheduler reports the result. Returns why it did not
    hit more, and how many tokens each tier loaded: ``Matched.why`` and ``Matched.tiers``.

    A chunk counts for a tier if its row of layer group 0 came from that tier.
    """
    ns, first, hit = promotion.namespace, promotion.first, promotion.hit
    ending, instance = _ending(state, promotion), state.instances.get(promotion.instance)
    homes = promotion.homes[0][first : hit.chunks]
    chunks = np.bincount(homes[homes >= 0], minlength=0)
    tiers = tuple((chunks * ns.chunk_tokens).tolist())
    if instance is not None:
        request, context = promotion.request, promotion.context
        lookup_tokens = ns.tokens(len(promotion.keys) - first, len(promotion.rest))
        hit_tokens, end = (
            ns.tokens(hit.chunks - first, hit.blocks),
            ns.tokens(hit.chunks, hit.blocks),
        )
        figures = lookup_tokens, hit_tokens, end, state.now - promotion.begun
        explain.note(state, instance, request, context, ending, *figures)
        if not context.reported:
            result = LookupResult(request, lookup_tokens, hit_tokens, tenant=context.tenant)
            result.why, result.tiers = ending.why or promotion.why, tiers
            results.count(state, instance, ns, result)
            results.learn(state, instance, ns, context.prefill_tokens_s)
    return ending.why, tiers


def _ending(state: State, promotion: Promotion) -> Ending:
    why, view, tiers = promotion.why, promotion.view(state.rows), state.tiers.used
    if why == "cleared":
        return Ending(why, cause="cleared", left_s=state.now)
    down = [tier.name for tier in tiers if not tier.report.get("up", True)]
    if why == "absent" and down:
        why = "tier_down"
    ending = why_ended(state, view, view.there(), promotion.hit, why, promotion.context)
    return ending._replace(detail=", ".join(down)) if ending.why == "tier_down" else ending


def _known(promotion: Promotion, view: PrefixView) -> list[BoolArray]:
    """By row class, which chunks have a row in L1, or in a tier that was asked."""
    return [rows | (home >= 0) for rows, home in zip(view.there(), promotion.homes, strict=True)]


def _end(state: State, promotion: Promotion) -> None:
    state.histograms["lookup_tiers_seconds"].observe(state.now - promotion.begun)
    state.promotions.drop(promotion)
    promotion.await_writers(set(), state.reservations.all)
    promotion.move(PromotionState.ENDED)
    _unpin_hit(state, promotion)
