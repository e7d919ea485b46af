"""The requests that are open on one connection, and the replies that nobody has fetched yet.

No socket, clock, lock or log. A table belongs to one ``DaemonConnection`` and ends with it.
"""

from __future__ import annotations

from typing import Final

from kvass import messages as m
from kvass.errors import RemoteError, Unavailable

MAX_UNANSWERED: Final = 256
"""The most open requests, without promoting ones. Further requests are not sent."""

REPLY_TO: Final[dict[type[m.FromClient], type[m.FromDaemon]]] = {
    m.Hello: m.Welcome,
    m.Register: m.Registered,
    m.Lookup: m.Matched,
    m.Prefetch: m.Prefetched,
    m.SetQuota: m.QuotaSet,
    m.IndexChunks: m.Indexed,
    m.FindSegments: m.Segments,
    m.Reserve: m.Granted,
    m.Ping: m.Pong,
    m.Clear: m.Cleared,
    m.ClearTenant: m.Cleared,
    m.EmptyTier: m.Cleared,
    m.EndSession: m.SessionEnded,
    m.AskSession: m.SessionIs,
    m.Removals: m.Removed,
    m.Present: m.Presence,
    m.Status: m.StatusReply,
    m.Explain: m.Explained,
}


class OpenRequests:
    def __init__(self) -> None:
        self.silent_since_s = 0.0
        """CLOCK_MONOTONIC since when an answer is overdue; 0: none is. Any message ends it."""
        self.promoting: set[int] = set()
        """Requests for which the daemon sent ``Promoting``: their reply may take long."""
        self.abandoned: set[int] = set()
        """Requests whose reply nobody will fetch."""
        self.under_way: set[int] = set()
        """Requests that a step is to carry to the daemon and has not (``steps.py``)."""
        self._expected: dict[int, type[m.FromDaemon]] = {}
        self._replies: dict[int, m.FromDaemon] = {}

    @property
    def room(self) -> bool:
        """Whether one more request may be sent. The daemon itself limits those ``promoting``."""
        return len(self._expected) - len(self.promoting) < MAX_UNANSWERED

    @property
    def owed(self) -> bool:
        """Whether a reply has still to arrive, also one that nobody will fetch."""
        return bool(self._expected)

    def add(self, seq: int, reply: type[m.FromDaemon]) -> None:
        self._expected[seq] = reply

    def answered(self, seq: int) -> bool:
        """Whether the reply to ``seq`` is here. Raises ``Unavailable`` if it cannot come."""
        if seq in self._replies:
            return True
        if seq not in self._expected:
            raise Unavailable("the connection was lost before the answer")
        return False

    def void(self) -> None:
        """Forget all requests and replies, because the connection is lost."""
        tables = self._expected, self._replies, self.promoting, self.abandoned, self.under_way
        for table in tables:
            table.clear()

    def fetch(self, seq: int) -> m.FromDaemon:
        """Remove and return the reply to ``seq``, which must be ``answered``."""
        return self._replies.pop(seq)

    def abandon(self, seq: int) -> m.FromDaemon | None:
        """Mark that nobody will fetch the reply to ``seq``. Returns it if it is already here."""
        if seq in self._expected:
            self.abandoned.add(seq)
        return self._replies.pop(seq, None)

    def arrived(self, message: m.FromDaemon) -> bool:
        """Keep a reply until it is fetched; False if nobody will fetch this one.

        Raises ``RemoteError`` for a message that nobody asked for.
        """
        self.silent_since_s = 0.0
        seq = message.seq
        if isinstance(message, m.Promoting) and seq in self._expected:
            self.promoting.add(seq)
            return True
        expected = self._expected.pop(seq, None)
        self.promoting.discard(seq)
        if expected is None and isinstance(message, m.Error):
            return False  # it refuses a one-way message
        if expected is None or not isinstance(message, (expected, m.Error)):
            raise RemoteError(f"a {type(message).__name__} nobody asked for")
        if seq in self.abandoned:
            self.abandoned.discard(seq)
            return False
        self._replies[seq] = message
        return True


def undo(reply: m.FromDaemon) -> list[m.OneWay]:
    """The messages that give back the lease or the reservations of ``reply``."""
    if isinstance(reply, m.Matched) and reply.lease:
        return [m.Release(boot=reply.boot, lease=reply.lease)]
    if isinstance(reply, m.Granted):
        numbers = [grant.reservation for grant in reply.grants if grant.reservation]
        return [m.Abort(boot=reply.boot, reservation=number) for number in numbers]
    return []
