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
from collections.abc import Iterable
from typing import Final

import numpy as np

from kvass.core import epochs, flush
from kvass.core.coverage import BoolArray, first_chunk, longest_hit, proving
from kvass.core.effects import Loaded, Probed, Records, TierLoad, TierProbe
from kvass.core.index import ABSENT, repeated
from kvass.core.l1 import Namespace, RowClass
from kvass.core.leases import Part
from kvass.core.rows import LOADING, READY
from kvass.core.state import State
from kvass.core.tiers import NOWHERE, Loading, Probing, Promotion, Waking
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


def begin(state: State, one: Promotion) -> bool:
    """Find out what the tiers hold of a prompt, and promote it; the answer comes by itself.

    False: so many wait that nothing was begun. The asker has what L1 has.
    """
    if not state.promotions.room(one, state.config.limits.waiting_bytes):
        state.counters["lookups_not_waited"] += 1
        return False
    state.promotions.add(one)
    for home in one.homes:
        home[repeated(one.keys)] = _NOT_AGAIN
    _ask_next(state, one)
    return True


def _ask_next(state: State, one: Promotion) -> None:
    """Ask a tier for more of what L1 and the tiers before it have not; if there is no more: plan.

    A few chunks first, then ever more: no hit gets past a full row that nobody has, and most
    prompts that L1 does not know the tiers do not know either.
    """
    tiers = epochs.usable(state, one.namespace)
    one.early = epochs.awaited(one.namespace)
    if one.early:
        return
    found = [c.index.find(one.keys) for c in one.namespace.classes]
    coming = _there(state, found, (READY, LOADING))
    for tier in tiers:
        if tier > one.probing:
            one.probing, one.reach = tier, one.first
        while tier == one.probing and one.reach < len(one.keys) and not _gap(one, coming):
            begin = one.reach
            more = max(PROBE_CHUNKS, (begin - one.first) * PROBE_GROWTH)
            one.reach = min(one.first + more, len(one.keys))
            wanted = [
                begin + np.flatnonzero(((rows == ABSENT) & _homeless(home))[begin : one.reach])
                for rows, home in zip(found, one.homes, strict=True)
            ]
            if any(map(len, wanted)):
                _probe(state, one, tier, wanted)
                return
    if tiers and _has_lost(one, found):
        one.probing = -1
        _ask_next(state, one)
    else:
        _plan(state, one)


def _homeless(home: I64Array) -> BoolArray:
    """Of which chunks no tier is known to hold the row."""
    return np.isin(home, (NOWHERE, _IN_NONE))


def _has_lost(one: Promotion, found: list[I64Array]) -> bool:
    """Whether no tier was asked for some row because L1 had it, and L1 has it no more. Of these
    at least one is asked for then, so this comes to an end."""
    return any(
        ((rows == ABSENT) & (home == NOWHERE))[one.first : one.reach].any()
        for rows, home in zip(found, one.homes, strict=True)
    )


def resume(state: State) -> None:
    """A tier has told an epoch, or that it cannot: go on with those who came before that."""
    promotions = state.promotions
    promotions.early = deque(one.id for one in promotions.all.values() if one.early)
    go_on(state)


def go_on(state: State) -> None:
    """What a step before this one left to do of this kind, a slice of it."""
    _wake(state)
    early = state.promotions.early
    for _ in range(min(len(early), state.config.slice_ends)):
        one = state.promotions.all.get(early.popleft())
        if one is not None and one.early:
            _ask_next(state, one)


def _gap(one: Promotion, coming: list[BoolArray]) -> bool:
    """Whether some full row has been asked for in vain, so that what follows it is of no use."""
    return any(
        not (there | (home >= 0))[one.first : one.reach].all()
        for c, there, home in zip(one.namespace.classes, coming, one.homes, strict=True)
        if c.spec.layout.kind == "full"
    )


def _probe(state: State, one: Promotion, tier: int, wanted: list[I64Array]) -> None:
    ns = one.namespace
    op = state.tiers.begin(Probing(tier, one.id, wanted))
    batches = tuple(
        _records(ns, tier, c, one.keys[w]) for c, w in zip(ns.classes, wanted, strict=True)
    )
    state.out.append(TierProbe(tier, op, batches))


def probed(state: State, event: Probed) -> None:
    """A tier has said what it holds."""
    op = state.tiers.end(event.op, Probing)
    one = state.promotions.all.get(op.promotion)
    if one is None:
        return  # its time was up
    at = 0
    for home, wanted in zip(one.homes, op.wanted, strict=True):
        held = event.held[at : at + len(wanted)]
        home[wanted[held]], home[wanted[~held]] = op.tier, _IN_NONE
        at += len(wanted)
    if one.epoch == one.namespace.epoch and not one.gone:
        _ask_next(state, one)
    else:
        _answer(state, one)


def _plan(state: State, one: Promotion) -> None:
    """Have loaded what the longest hit needs beyond L1, as far as it fits."""
    ns = one.namespace
    protect, n, weighed = state.l1.table.clock, len(one.keys), False
    while n > one.first:
        found = [c.index.find(one.keys[:n]) for c in ns.classes]
        lacking = [
            (rows == ABSENT) & (home[:n] >= 0) for rows, home in zip(found, one.homes, strict=True)
        ]
        coming = _there(state, found, (READY, LOADING))
        end = _longest(one, [a | b for a, b in zip(coming, lacking, strict=True)])
        wanted = _wanted(one, lacking, end)
        if end == one.first or not any(map(len, wanted)):
            break
        if not weighed:
            weighed = True
            gained = end - _longest(one, _there(state, found, (READY,)))
            if not _worth_it(state, one, wanted, gained):
                break
        upto = end + one.spare
        n = _fitting(state, ns, wanted, upto)
        if n == upto:
            _touch(state, one, found, end)  # nothing of the prompt shall make room for it
            n = _load(state, one, wanted, upto, protect)
            if n == upto:
                flush.ahead(state)
                break
    _aim(state, one, (READY, LOADING))


def _longest(one: Promotion, there: list[BoolArray]) -> int:
    groups = [c.spec.layout for c in one.namespace.classes]
    return longest_hit(groups, there, one.namespace.chunk_tokens, one.first, one.spare)


def _begin(one: Promotion, c: RowClass, end: int) -> int:
    """The first chunk that a hit of ``end`` chunks needs of a class."""
    return first_chunk(c.spec.layout, end, one.namespace.chunk_tokens, one.first)


def _wanted(one: Promotion, lacking: list[BoolArray], end: int) -> list[I64Array]:
    """The chunks of each class that a hit of ``end`` chunks, and the proof of it, lack."""
    wanted = []
    for c, lacks, upto in zip(one.namespace.classes, lacking, _ends(one, end), strict=True):
        begin = _begin(one, c, end)
        wanted.append(begin + np.flatnonzero(lacks[begin:upto]))
    return wanted


def _ends(one: Promotion, end: int) -> list[int]:
    """Where what a hit of ``end`` chunks uses of each class ends, proof included."""
    groups = [c.spec.layout for c in one.namespace.classes]
    return [end + one.spare * proves for proves in proving(groups)]


def _touch(state: State, one: Promotion, found: list[I64Array], end: int) -> None:
    for c, rows in zip(one.namespace.classes, found, strict=True):
        own = rows[_begin(one, c, end) : end + one.spare]
        state.l1.touch(c, own[own != ABSENT])


def _worth_it(state: State, one: Promotion, wanted: list[I64Array], chunks: int) -> bool:
    """Whether loading takes less time than computing the tokens it saves, as far as is known."""
    if not state.config.weigh_loads or one.prefill_tokens_s <= 0:
        return True
    sizes = np.zeros(len(state.config.tiers))
    for c, home, w in zip(one.namespace.classes, one.homes, wanted, strict=True):
        sizes += np.bincount(home[w], minlength=len(sizes)) * c.spec.row_bytes
    seconds = sum(
        state.tiers.speeds[tier].seconds(int(size)) for tier, size in enumerate(sizes) if size
    )
    if seconds * one.prefill_tokens_s <= chunks * one.namespace.chunk_tokens:
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
    left = int(state.config.arena_bytes * LOADING_SHARE) - state.loading_bytes
    return int(np.searchsorted(np.cumsum(sizes), max(left, 0), side="right"))


def _load(state: State, one: Promotion, wanted: list[I64Array], upto: int, protect: int) -> int:
    """Take slots for all of ``wanted`` and ask the tiers to fill them; ``upto``. If there is no
    room for all: nothing, and the first chunk for which there was none."""
    ns = one.namespace
    rows = [
        state.l1.allocate(c, one.keys[w], protect, LOADING)
        for c, w in zip(ns.classes, wanted, strict=True)
    ]
    cut = min(
        (int(w[len(r)]) for w, r in zip(wanted, rows, strict=True) if len(r) < len(w)),
        default=upto,
    )
    if cut < upto:
        state.counters["promotions_cut"] += 1
        for taken in rows:
            state.l1.free(taken)
        return cut
    for c, w, taken, home in zip(ns.classes, wanted, rows, one.homes, strict=True):
        state.l1.touch(c, taken)
        step = max(1, LOAD_BYTES // c.spec.row_bytes)
        for tier in np.unique(home[w]).tolist():
            of_tier = taken[home[w] == tier]
            for at in range(0, len(of_tier), step):
                _ask_for(state, one, c, int(tier), of_tier[at : at + step])
    return upto


def _ask_for(state: State, one: Promotion, c: RowClass, tier: int, rows: I64Array) -> None:
    size = len(rows) * c.spec.row_bytes
    op = state.tiers.begin(Loading(tier, Part(c.id, rows), size, set()))
    for row in rows.tolist():
        state.promotions.loading[row] = op
    state.tiers.speeds[tier].begin(size, state.now)
    records = _records(one.namespace, tier, c, state.l1.table.keys_of(rows))
    state.out.append(TierLoad(tier, op, records, state.l1.slots(rows), c.spec.shard_bytes))


def _records(ns: Namespace, tier: int, c: RowClass, keys: U64Array) -> Records:
    epoch = ns.tier_epochs[tier]
    assert epoch is not None, "a tier was asked under no epoch"
    return Records(ns.digest, epoch, c.spec.group, keys)


# ---------------------------------------------------------------- waiting


def _aim(state: State, one: Promotion, states: tuple[int, ...]) -> None:
    """Pin the longest hit of rows in ``states``; answer, if none of them is LOADING."""
    before, ns = one.pinned, one.namespace
    if one.epoch != ns.epoch:
        _answer(state, one)
        return
    one.awaits = set()
    found = [c.index.find(one.keys) for c in ns.classes]
    one.chunks = _longest(one, _there(state, found, states))
    parts, proof = [], []
    for c, f, upto in zip(ns.classes, found, _ends(one, one.chunks), strict=True):
        rows = f[_begin(one, c, one.chunks) : one.chunks]
        after = f[one.chunks : upto] if one.chunks > one.first else f[:0]
        state.l1.touch(c, rows)
        parts.append(Part(c.id, rows))
        proof.append(Part(c.id, after))
    one.parts, one.proof = tuple(parts), tuple(proof)
    for part in one.pinned:
        state.l1.pin(part.rows)
        for row in part.rows[state.l1.table.state[part.rows] == LOADING].tolist():
            one.awaits.add(state.promotions.loading[row])
    for part in before:  # only now: what is not retained stays for those who wait
        state.l1.unpin(part.rows, ahead=not one.readers)
    for op in one.awaits:
        loading = state.tiers.ops[op]
        assert isinstance(loading, Loading), "a LOADING row that nobody loads"
        loading.waiters.add(one.id)
    if not one.awaits:
        _answer(state, one)


def _there(state: State, found: list[I64Array], states: tuple[int, ...]) -> list[BoolArray]:
    """Which rows of each class are in one of ``states``."""
    table = state.l1.table
    there = []
    for rows in found:
        held = rows != ABSENT
        held[held] = np.isin(table.state[rows[held]], states)
        there.append(held)
    return there


def _let_go(state: State, one: Promotion) -> None:
    """Unpin what it has pinned so far."""
    pinned = one.pinned
    one.parts, one.proof, one.chunks, one.awaits = (), (), one.first, set()
    for part in pinned:
        state.l1.unpin(part.rows, ahead=not one.readers)


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
    state.l1.promoted(rows[good], state.config.retain_promoted)
    flush.promoted(state, Part(op.part.row_class, rows[good]), op.tier)
    failed = Part(op.part.row_class, rows[~good])
    state.l1.fail(failed.rows)
    for waiter in op.waiters:
        if (one := state.promotions.all.get(waiter)) is not None:
            one.awaits.discard(event.op)
    _wake(state, Waking(deque(sorted(op.waiters)), failed, len(failed.rows) * size))


def _wake(state: State, more: Waking | None = None) -> None:
    """Let those go on that wait for what has happened, in its order, a slice of them."""
    waking, left = state.promotions.waking, state.config.slice_ends
    if more is not None:
        waking.append(more)
    while waking:
        head = waking[0]
        while head.waiters:
            if not left:
                return
            left -= 1
            one = state.promotions.all.get(head.waiters.popleft())
            if one is None:
                continue
            if one.gone or one.epoch != one.namespace.epoch:
                _answer(state, one)
            elif head.failed is not None and _uses(one, head.failed.rows):
                _aim(state, one, (READY, LOADING))
            elif not one.awaits:
                _answer(state, one)
        if head.failed is not None:
            state.l1.free(head.failed.rows)
        waking.popleft()


def _uses(one: Promotion, rows: I64Array) -> bool:
    return any(np.isin(part.rows, rows).any() for part in one.pinned)


def _answer(state: State, one: Promotion) -> None:
    """Give the asker what is pinned by now."""
    if one.gone:
        state.promotions.drop(one)
        _let_go(state, one)
        return
    instance = state.instances.get(one.instance)
    there = instance is not None and state.namespace_of(instance) is one.namespace
    if (one.readers and not there) or one.epoch != one.namespace.epoch:
        _let_go(state, one)
    elif any(state.l1.table.doomed[part.rows].any() for part in one.pinned):
        _aim(state, one, (READY, LOADING))  # a reader has found one of them to be wrong
        return
    state.promotions.drop(one)
    parts, chunks = one.parts, one.chunks
    if not one.readers:
        state.send(one.session, Prefetched(seq=one.seq, chunks=chunks))
    elif chunks == one.first:
        state.send(one.session, miss(state, one.first, one.seq))
    else:
        asker = one.instance, one.request
        matched = match(state, *asker, one.first, chunks, parts, one.readers, one.spare)
        matched.seq = one.seq
        state.counters["promoted_chunks"] += chunks - one.first
        state.send(one.session, matched)
    _let_go(state, one)


def miss(state: State, first: int, seq: int = 0) -> Matched:
    """Nothing from ``first`` on."""
    return Matched(seq=seq, boot=state.config.boot, first=first, chunks=first)


def match(
    state: State,
    instance: str,
    request: str,
    first: int,
    chunks: int,
    parts: tuple[Part, ...],
    readers: set[int],
    spare: int,
) -> Matched:
    """Lend ``parts`` to ``readers``, and tell where they lie."""
    state.counters["hit_chunks"] += chunks - first
    lease = state.custody.lend(instance, request, chunks - first, parts, readers, state.now)
    slots: tuple[Slots, ...] = tuple(state.l1.slots(p.rows) for p in parts)
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
    for one in state.promotions.due(state.now, state.config.slice_ends):
        state.counters["promotions_late"] += 1
        _aim(state, one, (READY,))


def forget(state: State, session: int) -> None:
    """A session is gone: nobody waits for its promotions. What is LOADING goes on loading."""
    of_it = [one for one in state.promotions.all.values() if one.session == session]
    for one in of_it:
        one.gone = True
    if of_it:
        _wake(state, Waking(deque(one.id for one in of_it)))


def void(state: State, cleared: Iterable[Namespace]) -> None:
    """Namespaces are cleared: what waits for rows of before misses."""
    ids = {ns.id for ns in cleared}
    of_them = [one.id for one in state.promotions.all.values() if one.namespace.id in ids]
    if of_them:
        _wake(state, Waking(deque(of_them)))
