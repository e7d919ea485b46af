"""Promotion: what L1 lacks of a prompt comes from the tiers, if that is worth it and fits.

``begin`` waits for rows that engines are writing, if the lookup says so (``_await_writers``; they
are not pinned). Then it asks the tiers in order what they hold (``_probe_next``). ``_plan`` chooses
the longest hit that these and L1 make together, cuts it to what fits, and has the rest loaded; rows
that another promotion is already loading are shared. ``_hold`` pins it and waits. ``_answer``
replies once: when nothing is awaited any more, or at the deadline, with the longest hit that is
READY then.

A row is LOADING from the step that asks a tier for it to the step in which that tier is done with
its slot, whoever still waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

import numpy as np

from kvass.core.effects import Loaded, Probed, TierLoad, TierProbe
from kvass.core.matching.coverage import BoolArray
from kvass.core.matching.prefix import NO_BLOCKS, NO_HIT, PrefixView
from kvass.core.pending.tier_state import (
    DUPLICATE,
    IN_NO_TIER,
    INSTANCE_SHARE,
    NOT_ASKED,
    Loading,
    Probing,
    Promotion,
)
from kvass.core.rows.index import ABSENT, repeated
from kvass.core.rows.row_classes import Namespace, RowClass
from kvass.core.rows.row_table import FAILED, LOADING, READY, ClassRows
from kvass.core.state import State
from kvass.core.tiers import epochs, flush, lost_segments
from kvass.messages import Matched, Prefetched, Promoting
from kvass.types import I64Array

LOADING_SHARE: Final = 0.5
"""LOADING rows take no more of L1 than this (law 12)."""
PROBE_CHUNKS: Final = 16
PROBE_GROWTH: Final = 4
LOAD_BYTES: Final = 16 << 20
"""What one operation loads. It is small, so that a hit can be had in part."""


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
    _await_writers(state, promotion)
    state.counters["lookups_await_stores"] += len(promotion.writers) > 0
    return True


def _await_writers(state: State, promotion: Promotion) -> None:
    """Wait for what is being written of the prompt, if it shall; if nothing is: ask the tiers."""
    if promotion.writing:
        promotion.writers = _view(state, promotion).writers()
    for number in promotion.writers:
        state.reservations.all[number].waiters.add(promotion.id)
    if not promotion.writers:
        promotion.writing = False
        _probe_next(state, promotion)


def _view(state: State, promotion: Promotion, chunks: int | None = None) -> PrefixView:
    """What L1 has of the prompt, or of its first ``chunks``, now."""
    keys, first, spare = promotion.keys[:chunks], promotion.first, promotion.spare
    rest = promotion.rest if len(keys) == len(promotion.keys) else NO_BLOCKS
    start = promotion.start if len(keys) > first else NO_BLOCKS
    return PrefixView(state.rows, promotion.namespace, keys, first, spare, rest, start)


# ---------------------------------------------------------------- asking what tiers hold


def _probe_next(state: State, promotion: Promotion) -> None:
    """Ask a tier for more of what L1 and the tiers before it have not; if there is no more: plan.

    A few chunks first, then ever more: no hit gets past a full row that nobody has, and most
    prompts that L1 does not know the tiers do not know either.
    """
    tiers = epochs.usable(state, promotion.namespace)
    promotion.early = epochs.pending(promotion.namespace)
    if promotion.early:
        return
    view, first, end = _view(state, promotion), promotion.first, len(promotion.keys)
    coming = view.there(LOADING)
    asked_last = state.tiers.all[promotion.probing].place if promotion.probing >= 0 else 0
    for tier in tiers:
        if state.tiers.all[tier].place > asked_last:
            promotion.probing, promotion.reach = tier, first
        while tier == promotion.probing and promotion.reach < end and not _gap(promotion, coming):
            begin = promotion.reach
            more = max(PROBE_CHUNKS, (begin - first) * PROBE_GROWTH)
            promotion.reach = reach = min(first + more, end)
            wanted = [
                begin
                + np.flatnonzero(
                    ((rows == ABSENT) & np.isin(home, (NOT_ASKED, IN_NO_TIER)))[begin:reach]
                )
                for rows, home in zip(view.found, promotion.homes, strict=True)
            ]
            if any(map(len, wanted)):
                _probe(state, promotion, tier, wanted)
                return
    if tiers and _has_lost(promotion, view.found):
        promotion.probing = -1
        _probe_next(state, promotion)
    else:
        _plan(state, promotion)


def _has_lost(promotion: Promotion, found: list[I64Array]) -> bool:
    """Whether no tier was asked for some row because L1 had it, and L1 has it no more. Of these
    at least one is asked for then, so this comes to an end."""
    asked = slice(promotion.first, promotion.reach)
    return any(
        ((rows == ABSENT) & (home == NOT_ASKED))[asked].any()
        for rows, home in zip(found, promotion.homes, strict=True)
    )


def _gap(promotion: Promotion, coming: list[BoolArray]) -> bool:
    """Whether some full row has been asked for in vain, so that what follows it is of no use."""
    asked = slice(promotion.first, promotion.reach)
    return any(
        not (there | (home >= 0))[asked].all()
        for c, there, home in zip(promotion.namespace.classes, coming, promotion.homes, strict=True)
        if c.spec.layout.kind == "full"
    )


def resume(state: State) -> None:
    """A tier has told an epoch, or that it cannot: go on with those who came before that."""
    go_on(state, (p.id for p in state.promotions.all.values() if p.early))


def go_on(state: State, more: Iterable[int] = ()) -> None:
    """Something has happened for the promotions ``more``: go on with a slice of all such."""
    going = state.promotions.going
    going.update(dict.fromkeys(more))
    for number in [*islice(going, state.config.slice_ends)]:
        del going[number]
        promotion = state.promotions.all.get(number)
        if promotion is not None and promotion.writing and not promotion.void:
            _await_writers(state, promotion)
        elif promotion is not None and promotion.early and not promotion.void:
            _probe_next(state, promotion)
        elif promotion is not None:
            _answer(state, promotion)


def _probe(state: State, promotion: Promotion, tier: int, wanted: list[I64Array]) -> None:
    ns = promotion.namespace
    op = state.tiers.begin(Probing(tier, promotion.id, wanted))
    batches = tuple(
        epochs.records(ns, tier, c, promotion.keys[w])
        for c, w in zip(ns.classes, wanted, strict=True)
    )
    state.out.append(TierProbe(tier, op, batches))


def probed(state: State, event: Probed) -> None:
    op = state.tiers.end(event.op, Probing)
    promotion = state.promotions.all.get(op.promotion)
    if promotion is None:
        return  # its time was up
    at = 0
    for home, wanted in zip(promotion.homes, op.wanted, strict=True):
        held = event.held[at : at + len(wanted)]
        home[wanted[held]], home[wanted[~held]] = op.tier, IN_NO_TIER
        at += len(wanted)
    if promotion.void:
        _answer(state, promotion)
    else:
        _probe_next(state, promotion)


# ---------------------------------------------------------------- loading


def _plan(state: State, promotion: Promotion) -> None:
    """Have loaded what the longest hit needs beyond L1, as far as it fits."""
    lost_segments.forget_lost(state, promotion)
    protect, n, weighed = state.rows.table.clock, len(promotion.keys), False
    # A tier may have been removed since it was asked; the last ones are for homes that are no tier.
    known = np.array([e is not None for e in promotion.namespace.tier_epochs] + [False] * 3)
    while n > promotion.first:
        view = _view(state, promotion, n)
        lacking = [
            (rows == ABSENT) & known[home[:n]]
            for rows, home in zip(view.found, promotion.homes, strict=True)
        ]
        coming = view.there(LOADING)
        end = view.longest([a | b for a, b in zip(coming, lacking, strict=True)])
        wanted = [
            begin + np.flatnonzero(lacks[begin:upto])
            for lacks, (begin, upto) in zip(lacking, view.needs(end), strict=True)
        ]
        if not any(map(len, wanted)):
            break
        if not weighed:
            weighed = True
            if not _worth_it(state, promotion, wanted, end - view.longest(view.there())):
                promotion.why = "not_worth_it"
                break
        upto = end + promotion.spare
        n = _fitting(state, promotion.namespace, wanted, upto)
        if n == upto:
            view.use(end)  # nothing of the prompt shall make room for it
            n = _load(state, promotion, wanted, upto, protect)
            if n == upto:
                flush.queue_next_victims(state)
                break
        promotion.why = "no_room"
    _hold(state, promotion, LOADING)


def _worth_it(state: State, promotion: Promotion, wanted: list[I64Array], chunks: int) -> bool:
    """Whether loading takes less time than computing the tokens it saves, as far as is known."""
    if not state.config.weigh_loads or promotion.prefill_tokens_s <= 0:
        return True
    ns, tiers = promotion.namespace, state.tiers.all
    sizes = np.zeros(len(tiers), np.int64)
    for c, home, w in zip(ns.classes, promotion.homes, wanted, strict=True):
        sizes += np.bincount(home[w], minlength=len(sizes)) * c.spec.row_bytes
    asked = [(tiers[tier].speed, int(sizes[tier])) for tier in np.flatnonzero(sizes).tolist()]
    seconds = sum(speed.seconds(size) for speed, size in asked)
    if seconds * promotion.prefill_tokens_s <= chunks * ns.chunk_tokens:
        return True
    state.counters["promotions_not_worth_it"] += 1
    for speed, _ in asked:
        speed.doubt()
    return False


def _fitting(state: State, ns: Namespace, wanted: list[I64Array], upto: int) -> int:
    """The first chunk with which LOADING rows would take more than they may; ``upto`` if none."""
    sizes = np.zeros(upto, np.int64)
    for c, w in zip(ns.classes, wanted, strict=True):
        sizes[w] += c.spec.row_bytes
    left = int(state.config.arena_bytes * LOADING_SHARE) - state.loading_bytes
    return int(np.searchsorted(np.cumsum(sizes), max(left, 0), side="right"))


def _load(
    state: State, promotion: Promotion, wanted: list[I64Array], upto: int, protect: int
) -> int:
    """Take slots for all of ``wanted`` and ask the tiers to fill them; ``upto``. If there is no
    room for all: nothing, and the first chunk for which there was none."""
    classes = promotion.namespace.classes
    payer = state.tenants.payer(promotion.tenant)
    rows, cut = state.allocator.allocate(
        classes, promotion.keys[:upto], wanted, protect, payer, LOADING
    )
    if cut < upto:
        state.counters["promotions_cut"] += 1
        for taken in rows:
            state.rows.free(taken)
        return cut
    for c, w, taken, home in zip(classes, wanted, rows, promotion.homes, strict=True):
        state.rows.touch(c, taken)
        step = max(1, LOAD_BYTES // c.spec.row_bytes)
        for tier in np.unique(home[w]).tolist():
            of_tier = taken[home[w] == tier]
            for at in range(0, len(of_tier), step):
                _load_rows(state, promotion.namespace, c, tier, of_tier[at : at + step])
    return upto


def _load_rows(state: State, ns: Namespace, c: RowClass, tier: int, rows: I64Array) -> None:
    size = len(rows) * c.spec.row_bytes
    op = state.tiers.begin(Loading(tier, state.now, ClassRows(c.id, rows), size, set()))
    state.rows.table.loader[rows] = op
    state.tiers.all[tier].speed.begin(size, state.now)
    records = epochs.records(ns, tier, c, state.rows.table.keys_of(rows))
    state.out.append(TierLoad(tier, op, records, state.rows.slots(rows), c.spec.shard_bytes))


def loaded(state: State, event: Loaded) -> None:
    """A tier is done with some slots: they are READY, or free."""
    op = state.tiers.end(event.op, Loading)
    good, failed = op.part.rows[event.which], op.part.rows[~event.which]
    size = len(good) * (op.size_bytes // len(op.part.rows))
    tier = state.tiers.all[op.tier]
    tier.speed.end(op.size_bytes, size, state.now)
    tier.histograms["load_seconds"].observe(state.now - op.begun)
    tier.counters["loaded_rows"] += len(good)
    tier.counters["loaded_bytes"] += size
    tier.counters["load_misses"] += len(failed)
    state.rows.promoted(good, state.config.retain_promoted)
    asked_before = state.tiers.used[: max(0, tier.place - 1)]
    flush.queue_written(state, ClassRows(op.part.row_class, good), asked_before)
    state.rows.fail(failed)
    waiting = [p for p in map(state.promotions.all.get, sorted(op.waiters)) if p is not None]
    for promotion in waiting:
        promotion.awaits.discard(event.op)
    go_on(state, (promotion.id for promotion in waiting if not promotion.awaits))


# ---------------------------------------------------------------- waiting


def _hold(state: State, promotion: Promotion, least: int) -> None:
    """Pin the longest hit of rows in state ``least`` or above; answer, if none of it is LOADING."""
    if promotion.void:
        _answer(state, promotion)
        return
    before, view, table = promotion.pinned, _view(state, promotion), state.rows.table
    promotion.hit = view.use(view.longest(view.there(least)))
    promotion.awaits = set()
    for part in promotion.pinned:
        state.rows.pin(part.rows)
        loading = part.rows[table.state[part.rows] == LOADING]
        promotion.awaits.update(np.unique(table.loader[loading]).tolist())
    _unpin(state, promotion, before)  # only now: TRANSIENT rows stay for those who wait
    for op in promotion.awaits:
        load = state.tiers.ops[op]
        assert isinstance(load, Loading), "a LOADING row that nobody loads"
        load.waiters.add(promotion.id)
    if not promotion.awaits:
        _answer(state, promotion)


def _unpin(state: State, promotion: Promotion, parts: tuple[ClassRows, ...]) -> None:
    for part in parts:
        state.rows.unpin(part.rows, ahead=not promotion.readers)


def _let_go(state: State, promotion: Promotion) -> None:
    pinned = promotion.pinned
    promotion.hit, promotion.awaits = NO_HIT._replace(chunks=promotion.first), set()
    _unpin(state, promotion, pinned)


def _answer(state: State, promotion: Promotion) -> None:
    """Give the asker what is pinned by now."""
    if promotion.gone:
        _end(state, promotion)
        return
    instance = state.instances.get(promotion.instance)
    there = instance is not None and state.namespace_of(instance) is promotion.namespace
    if (promotion.readers and not there) or promotion.epoch != promotion.namespace.epoch:
        _let_go(state, promotion)
        promotion.why = "cleared"
    elif any((state.rows.table.state[p.rows] == FAILED).any() for p in promotion.pinned):
        promotion.why = "load_failed"
        _hold(state, promotion, LOADING)  # what could not be loaded makes the match shorter
        return
    if not promotion.readers:
        reply: Prefetched | Matched = Prefetched(chunks=promotion.hit.chunks)
    else:
        state.counters["promoted_chunks"] += promotion.hit.chunks - promotion.first
        _count(state, promotion)
        reply = state.matched(
            promotion.instance,
            promotion.request,
            promotion.first,
            promotion.hit,
            promotion.readers,
            promotion.spare,
        )
    reply.seq = promotion.seq
    state.send(promotion.session, reply)
    _end(state, promotion)


def _count(state: State, promotion: Promotion) -> None:
    """What it asked for and is given, and which tokens of that its tiers loaded: a chunk's, where
    its first group came from one."""
    ns, why, first, hit = promotion.namespace, promotion.why, promotion.first, promotion.hit
    if why == "absent" and not all(tier.report.get("up", True) for tier in state.tiers.used):
        why = "tier_down"
    asked = ns.tokens(len(promotion.keys) - first, len(promotion.rest))
    given = ns.tokens(hit.chunks - first, hit.blocks)
    who = state.instances.get(promotion.instance)
    if who is not None:
        state.answered(who, ns, asked, given, why, promotion.prefill_tokens_s)
    state.tenants.of(promotion.tenant).traffic.answered(state.now, asked, given, why)
    homes = promotion.homes[0][first : hit.chunks]
    traffic = promotion.namespace.traffic
    chunks = np.bincount(homes[homes >= 0], minlength=len(traffic.from_tiers))
    for tier, count in enumerate(chunks.tolist()):
        traffic.from_tiers[tier] += count * promotion.namespace.chunk_tokens


def _end(state: State, promotion: Promotion) -> None:
    state.histograms["lookup_tiers_seconds"].observe(state.now - promotion.begun)
    state.promotions.drop(promotion)
    _let_go(state, promotion)


# ---------------------------------------------------------------- time, death, clears


def lapse(state: State) -> None:
    """Answer those whose time is up with what is READY by now."""
    for promotion in state.promotions.due(state.now, state.config.slice_ends):
        state.counters["promotions_late"] += 1
        promotion.why = "late"
        _hold(state, promotion, READY)


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
