"""What an engine's scheduler gets for a request: a match, or word that it is too early to tell.
And its reserve while that is unanswered.

Law of this file: values, and what is known of one request; nothing here sends or waits.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvass.client.session import Session
from kvass.types import Slots


class Match(msgspec.Struct, frozen=True):
    """Chunks ``[first, chunks)`` of a request, pinned from ``given_s`` until ``deadline_s``.

    Both are CLOCK_MONOTONIC; only a rank registered at ``given_s`` may read (``messages.Matched``).
    ``slots[g]``: where the rows of group ``g`` lie that the hit needs, which are those of the last
    ``len(slots[g])`` chunks. ``chunks > first`` always.
    """

    lease: int
    boot: bytes
    first: int
    chunks: int
    given_s: float
    deadline_s: float
    slots: tuple[Slots, ...]


class Pending:
    """The daemon has not answered yet: ask again in a later step. Test with ``is PENDING``."""


PENDING: Final = Pending()


class Reserving(msgspec.Struct):
    """A reserve of ``items`` items, sent as ``seq`` at ``asked_s`` (CLOCK_MONOTONIC). ``wait_s``:
    how long the first look for its answer may take."""

    seq: int
    items: int
    asked_s: float
    wait_s: float


class Ask:
    """What one request holds or has asked for: nothing, a lookup in flight, or a match."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.first = 0
        self.seq = 0
        self.match: Match | None = None
        self.patience_s = 0.0
        """CLOCK_MONOTONIC until which the request may be told ``PENDING``; 0: never told yet."""
        self.ping = 0
        """The ``seq`` of a ping behind the lookup, which shows that the daemon has taken it up."""
        self.pinged_s = 0.0
        self.taken_up = False
