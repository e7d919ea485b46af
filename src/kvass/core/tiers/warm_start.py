"""The warm start: rows that were used last before the daemon's start are loaded into L1, in the
background.

Laws of this file: it evicts no row: it takes free slots, and no more than ``CoreConfig.warm_share``
of L1. Its rows count as used before all rows that engines have used since, so they are evicted
first. It begins no load while a lookup or a prefetch waits, and has one small load open at a time.

From time to time, and when the daemon stops, the first tier gets the *list* of each class: the keys
of its rows, the most recently used first. Rows that tenants with a quota pay for are on none, since
the default tenant pays for all that is loaded. A list is a record of the tier, under the epoch of
the namespace. So after a clear it is not found.

A warm start begins when the first engine of a namespace has registered and the tier has answered
with the epoch. It is given up when the namespace is cleared, the tier is down or removed, L1 is
full, or the daemon stops.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvass.core.effects import Recalled, Remembered, TierRecall, TierRemember
from kvass.core.pending.tier_operations import Recalling, Remembering
from kvass.core.pending.warm_starts import WarmPart, WarmStart
from kvass.core.rows.index import ABSENT, repeated
from kvass.core.rows.row_classes import Namespace, RowClass
from kvass.core.rows.row_table import LOADING
from kvass.core.state import State
from kvass.core.tiers import epochs, load
from kvass.core.tiers.plan import LOADING_SHARE

LOAD_BYTES: Final = 4 << 20
"""The most bytes, or else one row, that one operation loads. It is small, because the load of a
lookup may have to wait for it."""
REMEMBER_S: Final = 300.0
"""How often lists are given to the tier. Each writes a record of the size of a row."""
MOST_KEYS: Final = 1 << 15
"""The most keys of a list: 1 ms of work."""
_KEY_BYTES: Final = 32


# ---------------------------------------------------------------- the lists


def remember_due(state: State) -> None:
    """Give the tier the lists that have changed, if it is time, and some of them only."""
    if _remembers(state) and state.now >= state.warm.remember_at:
        open_ = any(isinstance(op, Remembering) for op in state.tiers.ops.values())
        if not open_ and remember(state, state.config.slice_ends):
            state.warm.remember_at = state.now + REMEMBER_S


def remember(state: State, most: int | None = None) -> bool:
    """Give the tier the lists that have changed; at most ``most``. Returns whether those are all.

    A namespace whose warm start is under way keeps its old list: what it has in L1 is only a part.
    """
    before, state.warm.remembered = state.warm.remembered, {}
    for ns in state.namespaces.values():
        begun = ns.warm_stamp is None and ns.id not in state.warm.all
        tier = _tier(state, ns) if begun else None
        for c in ns.classes if tier is not None else ():
            newest, known = c.log.last_stamp, before.get(c.id)
            if newest != known and most != 0:
                _remember(state, ns, tier or 0, c)
                most, known = None if most is None else most - 1, newest
            if known is not None:
                state.warm.remembered[c.id] = known
    return most != 0


def _remember(state: State, ns: Namespace, tier: int, c: RowClass) -> None:
    rows = c.log.newest(min(MOST_KEYS, c.spec.row_bytes // _KEY_BYTES))
    if c.blocks is not None:
        rows = rows[~c.blocks.prints.tails(rows)]
    if not len(rows):
        return
    records = epochs.records(ns, tier, c, state.rows.table.keys_of(rows))
    op = state.tiers.begin(Remembering(tier))
    state.out.append(TierRemember(tier, op, records, c.spec.shard_bytes))


def remembered(state: State, event: Remembered) -> None:
    """A tier has the list, or does not: the next one replaces it."""
    state.tiers.end(event.op, Remembering)


def _remembers(state: State) -> bool:
    return state.config.warm_share > 0 and state.config.flush != "none"


def _tier(state: State, ns: Namespace) -> int | None:
    """The tier of the lists: the first one, if its epoch of ``ns`` is known."""
    if ns.private or not state.tiers.used:
        return None
    tier = state.tiers.used[0].number
    return None if ns.tier_epochs[tier] is None else tier


# ---------------------------------------------------------------- the loads


def announce(state: State, ns: Namespace) -> None:
    """A namespace was created: reserve the stamps of the rows of its warm start, before any row of
    it is used."""
    if state.config.warm_share and not ns.private:
        ns.warm_stamp = state.rows.table.clock
        state.rows.table.clock += MOST_KEYS * len(ns.classes)


def begin(state: State, ns: Namespace) -> None:
    """A tier answered with its epoch of ``ns``: ask the first tier for the lists, if they were not
    asked for."""
    tier = _tier(state, ns)
    if ns.warm_stamp is None or tier is None or state.namespaces.get(ns.id) is not ns:
        return
    epoch, first_stamp, ns.warm_stamp = ns.tier_epochs[tier], ns.warm_stamp, None
    assert epoch is not None, "a tier of which the epoch is known"
    if state.stopping or ns.epoch:
        return
    warm = WarmStart(ns, ns.epoch, tier, epoch, first_stamp, len(ns.classes))
    state.warm.all[ns.id] = warm
    for c in ns.classes:
        op = state.tiers.begin(Recalling(tier, warm, c.spec.group))
        records = epochs.records(ns, tier, c, np.empty((0, 4), np.uint64))
        state.out.append(TierRecall(tier, op, records, c.spec.shard_bytes))


def recalled(state: State, event: Recalled) -> None:
    """A tier answered with a list. After the last one, plan the loads."""
    op = state.tiers.end(event.op, Recalling)
    warm = op.warm_start
    warm.lists[op.group] = event.keys[:MOST_KEYS]
    warm.awaits -= 1
    if not warm.awaits and not _void(state, warm):
        _plan(state, warm)


def _plan(state: State, warm: WarmStart) -> None:
    """Divide the rows of the lists into parts: the same share of each list, its first rows."""
    classes, parts = warm.namespace.classes, list[tuple[float, WarmPart]]()
    wanted = {c.spec.group: warm.lists[c.spec.group] for c in classes}
    wanted = {group: np.delete(keys, repeated(keys), axis=0) for group, keys in wanted.items()}
    size = sum(len(wanted[c.spec.group]) * c.spec.row_bytes for c in classes)
    share = min(1.0, state.warm.room_bytes / size) if size else 0.0
    for number, c in enumerate(classes):
        keys = wanted[c.spec.group]
        keys = keys[: int(len(keys) * share)]
        ranks = np.arange(MOST_KEYS - 1, MOST_KEYS - 1 - len(keys), -1)
        stamps = warm.first_stamp + ranks * len(classes) + number
        step = max(1, LOAD_BYTES // c.spec.row_bytes)
        for at in range(0, len(keys), step):
            some = slice(at, at + step)
            parts.append((at / len(keys), WarmPart(c, keys[some], stamps[some])))
    warm.parts.extend(part for _, part in sorted(parts, key=lambda each: each[0]))
    warm.planned_bytes = sum(part.size_bytes for part in warm.parts)
    state.warm.room_bytes -= warm.planned_bytes


def go_on(state: State) -> None:
    """Load the next part, if nothing else is to be loaded. End what may not go on."""
    for number in [n for n, warm in state.warm.all.items() if _void(state, warm)]:
        del state.warm.all[number]
    if state.warm.op not in state.tiers.ops and not state.promotions.all:
        _load_next(state)


def _load_next(state: State) -> None:
    for number, warm in [*state.warm.all.items()]:
        warm.loading_bytes = 0
        while warm.parts and state.warm.op not in state.tiers.ops:
            if warm.parts[0].size_bytes > _room(state):
                return
            _load(state, warm, warm.parts.popleft())
        if state.warm.op in state.tiers.ops:
            return
        if not warm.awaits:
            del state.warm.all[number]


def _room(state: State) -> int:
    """How many bytes more may be LOADING (law 12)."""
    return int(state.config.arena_bytes * LOADING_SHARE) - state.loading_bytes


def _load(state: State, warm: WarmStart, part: WarmPart) -> None:
    """Load the rows of a part that L1 lacks, into free slots. If there are too few, L1 is full: the
    warm start loads no further part."""
    c, lacks = part.row_class, part.row_class.index.find(part.keys) == ABSENT
    keys, stamps = part.keys[lacks], part.stamps[lacks]
    if not len(keys):
        return
    # No stamp is below 0, so nothing is evicted.
    wanted, payer = [np.arange(len(keys))], state.tenants.default
    (rows,), _ = state.allocator.allocate([c], keys, wanted, 0, payer, LOADING)
    if len(rows) < len(keys):
        warm.parts.clear()
    if len(rows):
        state.rows.touched_before(c, rows, stamps[: len(rows)])
        state.warm.op = load.load_rows(state, warm.namespace, c, warm.tier, rows, warm_start=True)
        warm.loading_bytes = len(rows) * c.spec.row_bytes


def _void(state: State, warm: WarmStart) -> bool:
    """Whether a warm start may not go on."""
    ns, tier = warm.namespace, state.tiers.all[warm.tier]
    cleared = warm.epoch != ns.epoch or ns.tier_epochs[warm.tier] != warm.tier_epoch
    return cleared or not tier.place or not tier.report.get("up", True) or state.stopping


def stop(state: State) -> None:
    """The daemon stops: give the tier the lists that have changed."""
    if _remembers(state):
        remember(state)
