"""One connection to the daemon, and the thread that keeps it.

Laws of this file:

- No call outlasts its bound, whether the daemon is absent, suspended, restarting or hostile.
- The caller reads its own replies; the keeper thread connects, registers, watches for hang-up and
  writes what the socket would not take at once. It reads only while nobody can be waiting.
- A reply nobody waits for any more is settled here: a late match is released, a late grant aborted.
- A socket is closed only when nobody uses the arena that came through it (law 3: EOF is the proof).
- Sockets belong to the process that opened them; a forked child drops its copies and opens its own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvass.messages import FromDaemon, OneWay, Register, Request, Welcome


class Client:
    """A connection that comes and goes by itself. Thread-safe. Never blocks to construct.

    ``registration``: sent after every (re)connect; a client without one can only look.
    """

    counters: Counter[str]
    """What happened, by name; each kind of failure is also logged once."""

    def __init__(
        self, socket: str, registration: Register | None = None, *, wants_arena: bool = False
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Begin connecting in the background, in this process. Never blocks. Every call does it."""
        raise NotImplementedError

    @property
    def connected(self) -> bool:
        """Whether a daemon has welcomed and registered us and has not hung up."""
        raise NotImplementedError

    def connect(self, timeout_s: float) -> Welcome:
        """Wait for a connection. Raises ``Unavailable``, ``Incompatible`` or ``Refused``, at once
        when an attempt made after this call began failed."""
        raise NotImplementedError

    def call(self, message: Request, timeout_s: float) -> FromDaemon:
        """Send and wait for the reply, connecting first if need be.

        Raises ``Unavailable`` (``TimedOut``) or ``Refused``.
        """
        raise NotImplementedError

    def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The fields of ``kvass status``. Raises as ``call``."""
        raise NotImplementedError

    def clear(
        self, namespace: bytes = b"", *, everything: bool = False, timeout_s: float = 5.0
    ) -> int:
        """Forget rows; returns how many stopped matching. Raises as ``call``."""
        raise NotImplementedError

    def submit(self, message: Request) -> int:
        """Send a request without waiting: its ``seq``, or 0: no connection or no room."""
        raise NotImplementedError

    def wait(self, seq: int, timeout_s: float) -> FromDaemon | None:
        """The reply to ``seq``; None if it is not here in time (0 polls). Then ask again or
        ``discard`` it. Raises ``Unavailable`` if its connection is gone."""
        raise NotImplementedError

    def discard(self, seq: int) -> None:
        """Nobody will wait for ``seq`` any more: its reply is settled when it comes."""
        raise NotImplementedError

    def post(self, message: OneWay) -> bool:
        """Queue a one-way message; False if its boot is not the one we are connected to."""
        raise NotImplementedError

    def close(self) -> None:
        """End the connection, so that the daemon sees EOF. Only after copies drained."""
        raise NotImplementedError
