"""The answers to a lookup."""

from __future__ import annotations

from kvass.core.ledger import Lease
from kvass.core.state import State
from kvass.messages import Matched


def miss(state: State, first: int) -> Matched:
    """Nothing from chunk ``first`` on."""
    return Matched(boot=state.config.boot, first=first, chunks=first)


def matched(state: State, lease: Lease, first: int, spare: int) -> Matched:
    """What was just lent, and where it lies."""
    state.counters["hit_chunks"] += lease.chunks
    return Matched(
        boot=state.config.boot,
        lease=lease.id,
        first=first,
        chunks=first + lease.chunks,
        given_s=state.now,
        deadline_s=lease.deadline,
        slots=tuple([state.store.slots(part.rows) for part in lease.parts]),
        spare=spare,
    )
