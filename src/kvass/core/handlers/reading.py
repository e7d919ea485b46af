"""The messages of a read: lookup, prefetch and release; which rows are there (``Present``), and
which have left L1 (``Removals``).

Each function handles one message. It returns the reply, or ``None`` if there is none or it comes
later. It raises ``Refused`` before it changes anything.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from kvass.core import explain, results
from kvass.core.clients.registry import ClientConnection, Instance
from kvass.core.handlers import session_fetching
from kvass.core.handlers.checks import (
    check_request,
    known_ranks,
    most_keys,
    named_namespace,
    open_lease,
    own_rank,
    scheduler_of,
    split_keys,
)
from kvass.core.matching.prefix import NO_BLOCKS, Hit, PrefixView
from kvass.core.pending.promotion import Asker, Promotion, promotion_of
from kvass.core.rows.index import digests_of
from kvass.core.rows.removed import AT_ONCE
from kvass.core.rows.row_classes import Namespace
from kvass.core.state import State
from kvass.core.tiers import presence, promote
from kvass.errors import Refused
from kvass.messages import (
    NO_CONTEXT,
    Lookup,
    LookupResult,
    Matched,
    Prefetch,
    Prefetched,
    Presence,
    Present,
    Release,
    Removals,
    Removed,
    RequestContext,
    context_of,
)
from kvass.types import SCHEDULER, U64Array

PREFETCH_S: Final = 60.0
"""How long a prefetch without a budget waits."""
REUSE_SAMPLING: Final = 8
"""``reuse_gap_seconds`` is measured for one lookup in this many."""
MAX_WAIT_S: Final = 300.0
"""The longest that a lookup may wait, whatever it asks for."""


def lookup(state: State, connection: ClientConnection, msg: Lookup) -> Matched | None:
    """Pin the longest hit of READY rows from chunk ``first`` on, under one lease.

    ``None``: a tier may have more rows, or an engine is writing them. The reply comes later.
    """
    instance = scheduler_of(state, connection)
    check_request(msg.request, state.config.limits)
    keys = split_keys(msg.digests, msg.width, msg.first, state.config.limits)
    if msg.spare < 0:
        raise Refused("bad_value", f"spare: {msg.spare} is negative")
    readers = known_ranks("readers", (0,) if msg.readers is None else msg.readers, instance)
    instance.seen_s = state.now
    ns = state.namespace_of(instance)
    blocks, start = _blocks(state, ns, msg)
    _check_leases(state, instance.id)
    if not msg.again:
        state.counters["lookup_chunks"] += len(keys) - msg.first
    if ns is None or msg.first > (most := most_keys(state, ns)):
        return _unasked(state, instance, msg, "ranks_missing" if ns is None else "too_long")
    cut = len(keys) > most
    if cut:
        keys, blocks = keys[:most], blocks[:0]
    state.followers.tags.resume(msg.session)
    session_fetching.remember(state, ns, msg, keys)
    view = PrefixView(state.rows, ns, keys, msg.first, msg.spare, blocks, start)
    there, why = view.there(), "absent"
    chunks = view.longest(there)
    if chunks > msg.first and not msg.again and state.messages[Lookup] % REUSE_SAMPLING == 1:
        state.histograms["reuse_gap_seconds"].observe(view.last_used_s(chunks))
    hit = view.use(chunks, there=True, session=msg.session)
    more = chunks < len(keys) - msg.spare
    lacks = not msg.again and (more or hit.blocks < len(blocks))
    written = msg.writing and len(state.reservations.all) > 0
    if lacks and ((more and state.tiers.used and ns.tier_epochs) or (written and view.writers())):
        wait_s = _wait_s(state, msg, ns, len(keys), chunks)
        promotion = _promotion(state, connection, msg, view, wait_s, readers, context_of(msg))
        if promotion.deadline > state.now:
            if promote.begin(state, promotion, msg.writing):
                return None
            why = "not_waited"
    ending = None if msg.again else explain.why_ended(state, view, there, hit, why, msg)
    if cut and ending is explain.ALL:
        ending = explain.Ending("too_long")
    asked = ns.tokens(len(keys) - msg.first, len(blocks))
    _count(state, instance, ns, msg, asked, hit, ending)
    matched = state.matched(instance.id, msg.request, msg.first, hit, readers, msg.spare, msg.again)
    matched.why = "" if ending is None else ending.why
    matched.whole = view.whole(there)
    matched.kept = state.keep(ns, view.to_keep(chunks), msg)
    return matched


def _count(
    state: State,
    instance: Instance,
    ns: Namespace,
    msg: Lookup,
    lookup_tokens: int,
    hit: Hit,
    ending: explain.Ending | None,
) -> None:
    """Note an answered lookup of ``lookup_tokens``, and count it unless its scheduler reports the
    result. ``ending``: what ended the match; ``None``: it was noted when the engine asked first."""
    hit_tokens = ns.tokens(hit.chunks - msg.first, hit.blocks)
    if ending is None:
        lookup_tokens = hit_tokens = ns.tokens(0, hit.blocks)
        explain.note_again(state, instance, msg.request, hit_tokens)
    else:
        end = ns.tokens(hit.chunks, hit.blocks)
        explain.note(state, instance, msg.request, msg, ending, lookup_tokens, hit_tokens, end)
    if not msg.reported:
        why = "" if ending is None else ending.why
        result = LookupResult(msg.request, lookup_tokens, hit_tokens, tenant=msg.tenant, why=why)
        results.count(state, instance, ns, result, msg.again)
        results.learn(state, instance, ns, msg.prefill_tokens_s)


def _unasked(state: State, instance: Instance, msg: Lookup, why: str) -> Matched:
    """The answer to a lookup that cannot match anything."""
    if not msg.again:
        explain.note(state, instance, msg.request, msg, explain.Ending(why))
    return Matched(boot=state.config.boot, first=msg.first, chunks=msg.first, why=why)


def _blocks(state: State, ns: Namespace | None, msg: Lookup) -> tuple[U64Array, U64Array]:
    """The keys of the blocks after the last chunk, and of the blocks of chunk ``first``.

    Both are empty if hits of this lookup end at the end of a chunk only.
    """
    blocks, start = [
        split_keys(each, msg.width, 0, state.config.limits) if each else NO_BLOCKS
        for each in (msg.blocks, msg.first_blocks)
    ]
    if ns is None or not ns.chunk_blocks or msg.spare:
        blocks = start = NO_BLOCKS
    elif max(len(blocks), len(start)) >= ns.chunk_blocks:
        raise Refused("bad_value", f"blocks: fewer than the {ns.chunk_blocks} of a chunk")
    return blocks, start


def _wait_s(state: State, msg: Lookup, ns: Namespace, total: int, chunks: int) -> float:
    """How long the lookup waits for the chunks that L1 lacks. L1 has ``chunks`` of ``total``.

    If L1 has none, it is the message's budget. If L1 has some, it is the time that computing the
    others takes, but no less than ``lookup_budget_ms`` and no more than the budget. If the engine's
    speed is not known, computing is taken to last the lacking chunks' share of the budget.
    """
    least_s = state.config.timing.lookup_budget_ms / 1000
    wait_s = min(msg.budget_ms / 1000 or least_s, MAX_WAIT_S)
    if chunks == msg.first:
        return wait_s
    if msg.prefill_tokens_s:
        rest_s = (total - chunks) * ns.chunk_tokens / msg.prefill_tokens_s
    else:
        rest_s = wait_s * (total - chunks) / (total - msg.first)
    return min(wait_s, max(rest_s, least_s))


def prefetch(state: State, connection: ClientConnection, msg: Prefetch) -> Prefetched | None:
    """Load the rows from tiers that a lookup would load. None stays pinned after the reply."""
    check_request(msg.request, state.config.limits)
    keys = split_keys(msg.digests, msg.width, msg.first, state.config.limits)
    if connection.registered is not None:
        if msg.namespace:
            raise Refused("forbidden", "an engine prefetches for its own namespace only")
        ns = state.namespace_of(scheduler_of(state, connection))
    else:
        ns = named_namespace(state, msg.namespace)
    owner = _owner_of(connection)
    if not len(keys):
        promote.stop(state, owner, msg.request)
        return Prefetched()
    _check_leases(state, owner)
    state.counters["prefetches"] += 1
    if ns is None:
        return Prefetched()
    most = most_keys(state, ns)
    if msg.first > most:
        return Prefetched(chunks=msg.first)
    keys = keys[:most]
    if msg.session:
        state.followers.tags.resume(msg.session)
    view = PrefixView(state.rows, ns, keys, msg.first)
    chunks = view.use(view.longest(view.there())).chunks
    if state.tiers.used and ns.tier_epochs and chunks < len(keys):
        wait_s = min(msg.budget_ms / 1000 or PREFETCH_S, MAX_WAIT_S)
        context = RequestContext(tenant=msg.tenant, session=msg.session)
        promotion = _promotion(state, connection, msg, view, wait_s, context=context)
        if promotion.deadline > state.now and promote.begin(state, promotion, writing=False):
            return None
    return Prefetched(chunks=chunks)


def _owner_of(connection: ClientConnection) -> str:
    """The owner of a connection's promotions: its instance, or itself if it has not registered."""
    who = connection.registered
    return f"connection {connection.id}" if who is None else who.instance


def _check_leases(state: State, instance: str) -> None:
    held = len(state.leases.of(instance)) + len(state.promotions.of(instance))
    if held >= state.config.limits.leases_per_instance:
        raise Refused("limit", f"{held} leases are open: release some")


def _promotion(
    state: State,
    connection: ClientConnection,
    msg: Lookup | Prefetch,
    view: PrefixView,
    wait_s: float,
    readers: Collection[int] = (),
    context: RequestContext = NO_CONTEXT,
) -> Promotion:
    """A promotion of the rows that ``view`` lacks. Without ``readers`` it is a prefetch's."""
    asker = Asker(connection.id, msg.seq, _owner_of(connection), msg.request)
    number, span = next(state.promotions.numbers), (state.now, state.now + wait_s)
    return promotion_of(number, asker, view, span, readers, context)


def release(state: State, connection: ClientConnection, msg: Release) -> None:
    """A rank has finished reading, or the scheduler gives back a lease before handing it over."""
    lease = open_lease(state, connection, msg.boot, msg.lease)
    if lease is None:
        return  # a late release is no error
    rank = own_rank(connection, msg.rank)
    if rank == SCHEDULER and lease.handed_over:
        raise Refused("bad_rank", f"lease {msg.lease} was handed over: only its ranks release")
    if rank == SCHEDULER:
        state.settlement.end_lease(lease)
    else:
        state.settlement.release(lease, rank)


def present(state: State, connection: ClientConnection, msg: Present) -> Presence | None:
    """Report which rows of the connection's namespace are in L1, or in L1 and the tiers.

    ``None``: a tier was asked. The reply comes later.
    """
    instance = scheduler_of(state, connection)
    keys = split_keys(msg.digests, msg.width, 0, state.config.limits)
    if len(keys) > AT_ONCE:
        raise Refused("limit", f"digests: at most {AT_ONCE} a message")
    ns = state.namespace_of(instance)
    if ns is None:
        return Presence(held=bytes(len(keys)))
    return presence.begin(state, connection.id, ns, keys, msg)


def removals(state: State, connection: ClientConnection, msg: Removals) -> Removed:
    """Report which rows of the connection's namespace left L1, and which of ``present`` are READY.

    If the connection has no namespace, the reply says that entries were lost.
    """
    instance, limits = scheduler_of(state, connection), state.config.limits
    keys = [split_keys(each, msg.width, 0, limits) for each in (*msg.present, b"")][:-1]
    if sum(map(len, keys)) > AT_ONCE:
        raise Refused("limit", f"present: at most {AT_ONCE} keys a message")
    ns = state.namespace_of(instance)
    if ns is None:
        return Removed(lost=True)
    if len(keys) > len(ns.classes):
        raise Refused("bad_value", f"present: the namespace has {len(ns.classes)} groups")
    removed = state.followers.removed
    part = removed.read(connection.id, ns.id, msg.since)
    gone = [part.keys.get(group, state.rows.table.key[:0]) for group in range(len(ns.classes))]
    pairs = zip(ns.classes, keys, strict=False)
    return Removed(
        upto=part.upto,
        lost=part.lost,
        removed=tuple([digests_of(each, msg.width) for each in gone]) if part.keys else (),
        present=tuple([state.rows.there(c.index.find(k)).tobytes() for c, k in pairs])
        if part.upto == removed.end
        else (),
    )
