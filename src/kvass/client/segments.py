"""The client for segments, cached chunks that are not a prefix. It uses a ``SchedulerClient``.

::

    index_chunks   for what was granted, or has been hit: its KV is exact
    find_segments  which indexed chunks stand in a prompt
    match          (``SchedulerClient``) the digests of the prefix, then those found, each once

The ``match`` gives one lease for all, and has tiers load what L1 lacks. It ends at the first chunk
that is not cached any more; segments after it are not used. Without a daemon nothing is found and
nothing is indexed.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Final

from kvass.client.connection import DaemonConnection
from kvass.client.lookups import PENDING, Pending
from kvass.client.scheduler import SchedulerClient
from kvass.errors import Unavailable
from kvass.messages import Error, FindSegments, FromDaemon, IndexChunks, Segments
from kvass.types import Limits

SEARCH_S: Final = 0.25
"""The longest time for which a request waits for the answer to its search."""


class SegmentClient:
    """Used from the scheduler's thread only. No call raises for an absent daemon.

    ``space`` in all calls: at most 32 bytes. Chunks of another space are never found, so it stands
    for all that must be alike beside the namespace: a salt, an adapter.
    """

    def __init__(self, scheduler: SchedulerClient, chunk_tokens: int) -> None:
        self._scheduler, self._chunk_tokens = scheduler, chunk_tokens
        self._searching: dict[str, tuple[DaemonConnection, FindSegments, float]] = {}
        """By request: the connection, the message, and when it was sent (CLOCK_MONOTONIC)."""

    def index_chunks(
        self,
        space: bytes,
        digests: bytes,
        width: int,
        tokens: bytes,
        start: int = 0,
        predecessor: bytes = b"",
    ) -> bool:
        """Index chunks by their tokens (``messages.IndexChunks``). Returns whether all was sent.

        Does not wait. Only for chunks with exact KV, never for KV that depends on segments."""
        limits = self._limits()
        if limits is None:
            return False
        size = 4 * self._chunk_tokens
        step = min(limits.segment_chunks, max(1, limits.segment_tokens // self._chunk_tokens))
        for at in range(0, len(digests) // width, step):
            message = IndexChunks(
                space=space,
                digests=digests[at * width : (at + step) * width],
                width=width,
                tokens=tokens[at * size : (at + step) * size],
                start=start + at * self._chunk_tokens,
                predecessor=digests[(at - 1) * width : at * width] if at else predecessor,
            )
            if not (seq := self._scheduler.submit(message)):
                return False
            self._scheduler.discard(seq)
        return True

    def find_segments(
        self,
        request: str,
        space: bytes,
        tokens: bytes,
        width: int,
        first: int = 0,
        min_tokens: int = 0,
    ) -> Segments | Pending:
        """Find indexed chunks in a prompt (``messages.FindSegments``). ``PENDING``: ask again in a
        later step, and call ``abandon`` if the request ends before. Tokens beyond the daemon's
        limit (``Limits.segment_tokens``) are not searched."""
        if request not in self._searching:
            limits, connection = self._limits(), self._scheduler.connection
            if limits is None or connection is None:
                return Segments()
            message = FindSegments(space=space, tokens=tokens[: 4 * limits.segment_tokens])
            message.width, message.first, message.min_tokens = width, first, min_tokens
            if 4 * first >= len(message.tokens) or not self._scheduler.submit(message):
                return Segments()
            self._searching[request] = connection, message, time.monotonic()
        connection, message, asked_s = self._searching[request]
        reply = self._reply(connection, message.seq)
        if reply is None and time.monotonic() - asked_s < SEARCH_S:
            return PENDING
        self.abandon(request)
        if not isinstance(reply, Segments):
            return Segments()
        if not self._right(reply, message):
            self._scheduler.fault(connection, "segments of what was not asked for")
            return Segments()
        return reply

    def abandon(self, request: str) -> None:
        """Stop waiting for the answer to this request's search. Idempotent."""
        connection, message, _ = self._searching.pop(request, (None, None, 0.0))
        if message is not None and connection is self._scheduler.connection:
            self._scheduler.discard(message.seq)

    def _limits(self) -> Limits | None:
        """What the daemon allows; ``None``: it cannot be asked."""
        connection = self._scheduler.connection
        if connection is None or not self._scheduler.answering:
            return None
        return connection.welcome.limits

    def _reply(self, connection: DaemonConnection, seq: int) -> FromDaemon | None:
        """The reply to the search ``seq``; ``None``: not yet."""
        if connection is not self._scheduler.connection:
            return Segments()  # the search was lost with its connection
        try:
            reply = self._scheduler.wait_in_step(seq)
        except Unavailable:
            return Segments()
        if isinstance(reply, Error):
            self._scheduler.refused(reply)
        return reply

    def _right(self, reply: Segments, asked: FindSegments) -> bool:
        """Whether the segments fit the search: in range, in order, with all digests."""
        ends = [(s.new_start, s.new_start + s.length) for s in reply.segments]
        tokens = sum(s.length for s in reply.segments)
        return (
            all(s.length > 0 and s.length % self._chunk_tokens == 0 for s in reply.segments)
            and all(s.old_start >= 0 for s in reply.segments)
            and all(a[1] <= b[0] for a, b in pairwise([(0, asked.first), *ends]))
            and (not ends or ends[-1][1] * 4 <= len(asked.tokens))
            and len(reply.digests) == tokens // self._chunk_tokens * asked.width
        )
