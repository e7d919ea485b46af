"""Granted stores: the stores for which the daemon has reserved rows. Their blocks are held until
they are copied.

Law of this file: a grant is either sent in a step's work, or its reservation is aborted.
"""

from __future__ import annotations

from kvass.client.scheduler import SchedulerClient
from kvass.engine.held_blocks import CopiedBlocks
from kvass.engine.offers import Offer
from kvass.engine.row_events import RowEvents
from kvass.engine.setup import EngineSetup
from kvass.engine.step_work import StepWork, Store
from kvass.layout.spans import Blocks, Spans
from kvass.messages import Grant, Granted
from kvass.types import Slots


class GrantedStores:
    """The planner of the granted stores of one engine. ``events``: None if the engine publishes no
    KV events."""

    def __init__(
        self,
        setup: EngineSetup,
        client: SchedulerClient,
        spans: Spans,
        blocks: CopiedBlocks,
        events: RowEvents | None = None,
    ) -> None:
        self._setup = setup
        self._client = client
        self._spans = spans
        self._blocks = blocks
        self._events = events
        self._step = 0
        """The number of the last step that has stores (``StepWork.step``)."""

    def add(
        self, work: StepWork, offer: Offer, granted: Granted, grant: Grant, number: int
    ) -> None:
        """Hold the blocks of one grant and add its store to the step's work. ``number``: the step
        that computed the blocks."""
        mask, count = offer.item.groups, len(self._setup.groups)
        first, before = min(grant.chunks), offer.state.first_stored
        offer.state.first_stored = first if before is None else min(first, before)
        blocks = self._spans.to_store(offer.table, offer.boundary_states, mask, grant.rows())
        slots = iter(grant.slots)
        store = Store(
            step=self.hold(work, blocks, granted.deadline_s),
            boot=granted.boot,
            reservation=grant.reservation,
            given_s=granted.given_s,
            deadline_s=granted.deadline_s,
            slots=tuple(next(slots) if mask >> g & 1 else Slots() for g in range(count)),
            blocks=blocks,
            computed=number,
            request=offer.state.request.name,
            trace=offer.state.request.trace,
            adapter=None if offer.named is None else offer.named.held,
            first_step=offer.state.first_step,
        )
        work.stores.append(store)
        self._expect_events(offer, granted, grant)

    def hold(self, work: StepWork, blocks: Blocks, deadline_s: float) -> int:
        """Hold ``blocks`` until all ranks have reported the step of ``work``, which is returned.
        The ranks' copies end by ``deadline_s``."""
        self._step = work.step = work.step or self._step + 1
        self._blocks.hold(work.step, (i for ids in blocks for i in ids), deadline_s)
        return work.step

    def revoke(self, work: StepWork) -> None:
        """Remove the stores from a step's work, and abort their reservations."""
        stores, step = work.stores, work.step
        work.stores, work.step = [], 0
        self._blocks.revoke(step)
        for store in stores:
            self._client.abort(store.boot, store.reservation)

    def _expect_events(self, offer: Offer, granted: Granted, grant: Grant) -> None:
        """Announce the rows of a grant in KV events once they are stored. A tail is not
        announced."""
        if self._events is None:
            return
        groups = [g for g in range(len(self._setup.groups)) if offer.item.groups >> g & 1]
        whole = offer.end - (offer.tail > 0)
        rows = [
            (group, chunk)
            for group, chunks in zip(groups, grant.rows(), strict=True)
            for chunk in chunks
            if chunk < whole
        ]
        digests, width = offer.item.digests, len(offer.item.digests) // max(1, whole)
        self._events.expect(offer.state.request, digests, width, rows, granted.deadline_s)
