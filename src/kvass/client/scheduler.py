"""An engine's scheduler: lookups, reserves, and who owes what until the step's metadata is built.

Laws of this file:

- Waits: ``step_wait_s`` per scheduler step for all lookups together, ``reserve_wait_s`` for the
  reserve; after a timeout none until the daemon answered something.
- A lease is held by exactly one request, here, until ``take`` or ``settle``.
- When the connection is lost, everything held or asked through it is void.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from kvass.messages import Granted, Register, ReserveItem
from kvass.types import Slots


class Match(msgspec.Struct, frozen=True):
    """Chunks ``[first, chunks)`` of a request, pinned until ``deadline_s`` (CLOCK_MONOTONIC).

    ``slots[g]``: where group ``g``'s rows of those chunks lie. ``chunks > first`` always.
    """

    lease: int
    boot: bytes
    first: int
    chunks: int
    deadline_s: float
    slots: tuple[Slots, ...]


class Pending:
    """The daemon has not answered yet: ask again in a later step. Test with ``is PENDING``."""


PENDING: Final = Pending()


class SchedulerClient:
    """Used from the engine's scheduler thread only. No call raises for an absent daemon.

    ``registration``: rank -1, no layout. ``lookup_budget_s``: how long in all one request may be
    told ``PENDING``; None takes the daemon's ``lookup_budget_ms``.
    """

    def __init__(
        self,
        socket: str,
        registration: Register,
        *,
        lookup_budget_s: float | None = None,
        reserve_wait_s: float = 0.001,
        step_wait_s: float = 0.002,
    ) -> None:
        raise NotImplementedError

    @property
    def connected(self) -> bool:
        """Whether a daemon is there."""
        raise NotImplementedError

    @property
    def counters(self) -> Counter[str]:
        """``lookups``, ``hits``, ``misses``, ``pending``, ``timeouts``, ``late_replies``,
        ``reconnects``, ``refused_<code>`` and so on."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin connecting in the background, in this process (after any fork). Never blocks."""
        raise NotImplementedError

    def new_step(self) -> None:
        """A scheduler step begins: a new wait budget; late replies are settled."""
        raise NotImplementedError

    def match(self, request: str, digests: bytes, width: int, first: int) -> Match | Pending | None:
        """Rows of ``request`` from chunk ``first`` on; None is a miss, ``PENDING`` means ask again.

        ``digests``: all chunk hashes from chunk 0, ``width`` bytes each. A held match is returned
        again, with the same lease, until ``take`` or ``settle``; for another ``first`` or with less
        than half its time left, it is released and looked up again.
        """
        raise NotImplementedError

    def take(self, request: str) -> Match | None:
        """The held match; the caller now owns its lease and must hand it over or release it.

        None if none is held, or its connection is gone.
        """
        raise NotImplementedError

    def settle(self, request: str) -> None:
        """Give back whatever is held or asked for ``request`` and forget it. Idempotent.

        For every request that ends, is preempted, or is given no external tokens.
        """
        raise NotImplementedError

    def reserve(self, items: Sequence[ReserveItem], width: int) -> Granted | None:
        """Ask where to write; None: store nothing this step (a late grant is aborted).

        ``grants`` is parallel to ``items``.
        """
        raise NotImplementedError

    def release(self, boot: bytes, lease: int) -> None:
        """Give back a taken lease that was not handed over."""
        raise NotImplementedError

    def abort(self, boot: bytes, reservation: int) -> None:
        """Give back a granted reservation that was not handed over."""
        raise NotImplementedError

    def handed_over(self, leases: Sequence[int], reservations: Sequence[int], boot: bytes) -> None:
        """From here on only the ranks settle these. Last act of building a step's metadata."""
        raise NotImplementedError

    def clear(self, timeout_s: float) -> bool:
        """Forget this namespace's rows and give back every held match. False: not confirmed."""
        raise NotImplementedError

    def close(self) -> None:
        """End the session; the daemon cancels what was not handed over."""
        raise NotImplementedError
