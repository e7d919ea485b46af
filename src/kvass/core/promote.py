"""Promotion: what L1 lacks of a prompt comes from the tiers, if that is worth it and fits.

Law of this file: a row is LOADING from the step that asks a tier for it to the step in which that
tier is done with its slot, whoever still waits for it. What a promotion waits for it has pinned. It
is answered once: when nothing is awaited any more, or at its deadline, with the longest hit that is
READY then. A row that a tier could not give is a shorter match, never another's bytes.

The way of one: ``begin`` asks the tiers in order what they hold; ``_plan`` chooses the longest hit
that these and L1 make together, cuts it to what fits, and has the rest loaded; ``_aim`` pins it,
and waits; ``_answer``. Rows that another promotion is loading already are shared.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from kvass.core import epochs, flush
from kvass.core.coverage import BoolArray, first_chunk, longest_hit, proving
from kvass.core.effects import Loaded, Probed, Records, TierLoad, TierProbe
from kvass.core.index import ABSENT, repeated
from kvass.core.leases import ClassRows
from kvass.core.row_store import Namespace, RowClass
from kvass.core.rows import LOADING, READY
from kvass.core.state import State
from kvass.core.tiers import NOWHERE, SLICE, Loading, Probing, Promotion
from kvass.messages import Matched, Prefetched
from kvass.types import I64Array, Slots, U64Array

LOADING_SHARE: Final = 0.5
"""LOADING rows take no more of L1 than this (law 12)."""
PROBE_CHUNKS: Final = 16
PROBE_GROWTH: Final = 4
LOAD_BYTES: Final = 16 << 20
"""What one operation loads: so little that a hit can be had in part, and no less."""

_NOT_AGAIN: Final = NOWHERE - 1
"""The home of a key that a prompt says twice: one row is enough."""
_IN_NONE: Final = NOWHERE - 2
"""... of a row that no tier has that was asked for it."""


def begin(state: State, promotion: Promotion) -> bool:
    """Find out what the tiers hold of a prompt, and promote it; the answer comes by itself.

    False: so many wait that nothing was begun. The asker has what L1 has.
    """
    if not state.promotions.room(promotion, state.config.limits.waiting_bytes):
        state.counters["lookups_not_waited"] += 1
        return False
    state.promotions.add(promotion)
    for home in promotion.homes:
        home[repeated(promotion.keys)] = _NOT_AGAIN
    _ask_next(state, promotion)
    return True


def _ask_next(state: State, promotion: Promotion) -> None:
    """Ask a tier for more of what L1 and the tiers before it have not; if there is no more: plan.

    A few chunks first, then ever more: no hit gets past a full row that nobody has, and most
    prompts that L1 does not know the tiers do not know either.
    """
    tiers = epochs.usable(state, promotion.namespace)
    promotion.early = epochs.awaited(promotion.namespace)
    if promotion.early:
        return
    found = [c.index.find(promotion.keys) for c in promotion.namespace.classes]
    coming = _there(state, found, (READY, LOADING))
    for tier in tiers:
        if tier > promotion.probing:
            promotion.probing, promotion.reach = tier, promotion.first
        while (
            tier == promotion.probing
            and promotion.reach < len(promotion.keys)
            and not _gap(promotion, coming)
        ):
            begin = promotion.reach
            more = max(PROBE_CHUNKS, (begin - promotion.first) * PROBE_GROWTH)
            promotion.reach = min(promotion.first + more, len(promotion.keys))
            wanted = [
                begin
                + np.flatnonzero(((rows == ABSENT) & _homeless(home))[begin : promotion.reach])
                for rows, home in zip(found, promotion.homes, strict=True)
            ]
            if any(map(len, wanted)):
                _probe(state, promotion, tier, wanted)
                return
    if tiers and _has_lost(promotion, found):
        promotion.probing = -1
        _ask_next(state, promotion)
    else:
        _plan(state, promotion)


def _homeless(home: I64Array) -> BoolArray:
    """Of which chunks no tier is known to hold the row."""
    return np.isin(home, (NOWHERE, _IN_NONE))


def _has_lost(promotion: Promotion, found: list[I64Array]) -> bool:
    """Whether no tier was asked for some row because L1 had it, and L1 has it no more. Of these
    at least one is asked for then, so this comes to an end."""
    return any(
        ((rows == ABSENT) & (home == NOWHERE))[promotion.first : promotion.reach].any()
        for rows, home in zip(found, promotion.homes, strict=True)
    )


def resume(state: State) -> None:
    """A tier has told an epoch, or that it cannot: go on with those who came before that."""
    promotions = state.promotions
    promotions.early = deque(
        promotion.id for promotion in promotions.all.values() if promotion.early
    )
    go_on(state)


def go_on(state: State) -> None:
    """Those whose turn has come, ``SLICE`` in a step."""
    early = state.promotions.early
    for _ in range(min(len(early), SLICE)):
        promotion = state.promotions.all.get(early.popleft())
        if promotion is not None and promotion.early:
            _ask_next(state, promotion)


def _gap(promotion: Promotion, coming: list[BoolArray]) -> bool:
    """Whether some full row has been asked for in vain, so that what follows it is of no use."""
    return any(
        not (there | (home >= 0))[promotion.first : promotion.reach].all()
        for c, there, home in zip(promotion.namespace.classes, coming, promotion.homes, strict=True)
        if c.spec.layout.kind == "full"
    )


def _probe(state: State, promotion: Promotion, tier: int, wanted: list[I64Array]) -> None:
    ns = promotion.namespace
    op = state.tiers.begin(Probing(tier, promotion.id, wanted))
    batches = tuple(
        _records(ns, tier, c, promotion.keys[w]) for c, w in zip(ns.classes, wanted, strict=True)
    )
    state.out.append(TierProbe(tier, op, batches))


def probed(state: State, event: Probed) -> None:
    """A tier has said what it holds."""
    op = state.tiers.end(event.op, Probing)
    promotion = state.promotions.all.get(op.promotion)
    if promotion is None:
        return  # its time was up
    at = 0
    for home, wanted in zip(promotion.homes, op.wanted, strict=True):
        held = event.held[at : at + len(wanted)]
        home[wanted[held]], home[wanted[~held]] = op.tier, _IN_NONE
        at += len(wanted)
    if promotion.epoch == promotion.namespace.epoch:
        _ask_next(state, promotion)
    else:
        _answer(state, promotion)


def _plan(state: State, promotion: Promotion) -> None:
    """Have loaded what the longest hit needs beyond L1, as far as it fits."""
    ns = promotion.namespace
    protect, n, weighed = state.store.table.clock, len(promotion.keys), False
    while n > promotion.first:
        found = [c.index.find(promotion.keys[:n]) for c in ns.classes]
        lacking = [
            (rows == ABSENT) & (home[:n] >= 0)
            for rows, home in zip(found, promotion.homes, strict=True)
        ]
        coming = _there(state, found, (READY, LOADING))
        end = _longest(promotion, [a | b for a, b in zip(coming, lacking, strict=True)])
        wanted = _wanted(promotion, lacking, end)
        if end == promotion.first or not any(map(len, wanted)):
            break
        if not weighed:
            weighed = True
            gained = end - _longest(promotion, _there(state, found, (READY,)))
            if not _worth_it(state, promotion, wanted, gained):
                break
        upto = end + promotion.spare
        n = _fitting(state, ns, wanted, upto)
        if n == upto:
            _touch(state, promotion, found, end)  # nothing of the prompt shall make room for it
            n = _load(state, promotion, wanted, upto, protect)
            if n == upto:
                flush.ahead(state)
                break
    _aim(state, promotion, (READY, LOADING))


def _longest(promotion: Promotion, there: list[BoolArray]) -> int:
    groups = [c.spec.layout for c in promotion.namespace.classes]
    return longest_hit(
        groups, there, promotion.namespace.chunk_tokens, promotion.first, promotion.spare
    )


def _begin(promotion: Promotion, c: RowClass, end: int) -> int:
    """The first chunk that a hit of ``end`` chunks needs of a class."""
    return first_chunk(c.spec.layout, end, promotion.namespace.chunk_tokens, promotion.first)


def _wanted(promotion: Promotion, lacking: list[BoolArray], end: int) -> list[I64Array]:
    """The chunks of each class that a hit of ``end`` chunks, and the proof of it, lack."""
    wanted = []
    for c, lacks, upto in zip(
        promotion.namespace.classes, lacking, _ends(promotion, end), strict=True
    ):
        begin = _begin(promotion, c, end)
        wanted.append(begin + np.flatnonzero(lacks[begin:upto]))
    return wanted


def _ends(promotion: Promotion, end: int) -> list[int]:
    """Where what a hit of ``end`` chunks uses of each class ends, proof included."""
    groups = [c.spec.layout for c in promotion.namespace.classes]
    return [end + promotion.spare * proves for proves in proving(groups)]


def _touch(state: State, promotion: Promotion, found: list[I64Array], end: int) -> None:
    for c, rows in zip(promotion.namespace.classes, found, strict=True):
        own = rows[_begin(promotion, c, end) : end + promotion.spare]
        state.store.touch(c, own[own != ABSENT])


def _worth_it(state: State, promotion: Promotion, wanted: list[I64Array], chunks: int) -> bool:
    """Whether loading takes less time than computing the tokens it saves, as far as is known."""
    if not state.config.weigh_loads or promotion.prefill_tokens_s <= 0:
        return True
    sizes = np.zeros(len(state.config.tiers))
    for c, home, w in zip(promotion.namespace.classes, promotion.homes, wanted, strict=True):
        sizes += np.bincount(home[w], minlength=len(sizes)) * c.spec.row_bytes
    seconds = sum(
        state.tiers.speeds[tier].seconds(int(size)) for tier, size in enumerate(sizes) if size
    )
    if seconds * promotion.prefill_tokens_s <= chunks * promotion.namespace.chunk_tokens:
        return True
    state.counters["promotions_not_worth_it"] += 1
    for tier in np.flatnonzero(sizes):
        state.tiers.speeds[int(tier)].doubt()
    return False


def _fitting(state: State, ns: Namespace, wanted: list[I64Array], upto: int) -> int:
    """The first chunk with which LOADING rows would take more than they may; ``upto`` if none."""
    sizes = np.zeros(upto, np.int64)
    for c, w in zip(ns.classes, wanted, strict=True):
        sizes[w] += c.spec.row_bytes
    left = int(state.config.arena_bytes * LOADING_SHARE) - state.tiers.loading_bytes
    return int(np.searchsorted(np.cumsum(sizes), max(left, 0), side="right"))


def _load(
    state: State, promotion: Promotion, wanted: list[I64Array], upto: int, protect: int
) -> int:
    """Take slots for all of ``wanted`` and ask the tiers to fill them; ``upto``. If there is no
    room for all: nothing, and the first chunk for which there was none."""
    ns = promotion.namespace
    rows = [
        state.store.allocate(c, promotion.keys[w], protect, LOADING)
        for c, w in zip(ns.classes, wanted, strict=True)
    ]
    cut = min(
        (int(w[len(r)]) for w, r in zip(wanted, rows, strict=True) if len(r) < len(w)),
        default=upto,
    )
    if cut < upto:
        state.counters["promotions_cut"] += 1
        for taken in rows:
            state.store.free(taken)
        return cut
    for c, w, taken, home in zip(ns.classes, wanted, rows, promotion.homes, strict=True):
        state.store.touch(c, taken)
        step = max(1, LOAD_BYTES // c.spec.row_bytes)
        for tier in np.unique(home[w]).tolist():
            of_tier = taken[home[w] == tier]
            for at in range(0, len(of_tier), step):
                _ask_for(state, promotion, c, int(tier), of_tier[at : at + step])
    return upto


def _ask_for(state: State, promotion: Promotion, c: RowClass, tier: int, rows: I64Array) -> None:
    size = len(rows) * c.spec.row_bytes
    op = state.tiers.begin(Loading(tier, ClassRows(c.id, rows), size, set()))
    for row in rows.tolist():
        state.promotions.loading[row] = op
    state.tiers.speeds[tier].begin(size, state.now)
    records = _records(promotion.namespace, tier, c, state.store.table.keys_of(rows))
    state.out.append(TierLoad(tier, op, records, state.store.slots(rows), c.spec.shard_bytes))


def _records(ns: Namespace, tier: int, c: RowClass, keys: U64Array) -> Records:
    epoch = ns.tier_epochs[tier]
    assert epoch is not None, "a tier was asked under no epoch"
    return Records(ns.digest, epoch, c.spec.group, keys)


# ---------------------------------------------------------------- waiting


def _aim(state: State, promotion: Promotion, states: tuple[int, ...]) -> None:
    """Pin the longest hit of rows in ``states``; answer, if none of them is LOADING."""
    before, ns = promotion.pinned, promotion.namespace
    if promotion.epoch != ns.epoch:
        _answer(state, promotion)
        return
    promotion.awaits = set()
    found = [c.index.find(promotion.keys) for c in ns.classes]
    promotion.chunks = _longest(promotion, _there(state, found, states))
    parts, proof = [], []
    for c, f, upto in zip(ns.classes, found, _ends(promotion, promotion.chunks), strict=True):
        rows = f[_begin(promotion, c, promotion.chunks) : promotion.chunks]
        after = f[promotion.chunks : upto] if promotion.chunks > promotion.first else f[:0]
        state.store.touch(c, rows)
        parts.append(ClassRows(c.id, rows))
        proof.append(ClassRows(c.id, after))
    promotion.parts, promotion.proof = tuple(parts), tuple(proof)
    for part in promotion.pinned:
        state.store.pin(part.rows)
        for row in part.rows[state.store.table.state[part.rows] == LOADING].tolist():
            promotion.awaits.add(state.promotions.loading[row])
    for part in before:  # only now: what is not retained stays for those who wait
        state.store.unpin(part.rows, ahead=not promotion.readers)
    for op in promotion.awaits:
        loading = state.tiers.ops[op]
        assert isinstance(loading, Loading), "a LOADING row that nobody loads"
        loading.waiters.add(promotion.id)
    if not promotion.awaits:
        _answer(state, promotion)


def _there(state: State, found: list[I64Array], states: tuple[int, ...]) -> list[BoolArray]:
    """Which rows of each class are in one of ``states``."""
    table = state.store.table
    there = []
    for rows in found:
        held = rows != ABSENT
        held[held] = np.isin(table.state[rows[held]], states)
        there.append(held)
    return there


def _let_go(state: State, promotion: Promotion) -> None:
    """Unpin what it has pinned so far."""
    pinned = promotion.pinned
    promotion.parts, promotion.proof, promotion.chunks, promotion.awaits = (
        (),
        (),
        promotion.first,
        set(),
    )
    for part in pinned:
        state.store.unpin(part.rows, ahead=not promotion.readers)


def loaded(state: State, event: Loaded) -> None:
    """A tier is done with some slots: they are READY, or free."""
    op = state.tiers.end(event.op, Loading)
    rows = op.part.rows
    for row in rows.tolist():
        del state.promotions.loading[row]
    good = event.which
    size = op.size_bytes // len(rows)
    state.tiers.speeds[op.tier].end(op.size_bytes, int(event.which.sum()) * size, state.now)
    counters = state.tiers.counters[op.tier]
    counters["loaded_rows"] += int(event.which.sum())
    counters["load_misses"] += int((~event.which).sum())
    state.store.promoted(rows[good], state.config.retain_promoted)
    flush.promoted(state, ClassRows(op.part.row_class, rows[good]), op.tier)
    bad = rows[~good]
    state.store.fail(bad)
    for waiter in sorted(op.waiters):
        promotion = state.promotions.all.get(waiter)
        if promotion is None or event.op not in promotion.awaits:
            continue
        promotion.awaits.discard(event.op)
        if any(np.isin(part.rows, bad).any() for part in promotion.pinned):
            _aim(state, promotion, (READY, LOADING))
        elif not promotion.awaits:
            _answer(state, promotion)
    state.store.free(bad)


def _answer(state: State, promotion: Promotion) -> None:
    """Give the asker what is pinned by now."""
    instance = state.instances.get(promotion.instance)
    there = instance is not None and state.namespace_of(instance) is promotion.namespace
    if (promotion.readers and not there) or promotion.epoch != promotion.namespace.epoch:
        _let_go(state, promotion)
    elif any(state.store.table.doomed[part.rows].any() for part in promotion.pinned):
        _aim(state, promotion, (READY, LOADING))  # a reader has found one of them to be wrong
        return
    state.promotions.drop(promotion)
    parts, chunks = promotion.parts, promotion.chunks
    if not promotion.readers:
        state.send(promotion.session, Prefetched(seq=promotion.seq, chunks=chunks))
    elif chunks == promotion.first:
        state.send(promotion.session, miss(state, promotion.first, promotion.seq))
    else:
        asker = promotion.instance, promotion.request
        matched = match(
            state, *asker, promotion.first, chunks, parts, promotion.readers, promotion.spare
        )
        matched.seq = promotion.seq
        state.counters["promoted_chunks"] += chunks - promotion.first
        state.send(promotion.session, matched)
    _let_go(state, promotion)


def miss(state: State, first: int, seq: int = 0) -> Matched:
    """Nothing from ``first`` on."""
    return Matched(seq=seq, boot=state.config.boot, first=first, chunks=first)


def match(
    state: State,
    instance: str,
    request: str,
    first: int,
    chunks: int,
    parts: tuple[ClassRows, ...],
    readers: set[int],
    spare: int,
) -> Matched:
    """Lend ``parts`` to ``readers``, and tell where they lie."""
    state.counters["hit_chunks"] += chunks - first
    lease = state.settlement.lend(instance, request, chunks - first, parts, readers, state.now)
    slots: tuple[Slots, ...] = tuple(state.store.slots(p.rows) for p in parts)
    return Matched(
        boot=state.config.boot,
        lease=lease.id,
        first=first,
        chunks=chunks,
        given_s=state.now,
        deadline_s=lease.deadline,
        slots=slots,
        spare=spare,
    )


# ---------------------------------------------------------------- time, death, clears


def lapse(state: State) -> None:
    """Answer those whose time is up with what is READY by now."""
    for promotion in state.promotions.due(state.now):
        state.counters["promotions_late"] += 1
        _aim(state, promotion, (READY,))


def forget(state: State, session: int) -> None:
    """A session is gone: nobody waits for its promotions. What is LOADING goes on loading."""
    for promotion in [
        promotion for promotion in state.promotions.all.values() if promotion.session == session
    ]:
        state.promotions.drop(promotion)
        _let_go(state, promotion)


def void(state: State, ns: Namespace) -> None:
    """``ns`` is cleared: what waits for rows of before misses."""
    for promotion in [
        promotion for promotion in state.promotions.all.values() if promotion.namespace is ns
    ]:
        _answer(state, promotion)
