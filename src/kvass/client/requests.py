"""The requests that are open on one connection, and the replies that nobody has fetched yet.

No socket, clock, lock or log here. A table belongs to one ``DaemonSession``, so what was asked
through a lost connection is gone with it.
"""

from __future__ import annotations

from typing import Final

from kvass import messages as m
from kvass.errors import RemoteError, Unavailable

MAX_UNANSWERED: Final = 256
"""Open requests that a daemon answers at once; one that answers none gets no more of them."""
MAX_LATE: Final = 4096
"""Open requests whose answer may take its time."""

REPLY_TO: Final[dict[type[m.Message], type[m.FromDaemon]]] = {
    m.Hello: m.Welcome,
    m.Register: m.Registered,
    m.Lookup: m.Matched,
    m.Prefetch: m.Prefetched,
    m.Reserve: m.Granted,
    m.Ping: m.Pong,
    m.Clear: m.Cleared,
    m.Status: m.StatusReply,
}


class OpenRequests:
    """What was asked on one connection, by ``seq``."""

    def __init__(self) -> None:
        self.silent_since_s = 0.0
        """CLOCK_MONOTONIC since when the daemon owes an answer that came to be overdue; 0: it does
        not. Any message of the daemon ends it."""
        self.late: set[int] = set()
        """What is answered in its own time: a tier is at work on it."""
        self.abandoned: set[int] = set()
        """What nobody will fetch the reply to."""
        self._expected: dict[int, type[m.FromDaemon]] = {}
        self._replies: dict[int, m.FromDaemon] = {}

    def room(self, late: bool) -> bool:
        """Whether one more may be sent; ``late``: one whose answer may take its time."""
        if late:
            return len(self.late) < MAX_LATE
        return len(self._expected) - len(self.late) < MAX_UNANSWERED

    def add(self, seq: int, reply: type[m.FromDaemon], late: bool = False) -> None:
        """A request was sent."""
        self._expected[seq] = reply
        if late:
            self.late.add(seq)

    def answered(self, seq: int) -> bool:
        """Whether the reply to ``seq`` is here. Raises ``Unavailable`` if it cannot come."""
        if seq in self._replies:
            return True
        if seq not in self._expected:
            raise Unavailable("the connection was lost before the answer")
        return False

    def void(self) -> None:
        """The connection is lost: nothing that was asked will be answered."""
        self._expected.clear()
        self.late.clear()
        self.abandoned.clear()
        self._replies.clear()

    def fetch(self, seq: int) -> m.FromDaemon:
        """The reply to a ``seq`` that is ``answered``; once."""
        return self._replies.pop(seq)

    def abandon(self, seq: int) -> m.FromDaemon | None:
        """Nobody will fetch the reply to ``seq``: the reply, if it is here already."""
        if seq in self._expected:
            self.abandoned.add(seq)
        return self._replies.pop(seq, None)

    def arrived(self, message: m.FromDaemon) -> bool:
        """Keep a reply until it is fetched; False if nobody will fetch this one.

        Raises ``RemoteError`` for a message that nobody asked for.
        """
        self.silent_since_s = 0.0
        if isinstance(message, m.Promoting) and message.seq in self._expected:
            self.late.add(message.seq)
            return True
        expected = self._expected.pop(message.seq, None)
        self.late.discard(message.seq)
        if expected is None and isinstance(message, m.Error):
            return False  # it refuses a one-way message
        if expected is None or not isinstance(message, (expected, m.Error)):
            raise RemoteError(f"a {type(message).__name__} nobody asked for")
        if message.seq in self.abandoned:
            self.abandoned.discard(message.seq)
            return False
        self._replies[message.seq] = message
        return True


def undo(reply: m.FromDaemon) -> list[m.OneWay]:
    """What gives back the lease or the reservations of a reply that nobody waits for."""
    if isinstance(reply, m.Matched) and reply.lease:
        return [m.Release(boot=reply.boot, lease=reply.lease)]
    if isinstance(reply, m.Granted):
        numbers = [grant.reservation for grant in reply.grants if grant.reservation]
        return [m.Abort(boot=reply.boot, reservation=number) for number in numbers]
    return []
