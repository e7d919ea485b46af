"""Ended requests whose last blocks are not offered for storing yet. A later step offers them.

Law of this file: the blocks are held until they are offered or given up. They are given up if too
many blocks would be held, or if the engine needs them.
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
"""The most ended requests that one step offers. The others wait for the next step."""
REPORT_STEPS: Final = 4
"""The most steps that an ended request waits for the ranks' report of its LoRA adapter."""


@dataclass(eq=False)
class EndedRequest:
    """A request that ended with ``blocks`` computed blocks in ``table``. ``held``: those of them
    that were not offered. ``number``: the last step that was planned before the request ended."""

    state: RequestState
    table: Table
    blocks: int
    number: int
    held: list[Any]


class EndedRequests:
    """The ended requests that wait to be offered, oldest first. ``count_unstored`` is called with
    the states of the requests that are given up."""

    def __init__(
        self, pool: BlockPool, count_unstored: Callable[[Iterable[RequestState]], None]
    ) -> None:
        self.waiting: list[EndedRequest] = []
        self._pool = pool
        self._count_unstored = count_unstored

    def take(self) -> list[EndedRequest]:
        """Return and remove all that wait. The caller offers them, then calls ``taken``."""
        ended, self.waiting = self.waiting, []
        return ended

    def taken(self, ended: Sequence[EndedRequest]) -> None:
        """Free the blocks of the requests in ``ended`` that are not waiting again."""
        waiting = set(self.waiting)
        for one in ended:
            if one not in waiting:
                self._pool.free(one.held)

    def postpone(self, ended: Sequence[EndedRequest], reserves: Iterable[Holding]) -> None:
        """Let ``ended`` wait for a later step. If they and the pending ``reserves`` then hold more
        than their share of the pool, give up the newest. The caller frees the blocks of those
        that were given up (``taken``)."""
        self.waiting += ended
        dropped = list[EndedRequest]()
        over = excess(self._pool, (*reserves, *self.waiting))
        while over > 0 and self.waiting:
            dropped.append(self.waiting.pop())
            over -= len(dropped[-1].held)
        self._count_unstored(one.state for one in dropped)

    def give_up(self) -> None:
        """Give up all that wait, and free their blocks."""
        ended = self.take()
        self._count_unstored(one.state for one in ended)
        self.taken(ended)
