"""Which rows of a prompt are retained: those of its first chunks that fit under the payer's cap.

Law of this file: only rows that ``payer`` pays for are retained, in whole chunks from the prompt's
beginning, and never more than its cap (``core/rows/retention.py``).
"""

from __future__ import annotations

import numpy as np

from kvass.core.clients.tenants import Tenant
from kvass.core.rows.index import ABSENT
from kvass.core.rows.retention import Retention
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_states import RowStates
from kvass.core.rows.row_table import LOADING, READY, WRITING
from kvass.types import I64Array

Found = tuple[int, I64Array]
"""The rows that one class has of a prompt: the number of a chunk, and the row (or ``ABSENT``) of
each chunk from that one on."""


def keep(
    rows: RowStates,
    kept: Retention,
    ns: Namespace,
    found: list[Found],
    seconds: float,
    payer: Tenant,
) -> tuple[int, int]:
    """Retain rows of a prompt for ``seconds``.

    ``found``: its rows by class. Returns how many of its chunks are retained now, and how many are
    not because the payer may retain no more.
    """
    sets, table = rows.classes.sets, rows.table
    kept.sweep(rows.uses.now)
    cost = np.zeros(max(begin + len(each) for begin, each in found), np.int64)
    there = []
    for c, (begin, each) in zip(ns.classes, found, strict=True):
        chunks = np.flatnonzero(each != ABSENT)
        mine = each[chunks]
        may = np.isin(table.state[mine], (WRITING, LOADING, READY))
        may &= sets.tenant[table.set_of[mine]] == payer.id
        chunks, mine = begin + chunks[may], mine[may]
        cost[chunks[~kept.of(mine)]] += c.spec.row_bytes
        there.append((chunks, mine))
    room = kept.cap(payer) - payer.kept_bytes
    end = int(np.cumsum(cost).searchsorted(room, side="right"))
    for chunks, mine in there:
        kept.keep(np.unique(mine[chunks < end]), seconds, rows.uses.now)
    every = np.unique(np.concatenate([chunks for chunks, _ in there]))
    return int((every < end).sum()), int((every >= end).sum())
