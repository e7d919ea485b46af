"""Presence: which rows L1 or a tier has, key by key. Nothing is pinned, loaded or marked as used.

One tier is asked at a time, in their order, for the rows that L1 and the tiers before it lack, and
for ``KEYS`` keys at a time. A row that L1 is loading, or that is being written, is not there yet.
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
from kvass.types import I64Array, U64Array

MOST_OPEN: Final = 64
"""The most questions that wait for tiers at a time (law 12); each takes 0.5 MiB at most."""
MOST_OF_A_CONNECTION: Final = 8
KEYS: Final = 2048
"""How many keys of a prompt one question to a tier names at most. So questions of lookups, which
the same threads of the tier answer, wait for a part of a long prompt only."""


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
        lacks = _lacking(looking, there)
        there[lacks] = event.held[at : at + len(lacks)]
        at += len(lacks)
        found_bytes += int(there[lacks].sum()) * c.spec.row_bytes
    if looking.answer is not None:
        name, of_tier = state.tiers.all[looking.tier].name, looking.answer.tier_bytes
        of_tier[name] = of_tier.get(name, 0) + found_bytes
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
    """Ask for the next keys that are lacking, or the next tier for the first ones. Returns False if
    no tier is left, or nothing lacks."""
    first = looking.tier < 0
    usable = epochs.usable(state, looking.namespace)
    while True:
        if looking.tier not in usable or looking.upto == len(looking.keys):
            place = 0 if looking.tier < 0 else state.tiers.all[looking.tier].place
            later = [tier for tier in usable if state.tiers.all[tier].place > place]
            if not later:
                return False
            looking.tier, looking.upto = later[0], 0
        looking.begin, looking.upto = looking.upto, min(looking.upto + KEYS, len(looking.keys))
        lacking = [_lacking(looking, there) for there in looking.there]
        if any(map(len, lacking)):
            break
    if first:
        _check_room(state, looking.connection)
    batches = tuple(
        epochs.records(looking.namespace, looking.tier, c, looking.keys[lacks])
        for c, lacks in zip(looking.classes, lacking, strict=True)
    )
    op = state.tiers.begin(looking)
    state.out.append(TierProbe(looking.tier, op, batches))
    return True


def _lacking(looking: Looking, there: BoolArray) -> I64Array:
    """Of the keys from ``begin`` to ``upto``, those that are not ``there``."""
    lacking: I64Array = np.flatnonzero(~there[looking.begin : looking.upto]) + looking.begin
    return lacking


def _check_room(state: State, connection: int) -> None:
    """Refuse a question if too many wait for tiers."""
    askers = [op.connection for op in state.tiers.ops.values() if isinstance(op, Looking)]
    if len(askers) >= MOST_OPEN or askers.count(connection) >= MOST_OF_A_CONNECTION:
        raise Refused("limit", f"{len(askers)} such questions wait for tiers: ask later")


def _presence(looking: Looking) -> Presence:
    every: BoolArray = np.logical_and.reduce(looking.there)
    return Presence(held=every.tobytes())
