"""Log lines about connections: who registered, who left, what was refused and why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from kvass.core.clients.registry import model_of
from kvass.core.effects import ConnectionId
from kvass.messages import Cleared, Error, FromDaemon, Register, Registered
from kvass.types import SCHEDULER
from kvass.wire.channel import PeerCredentials

LOGGED: Final = frozenset({Cleared, Error, Registered})
"""The replies that are logged."""
_log: Final = logging.getLogger("kvass")


class ConnectionLog:
    """Writes the log lines about connections. It remembers the pid, uid and engine of each.

    A connection that does not register (``kvass status``, a health check) is logged at ``debug``.
    ``small_l1`` returns the advice if L1 is too small for the engines that have registered. It is
    logged at each engine's registration; ``kvass status`` has it, too.
    """

    def __init__(self, small_l1: Callable[[], str]) -> None:
        self._small_l1 = small_l1
        self._who: dict[ConnectionId, dict[str, Any]] = {}

    def opened(self, number: ConnectionId, peer: PeerCredentials) -> None:
        self._who[number] = {"session": number, "pid": peer.pid, "uid": peer.uid}
        self._write(logging.DEBUG, number, "connected")

    def replied(self, number: ConnectionId, reply: FromDaemon, register: Register | None) -> None:
        """Log a reply whose type is in ``LOGGED``. ``register``: the message with which it has
        registered, if it has."""
        who = self._who.get(number)
        if who is None:
            return
        if isinstance(reply, Error):
            end = ", and its session ends" if reply.fatal else ""
            self._write(logging.INFO, number, f"refused: {reply.code}: {reply.text}{end}")
        elif isinstance(reply, Cleared):
            self._write(logging.INFO, number, f"cleared {reply.rows} rows")
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
            self._write(logging.INFO, number, f"registered, {named}{state}")
            if register.rank == SCHEDULER and not reply.missing and (text := self._small_l1()):
                self._write(logging.WARNING, number, text)

    def lost(self, number: ConnectionId) -> None:
        """Log that a connection has ended, and forget it."""
        if number in self._who:
            engine = "engine" in self._who[number]
            self._write(logging.INFO if engine else logging.DEBUG, number, "disconnected")
            del self._who[number]

    def _write(self, level: int, number: ConnectionId, text: str) -> None:
        if not _log.isEnabledFor(level):
            return
        who = self._who[number]
        name = f"pid {who['pid']} uid {who['uid']}"
        if "engine" in who:
            rank = "scheduler" if who["rank"] == SCHEDULER else f"rank {who['rank']}"
            name = f"engine {who['engine']} {rank} ({name})"
        _log.log(level, "%s %s", name, text, extra={"fields": who}, stacklevel=2)
