"""Presence: which rows L1 or a tier has, key by key. Nothing is pinned, loaded or marked as used.

One tier is asked at a time, in their order, for the rows that L1 and the tiers before it lack. A
row that L1 is loading, or that is being written, is not there yet.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvass.core.effects import Probed, TierProbe
from kvass.core.matching.coverage import BoolArray
from kvass.core.pending.tier_operations import Looking
from kvass.core.rows.row_classes import Namespace
from kvass.core.state import State
from kvass.core.tiers import epochs
from kvass.errors import Refused
from kvass.messages import Presence, Present, Promoting, SessionIs
from kvass.types import U64Array

MOST_OPEN: Final = 64
"""The most questions that wait for tiers at a time (law 12); each takes 0.5 MiB at most."""
MOST_OF_A_CONNECTION: Final = 8


def begin(
    state: State, connection: int, ns: Namespace, keys: U64Array, msg: Present
) -> Presence | None:
    """Which of ``keys``, those of ``msg``, have a row in every group that it names.

    ``None``: a tier was asked. The reply comes later.
    """
    if msg.groups >> len(ns.classes):
        raise Refused("bad_value", f"groups: the namespace has {len(ns.classes)}")
    classes = [c for c in ns.classes if not msg.groups or msg.groups >> c.spec.group & 1]
    there = [state.rows.there(c.index.find(keys)) for c in classes]
    looking = Looking(-1, connection, msg.seq, ns, ns.epoch, classes, keys, there)
    if msg.tiers and ask(state, looking):
        return None
    return _presence(looking)


def ask(state: State, looking: Looking) -> bool:
    """Ask the tiers for what is not there. Returns False if none is to be asked; else the reply
    comes later."""
    if not _ask_next(state, looking):
        return False
    state.send(looking.connection, Promoting(seq=looking.seq))
    return True


def probed(state: State, event: Probed) -> None:
    looking, at, found_bytes = state.tiers.end(event.op, Looking), 0, 0
    for c, there in zip(looking.classes, looking.there, strict=True):
        lacks = np.flatnonzero(~there)
        there[lacks] = event.held[at : at + len(lacks)]
        at += len(lacks)
        found_bytes += int(there[lacks].sum()) * c.spec.row_bytes
    if looking.answer is not None:
        looking.answer.tier_bytes[state.tiers.all[looking.tier].name] = found_bytes
    connection = state.connections.get(looking.connection)
    if connection is None or connection.ending:
        return
    if looking.epoch != looking.namespace.epoch:  # it was cleared meanwhile
        for there in looking.there:
            there[:] = False
        if looking.answer is not None:
            looking.answer = SessionIs()
    elif _ask_next(state, looking):
        return
    reply = looking.answer or _presence(looking)
    reply.seq = looking.seq
    state.send(looking.connection, reply)


def _ask_next(state: State, looking: Looking) -> bool:
    """Ask the next tier for what is lacking. Returns False if none is left, or nothing lacks."""
    ns, last = looking.namespace, looking.tier
    place = 0 if last < 0 else state.tiers.all[last].place
    lacking = [~there for there in looking.there]
    usable = epochs.usable(state, ns)
    later = [tier for tier in usable if state.tiers.all[tier].place > place]
    if not later or not any(lacks.any() for lacks in lacking):
        return False
    if last < 0:
        _check_room(state, looking.connection)
    looking.tier = later[0]
    batches = tuple(
        epochs.records(ns, looking.tier, c, looking.keys[lacks])
        for c, lacks in zip(looking.classes, lacking, strict=True)
    )
    op = state.tiers.begin(looking)
    state.out.append(TierProbe(looking.tier, op, batches))
    return True


def _check_room(state: State, connection: int) -> None:
    """Refuse a question if too many wait for tiers."""
    askers = [op.connection for op in state.tiers.ops.values() if isinstance(op, Looking)]
    if len(askers) >= MOST_OPEN or askers.count(connection) >= MOST_OF_A_CONNECTION:
        raise Refused("limit", f"{len(askers)} such questions wait for tiers: ask later")


def _presence(looking: Looking) -> Presence:
    every: BoolArray = np.logical_and.reduce(looking.there)
    return Presence(held=every.tobytes())
