"""Lookup, release, renew; reserve, commit, abort, handing over; clear.

Law of this file: one function per message; it returns the reply (``None`` for a one-way message) or
raises ``Refused`` before it changed anything.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core import epochs, flush, promote
from kvass.core.checks import (
    check_request,
    instance_of,
    known_ranks,
    open_lease,
    open_reservation,
    own_rank,
    scheduler_of,
    split_keys,
)
from kvass.core.coverage import first_chunk, longest_hit
from kvass.core.index import ABSENT, repeated
from kvass.core.l1 import Namespace, RowClass
from kvass.core.leases import Lease, Part
from kvass.core.registry import Instance, Session
from kvass.core.state import State
from kvass.core.tiers import NOWHERE, Clearing, Promotion
from kvass.errors import Refused
from kvass.messages import (
    Abort,
    Clear,
    Cleared,
    Commit,
    Grant,
    Granted,
    HandedOver,
    Lookup,
    Matched,
    Prefetch,
    Prefetched,
    Release,
    Renew,
    Renewed,
    Reserve,
    ReserveItem,
)
from kvass.types import SCHEDULER, I64Array, U64Array

PREFETCH_S: Final = 60.0
"""How long a prefetch may take that does not say."""
GUESS_TOKENS_S: Final = 5_000.0
"""What an engine computes per second that does not know it yet."""
ROWS_A_STEP: Final = 1024
"""So many chunks of an item one step decides at most: others wait for it."""
COST_OF_AN_ITEM: Final = 256
COST_A_STEP: Final = 12 * COST_OF_AN_ITEM
"""What one step does for a ``Reserve``, in chunks that it grants: an item takes as long as 256 of
them, and to find eight that are there as long as one."""
LONGEST_S: Final = 300.0
"""No lookup waits longer, whatever it asks."""


# ---------------------------------------------------------------- reading


def lookup(state: State, session: Session, msg: Lookup) -> Matched | None:
    """Find and pin: the longest run of READY chunks from ``first``, under one lease.

    ``None``: the tiers may have more, and the answer comes when they have given it.
    """
    instance = scheduler_of(state, session)
    check_request(msg.request, state.config.limits)
    keys = split_keys(msg.digests, msg.width, msg.first, state.config.limits)
    if msg.spare < 0:
        raise Refused("bad_value", f"spare: {msg.spare} is negative")
    readers = known_ranks("readers", (0,) if msg.readers is None else msg.readers, instance)
    _check_leases(state, instance.id)
    state.counters["lookups"] += 1
    state.counters["lookup_chunks"] += len(keys) - msg.first
    ns = state.namespace_of(instance)
    if ns is None:
        return promote.miss(state, msg.first)
    chunks, parts = _match(state, ns, keys, msg.first, msg.spare)
    least_s = state.config.timing.lookup_budget_ms / 1000
    due = _due(state, msg.budget_ms / 1000 or least_s)
    if chunks > msg.first:  # for the rest of a prompt, no longer than computing the rest takes
        left_s = (len(keys) - chunks) * ns.chunk_tokens / (_speed(msg) or GUESS_TOKENS_S)
        due = min(due, state.now + max(left_s, least_s))
    more = chunks < len(keys) - msg.spare and ns.tier_epochs and due > state.now
    if more and promote.begin(
        state, _promotion(state, session, msg, ns, keys, msg.first, readers, due)
    ):
        return None
    if chunks == msg.first:
        return promote.miss(state, msg.first)
    return promote.match(
        state, instance.id, msg.request, msg.first, chunks, parts, readers, msg.spare
    )


def prefetch(state: State, session: Session, msg: Prefetch) -> Prefetched | None:
    """Promote what a lookup would; nothing is held for the asker."""
    check_request(msg.request, state.config.limits)
    keys = split_keys(msg.digests, msg.width, 0, state.config.limits)
    if session.registered is not None:
        if msg.namespace:
            raise Refused("forbidden", "an engine prefetches for its own namespace only")
        ns = state.namespace_of(scheduler_of(state, session))
    elif msg.namespace in state.by_digest:
        ns = state.namespaces[state.by_digest[msg.namespace]]
    else:
        raise Refused("bad_value", "namespace: no such digest; see `kvass status`")
    _check_leases(state, _asker(session))
    state.counters["prefetches"] += 1
    if ns is None:
        return Prefetched()
    chunks, _ = _match(state, ns, keys, 0, 0)
    due = _due(state, msg.budget_ms / 1000 or PREFETCH_S)
    more = chunks < len(keys) and ns.tier_epochs and due > state.now
    if more and promote.begin(state, _promotion(state, session, msg, ns, keys, 0, set(), due)):
        return None
    return Prefetched(chunks=chunks)


def _asker(session: Session) -> str:
    """Whose promotions a session's are: its instance's, or its own if it only looks."""
    return session.registered.instance if session.registered else f"session {session.id}"


def _due(state: State, budget_s: float) -> float:
    """When a budget that begins now is spent; what is no time at all, NaN too, is not later."""
    return state.now + min(budget_s, LONGEST_S)


def _speed(msg: Lookup) -> float:
    """What the engine computes per second; what is no speed is not known."""
    return msg.prefill_tokens_s if 0 < msg.prefill_tokens_s < math.inf else 0.0


def _check_leases(state: State, instance: str) -> None:
    held = len(state.ledger.leases_of.get(instance, ())) + state.promotions.of_instance[instance]
    if held >= state.config.limits.leases_per_instance:
        raise Refused("limit", f"{held} leases are open: release some")


def _promotion(
    state: State,
    session: Session,
    msg: Lookup | Prefetch,
    ns: Namespace,
    keys: U64Array,
    first: int,
    readers: set[int],
    due: float,
) -> Promotion:
    return Promotion(
        id=state.promotions.new_id(),
        session=session.id,
        seq=msg.seq,
        instance=_asker(session),
        request=msg.request,
        readers=readers,
        namespace=ns,
        epoch=ns.epoch,
        keys=keys,
        first=first,
        deadline=due,
        prefill_tokens_s=_speed(msg) if isinstance(msg, Lookup) else 0.0,
        spare=msg.spare if isinstance(msg, Lookup) else 0,
        homes=[np.full(len(keys), NOWHERE, np.int64) for _ in ns.classes],
    )


def _match(
    state: State, ns: Namespace, keys: U64Array, first: int, spare: int
) -> tuple[int, tuple[Part, ...]]:
    """Where the longest hit ends, and the rows it needs from ``first`` on, group by group.

    Touches these, and what the engine has itself of ``[0, first)``.
    """
    found = [one.index.find(keys) for one in ns.classes]
    there = [state.l1.readable(f) for f in found]
    groups = [one.spec.layout for one in ns.classes]
    chunks = longest_hit(groups, there, ns.chunk_tokens, first, spare)
    parts = []
    for one, group, f in zip(ns.classes, groups, found, strict=True):
        begin = first_chunk(group, chunks, ns.chunk_tokens, first)
        rows = f[begin:chunks]
        if first:
            own = f[first_chunk(group, chunks, ns.chunk_tokens) : begin]
            state.l1.touch(one, np.concatenate([_present(own), rows]))
        else:
            state.l1.touch(one, rows)
        parts.append(Part(one.id, rows))
    return chunks, tuple(parts)


def renew(state: State, session: Session, msg: Renew) -> Renewed:
    """A full term more for a lease that did not lapse."""
    lease = open_lease(state, session, msg.boot, msg.lease)
    if lease is None:
        raise Refused("unknown_lease", f"lease {msg.lease} has ended: look up again")
    return Renewed(deadline_s=state.custody.renew(lease, state.now))


def release(state: State, session: Session, msg: Release) -> None:
    """A rank is done reading, or the scheduler gives back what it never handed over."""
    lease = open_lease(state, session, msg.boot, msg.lease)
    if lease is None:
        return  # a late release is no error
    rank = own_rank(session, msg.rank)
    if rank == SCHEDULER and lease.handed_over:
        raise Refused("bad_rank", f"lease {msg.lease} was handed over: only its ranks release")
    if msg.bad and (rank == SCHEDULER or rank in lease.owing):
        _drop_bad(state, lease, msg.bad)
    if rank == SCHEDULER:
        state.custody.end_lease(lease)
    else:
        state.custody.release(lease, rank)


def _drop_bad(state: State, lease: Lease, bad: tuple[int, ...]) -> None:
    """Rows whose bytes proved wrong never match again (law 8); a tier's record is checked anew."""
    named = np.array(bad, np.int64)
    for part in lease.parts:
        begin = lease.chunks - len(part.rows)  # a window's rows are those of the last chunks
        wrong = named[(begin <= named) & (named < lease.chunks)]
        rows = np.unique(part.rows[wrong - begin])
        rows = rows[~state.l1.table.doomed[rows]]
        state.counters["bad_rows"] += len(rows)
        state.l1.forget(rows)


# ---------------------------------------------------------------- writing


def reserve(state: State, session: Session, msg: Reserve) -> Granted:
    """Slots for the chunks of one scheduler step that nobody has yet."""
    instance = scheduler_of(state, session)
    asked = [_check_item(state, item, msg.width, instance) for item in msg.items]
    if state.namespace_of(instance) is None:  # no decision about any key: it is asked again
        raise Refused("not_registered", f"ranks {instance.missing} are missing: reserve later")
    total = sum(len(keys) for keys, _ in asked)
    if total > state.config.limits.keys_per_message:
        raise Refused("limit", f"at most {state.config.limits.keys_per_message} keys a message")
    protect = state.l1.table.clock
    now = _items_now(msg.items, asked)
    used = [
        _touch(state, instance, item, keys)  # all of them, before any makes room for itself
        for item, (keys, _) in zip(msg.items[:now], asked, strict=False)
    ]
    grants = [
        _grant(state, instance, item, keys, writers, protect, found)
        for item, (keys, writers), found in zip(msg.items[:now], asked, used, strict=False)
    ]
    grants += [Grant(later=item.first) for item in msg.items[now:]]
    flush.ahead(state)
    return Granted(
        boot=state.config.boot,
        given_s=state.now,
        deadline_s=state.now + state.config.timing.reserve_s,
        grants=grants,
    )


def _items_now(items: list[ReserveItem], asked: list[tuple[U64Array, set[int]]]) -> int:
    """How many of the items one step carries out."""
    costs = [
        COST_OF_AN_ITEM + len(keys) - item.first + len(keys) // 8
        for item, (keys, _) in zip(items, asked, strict=True)
    ]
    return max(1, int(np.searchsorted(np.cumsum(costs), COST_A_STEP, side="right")))


def _check_item(
    state: State, item: ReserveItem, width: int, instance: Instance
) -> tuple[U64Array, set[int]]:
    check_request(item.request, state.config.limits)
    keys = split_keys(item.digests, width, item.first, state.config.limits)
    ns = state.namespace_of(instance)
    if ns is None:
        return keys, set()
    named = instance.writers if item.writers is None else item.writers
    writers = known_ranks("writers", named, instance)
    if not instance.covers_all_shards(writers):
        raise Refused("bad_value", "writers: every shard needs exactly one of them")
    groups = len(ns.classes)
    if not 0 < item.groups < 1 << groups:
        raise Refused("bad_value", f"groups: mask {item.groups} does not fit {groups} groups")
    return keys, writers


def _grant(
    state: State,
    instance: Instance,
    item: ReserveItem,
    keys: U64Array,
    writers: set[int],
    protect: int,
    used: list[Used],
) -> Grant:
    """WRITING rows for the chunks of ``item`` that nobody has, as far as they fit."""
    ns = state.namespace_of(instance)
    assert ns is not None, "reserve() asked already"
    classes = [c for g, c in enumerate(ns.classes) if item.groups >> g & 1]
    until = min(item.first + ROWS_A_STEP, len(keys))
    later = until if until < len(keys) else -1
    lacking = _lacking(ns, item, keys[:until])[[c.spec.group for c in classes]]
    _cut(lacking, classes, _allowance(state, instance))
    wanted = [np.flatnonzero(each) + item.first for each in lacking]
    if not any(map(len, wanted)):
        return Grant(later=later)
    state.counters["chunks_wanted"] += int(lacking.any(axis=0).sum())
    rows = [
        state.l1.allocate(one, keys[w], protect) for one, w in zip(classes, wanted, strict=True)
    ]
    end = min(
        (int(w[len(r)]) for w, r in zip(wanted, rows, strict=True) if len(r) < len(w)),
        default=until,
    )  # the first chunk for which there was no room in some group
    for i, w in enumerate(wanted):
        kept = int(np.searchsorted(w, end))
        _take_back(state, rows[i][kept:])
        wanted[i], rows[i] = w[:kept], rows[i][:kept]
    _touch_new(
        state, ns, used, {c.id: (w, r) for c, w, r in zip(classes, wanted, rows, strict=True)}
    )
    parts = tuple(Part(c.id, r) for c, r in zip(classes, rows, strict=True) if len(r))
    if not parts:
        return Grant()
    one_id = state.custody.reserve(
        instance.id, item.request, parts, writers, ns.epoch, state.now
    ).id
    which = tuple(tuple(w.tolist()) for w in wanted)
    chunks = tuple(sorted({c for each in which for c in each}))
    state.counters["chunks_granted"] += len(chunks)
    return Grant(
        reservation=one_id,
        chunks=chunks,
        slots=tuple(map(state.l1.slots, rows)),
        which=() if all(each == chunks for each in which) else which,
        later=later,
    )


Used = tuple[int, I64Array]
"""Of one class: a chunk, and the rows from there on (or ``ABSENT``) that a prompt has."""


def _touch(state: State, instance: Instance, item: ReserveItem, keys: U64Array) -> list[Used]:
    """The prompt that ``item`` names is in use, also by who asks to write the rest of it.

    Of windows and states that means what it asks to write, and what a hit of all of it needs.
    """
    ns = state.namespace_of(instance)
    assert ns is not None, "reserve() asked already"
    used = []
    for one in ns.classes:
        begin = min(item.first, first_chunk(one.spec.layout, len(keys), ns.chunk_tokens))
        found = one.index.find(keys[begin:])
        state.l1.touch(one, _present(found))
        used.append((begin, found))
    return used


def _touch_new(
    state: State, ns: Namespace, used: list[Used], new: dict[int, tuple[I64Array, I64Array]]
) -> None:
    """Once more, with the new rows, by class the chunks and the rows: they are deeper, so older.

    Nothing of ``used`` has been evicted since it was touched: that is protected.
    """
    for one, (begin, found) in zip(ns.classes, used, strict=True):
        if one.id in new:
            chunks, rows = new[one.id]
            found[chunks - begin] = rows
        state.l1.touch(one, _present(found))


def _lacking(ns: Namespace, item: ReserveItem, keys: U64Array) -> npt.NDArray[np.bool_]:
    """Which rows nobody has of those that ``item`` asks for: bool, ``(groups, chunks)``, from chunk
    ``item.first`` on.

    A window or a state is worth writing only where the chunk's full rows are, or will be.
    """
    keys = keys[item.first :]
    absent = np.stack([one.index.find(keys) == ABSENT for one in ns.classes])
    asked = np.array([item.groups >> g & 1 for g in range(len(absent))], np.bool_)
    lacking: npt.NDArray[np.bool_] = absent & asked[:, None]
    columns = np.flatnonzero(lacking.any(axis=0))
    if len(columns) > 1:  # a key said twice is written once
        lacking[:, columns[repeated(keys[columns])]] = False
    full = np.array([one.spec.layout.kind == "full" for one in ns.classes])
    if not full.all():
        lacking[~full] &= (~absent | lacking)[full].all(axis=0)
    return lacking


def _cut(lacking: npt.NDArray[np.bool_], classes: list[RowClass], allowance: int) -> None:
    """Take out of ``lacking`` the chunks past ``allowance`` bytes."""
    sizes = np.array([one.spec.row_bytes for one in classes], np.int64)
    bytes_upto = np.cumsum(sizes @ lacking)
    lacking[:, int(np.searchsorted(bytes_upto, allowance, side="right")) :] = False


def _allowance(state: State, instance: Instance) -> int:
    """How many more bytes the instance may reserve (law 12)."""
    limits = state.config.limits
    if len(state.ledger.reservations_of.get(instance.id, ())) >= limits.reservations_per_instance:
        return 0
    return max(0, state.quota - state.ledger.bytes_of.get(instance.id, 0))


def _take_back(state: State, rows: I64Array) -> None:
    """Undo an allocation that nobody was told of."""
    if len(rows):
        state.l1.discard(rows)
        state.l1.free(rows)


def commit(state: State, session: Session, msg: Commit) -> None:
    """A rank wrote its shard of every row of a reservation."""
    one = open_reservation(state, session, msg.boot, msg.reservation)
    rank = own_rank(session, msg.rank)
    if one is None or rank not in one.owing:
        return  # said twice, or settled meanwhile: nothing left to publish
    row_class = state.l1.classes.get(one.parts[0].row_class)  # gone: cleared, and then unused
    epoch = None if row_class is None else state.namespaces[row_class.namespace].epoch
    state.custody.commit(one, rank, epoch, state.now)


def abort(state: State, session: Session, msg: Abort) -> None:
    """A rank will not write, or the scheduler never told anybody to."""
    one = open_reservation(state, session, msg.boot, msg.reservation)
    rank = own_rank(session, msg.rank)
    if one is None:
        return
    if rank != SCHEDULER:
        state.custody.abort(one, rank, state.now)
    elif one.handed_over:
        what = f"reservation {msg.reservation}"
        raise Refused("bad_rank", f"{what} was handed over: only its ranks abort")
    else:
        state.custody.cancel(one, state.now)


def handed_over(state: State, session: Session, msg: HandedOver) -> None:
    """From here on only the ranks settle these."""
    own_rank(session, SCHEDULER)
    leases = [open_lease(state, session, msg.boot, i) for i in msg.leases]
    reservations = [open_reservation(state, session, msg.boot, i) for i in msg.reservations]
    for held in (*leases, *reservations):
        if held is not None:  # else it ended meanwhile
            held.handed_over = True


def clear(state: State, session: Session, msg: Clear) -> Cleared | None:
    """Namespaces stop matching: their epoch moves on (DESIGN section 4).

    ``None``: it is answered when the tiers have taken note.
    """
    chosen = _to_clear(state, session, msg)
    one = Clearing(session=session.id, seq=msg.seq, rows=0)
    for ns in chosen:
        ns.epoch += 1
    promote.void(state, chosen)
    for ns in chosen:
        epochs.clear(state, ns, one)
    one.rows = state.l1.clear([c for ns in chosen for c in ns.classes])
    state.l1.reclaim()
    if msg.tiers:
        epochs.empty(state, one)
    return None if one.awaits else Cleared(rows=one.rows)


def _to_clear(state: State, session: Session, msg: Clear) -> list[Namespace]:
    if msg.tiers and not (msg.everything and state.config.tiers):
        raise Refused("bad_value", "tiers: are emptied with everything, and there must be some")
    if session.registered is not None:
        if msg.everything or msg.namespace:
            raise Refused("forbidden", "an engine clears its own namespace only")
        instance = instance_of(state, session)
        own = state.namespace_of(instance)
        if own is None:
            raise Refused("not_registered", f"ranks {instance.missing} are missing: clear later")
        return [own]
    if msg.everything:
        return list(state.namespaces.values())
    if msg.namespace in state.by_digest:
        return [state.namespaces[state.by_digest[msg.namespace]]]
    raise Refused("bad_value", "namespace: no such digest; see `kvass status`")


def _present(found: I64Array) -> I64Array:
    present: I64Array = found[found != ABSENT]
    return present
