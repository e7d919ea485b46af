"""Waiting for rows of a prompt that engines are writing, before tiers are asked for them.

A promotion pins none of these rows. It is woken when one of their reservations ends.
"""

from __future__ import annotations

from kvass.core.pending.promotion import Promotion, PromotionState
from kvass.core.state import State
from kvass.core.tiers import probe


def wait_or_probe(state: State, promotion: Promotion) -> None:
    """Wait for the rows that are being written now. If there are none, ask the tiers."""
    writers = promotion.view(state.rows).writers()
    promotion.await_writers(writers, state.reservations.all)
    if writers:
        promotion.move(PromotionState.AWAITING_WRITERS)
    else:
        probe.probe_next(state, promotion)
