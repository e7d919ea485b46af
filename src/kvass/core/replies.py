"""The answer to a lookup."""

from __future__ import annotations

from kvass.core.ledger import ClassRows
from kvass.core.state import State
from kvass.messages import Matched


def matched(
    state: State,
    instance: str,
    request: str,
    first: int,
    chunks: int,
    parts: tuple[ClassRows, ...],
    readers: set[int],
    spare: int,
) -> Matched:
    """A match of ``chunks`` chunks, which is lent to ``readers``; ``first`` of them are a miss."""
    if chunks == first:
        return Matched(boot=state.config.boot, first=first, chunks=first)
    lease = state.settlement.lend(instance, request, parts, readers)
    state.counters["hit_chunks"] += chunks - first
    return Matched(
        boot=state.config.boot,
        lease=lease.id,
        first=first,
        chunks=chunks,
        given_s=state.now,
        deadline_s=lease.deadline,
        slots=tuple([state.store.slots(part.rows) for part in parts]),
        spare=spare,
    )
