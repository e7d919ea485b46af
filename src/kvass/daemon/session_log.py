"""Log lines about sessions: who registered, who left, what was refused and why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from kvass.core.clients.registry import model_of
from kvass.core.effects import SessionId
from kvass.messages import Cleared, Error, FromDaemon, Register, Registered
from kvass.types import L1_OF_CACHES, SCHEDULER, Size
from kvass.wire.channel import PeerCredentials

LOGGED: Final = frozenset({Cleared, Error, Registered})
"""The replies that are logged."""
_log: Final = logging.getLogger("kvass")


class SessionLog:
    """Writes the log lines about sessions. It remembers the pid, uid and engine of each live one.

    A session that does not register (``kvass status``, a health check) is logged at ``debug``.
    ``caches`` returns the size of the engines' own KV caches together. An engine whose registration
    makes that more than L1, of ``l1_bytes``, is fit for is warned of once.
    """

    def __init__(self, caches: Callable[[], int], l1_bytes: int) -> None:
        self._caches, self._l1_bytes = caches, l1_bytes
        self._who: dict[SessionId, dict[str, Any]] = {}

    def opened(self, session: SessionId, peer: PeerCredentials) -> None:
        """Log that ``peer`` connected."""
        self._who[session] = {"session": session, "pid": peer.pid, "uid": peer.uid}
        self._write(logging.DEBUG, session, "connected")

    def replied(self, session: SessionId, reply: FromDaemon, register: Register | None) -> None:
        """Log a reply whose type is in ``LOGGED``. ``register``: the message with which the session
        has registered, if it has."""
        who = self._who.get(session)
        if who is None:
            return
        if isinstance(reply, Error):
            end = ", and its session ends" if reply.fatal else ""
            self._write(logging.INFO, session, f"refused: {reply.code}: {reply.text}{end}")
        elif isinstance(reply, Cleared):
            self._write(logging.INFO, session, f"cleared {reply.rows} rows")
        elif isinstance(reply, Registered) and register is not None:
            model = model_of(register)
            known = {"engine": register.instance, "rank": register.rank, "model": model}
            known["namespace"] = reply.namespace.hex()[:8]
            if known.items() <= who.items():  # clients register repeatedly while ranks are missing
                return
            who |= known
            waits = f"waits for ranks {', '.join(map(str, reply.missing[:8]))}"
            state = waits if reply.missing else f"namespace {known['namespace']}"
            named = f"model {model}, " if model else ""
            self._write(logging.INFO, session, f"registered, {named}{state}")
            if register.rank == SCHEDULER and not reply.missing:
                self._warn_of_small_l1(session)

    def _warn_of_small_l1(self, session: SessionId) -> None:
        least = L1_OF_CACHES * self._caches()
        if least <= self._l1_bytes:
            return
        caches = Size(least // L1_OF_CACHES).rounded()
        self._write(
            logging.WARNING,
            session,
            f"L1 of {Size(self._l1_bytes).rounded()} is less than twice the engines' own KV caches "
            f"together ({caches}): it holds little that they do not hold too, so it hits seldom; "
            f"give --l1-size {Size(least).rounded()} or more (docs/sizing.md)",
        )

    def lost(self, session: SessionId) -> None:
        """Log that a session has ended, and forget it."""
        if session in self._who:
            engine = "engine" in self._who[session]
            self._write(logging.INFO if engine else logging.DEBUG, session, "disconnected")
            del self._who[session]

    def _write(self, level: int, session: SessionId, text: str) -> None:
        if not _log.isEnabledFor(level):
            return
        who = self._who[session]
        name = f"pid {who['pid']} uid {who['uid']}"
        if "engine" in who:
            rank = "scheduler" if who["rank"] == SCHEDULER else f"rank {who['rank']}"
            name = f"engine {who['engine']} {rank} ({name})"
        _log.log(level, "%s %s", name, text, extra={"fields": who}, stacklevel=2)
