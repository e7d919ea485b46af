"""Ended requests that left something to store: it is offered in a later step.

Law of this file: what an ended request left is held until it is offered, or until it is given up,
because it would hold too many blocks or the engine needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvass.engine.held_blocks import Holding, excess
from kvass.engine.protocols import BlockPool
from kvass.engine.request_state import RequestState
from kvass.layout.spans import Table

ENDED_PER_STEP: Final = 64
"""One step offers what so many ended requests left; the others wait for the next step."""
REPORT_STEPS: Final = 4
"""For so many steps an ended request waits until the ranks have reported its LoRA adapter."""


@dataclass(eq=False)
class EndedRequest:
    """A request that ended with ``blocks`` computed blocks in ``table``. Those of them that were
    not offered are ``held``. ``number``: of the last step before its end."""

    state: RequestState
    table: Table
    blocks: int
    number: int
    held: list[Any]


class EndedRequests:
    """The ended requests that wait, those that wait longest first. ``lost`` is called with the
    states of those that are given up."""

    def __init__(self, pool: BlockPool, lost: Callable[[Iterable[RequestState]], None]) -> None:
        self.waiting: list[EndedRequest] = []
        self._pool = pool
        self._lost = lost

    def take(self) -> list[EndedRequest]:
        """All that wait. The caller calls ``taken`` with them when it has offered them."""
        ended, self.waiting = self.waiting, []
        return ended

    def taken(self, ended: Sequence[EndedRequest]) -> None:
        """Free the blocks of those of ``ended`` that do not wait again."""
        waiting = set(self.waiting)
        for one in ended:
            if one not in waiting:
                self._pool.free(one.held)

    def postpone(self, ended: Sequence[EndedRequest], reserves: Iterable[Holding]) -> None:
        """Let ``ended`` wait for a later step, as many as may hold their blocks beside the
        ``reserves`` that hold theirs. The caller frees the blocks of the others (``taken``)."""
        self.waiting += ended
        dropped = list[EndedRequest]()
        over = excess(self._pool, (*reserves, *self.waiting))
        while over > 0 and self.waiting:
            dropped.append(self.waiting.pop())
            over -= len(dropped[-1].held)
        self._lost(one.state for one in dropped)

    def give_up(self) -> None:
        """Offer nothing of any of them, and free their blocks."""
        ended = self.take()
        self._lost(one.state for one in ended)
        self.taken(ended)
