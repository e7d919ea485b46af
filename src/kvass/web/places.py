"""The places for open connections: who has one, and who must give one up.

Laws of this file:

- There are at most ``CONNECTIONS``; ``KEPT`` of them are for peers on this machine.
- If there is none for a new connection, one that showed no token ends: the oldest of the peer
  address that has most of them. So nobody keeps the others out by holding connections open.
- A request may take ``DEADLINE_S`` to arrive, however slowly it is sent.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

CONNECTIONS: Final = 64
KEPT: Final = 4
DEADLINE_S: Final = 10.0
_END_S: Final = 0.1
"""How long a new connection waits for the end of the one whose place it gets."""


@dataclass(eq=False)
class Place:
    """``connection``: the socket, or the TLS socket around it. ``trusted``: its request was allowed
    what only some are. ``ending``: it was hung up on."""

    connection: socket.socket
    host: str
    since_s: float = field(default_factory=time.monotonic)
    trusted: bool = False
    ending: bool = False

    @property
    def local(self) -> bool:
        """Whether the peer is on this machine."""
        return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback

    def hang_up(self, how: int) -> None:
        """``how``: as in ``socket.shutdown``."""
        self.ending = True
        try:
            # An SSLSocket's own method would send what may still go out in plain text.
            socket.socket.shutdown(self.connection, how)
        except OSError:
            pass  # it is gone already


class Places:
    """All of them. Thread-safe; ``take`` and ``end_late`` are for one thread."""

    def __init__(self) -> None:
        self._open: set[Place] = set()
        self._changed = threading.Condition()

    def take(self, connection: socket.socket, address: Any) -> Place | None:
        """A place for a new connection; None: there is none. Waits ``_END_S`` at most."""
        place = Place(connection, address[0])
        with self._changed:
            if not self._room(place):
                rivals = self._rivals(place)
                if not rivals:
                    return None
                of = Counter(rival.host for rival in rivals)
                max(rivals, key=lambda p: (of[p.host], -p.since_s)).hang_up(socket.SHUT_RDWR)
                if not self._changed.wait_for(lambda: self._room(place), _END_S):
                    return None
            self._open.add(place)
        return place

    def _room(self, place: Place) -> bool:
        others = sum(not p.local for p in self._open)
        return len(self._open) < CONNECTIONS and (place.local or others < CONNECTIONS - KEPT)

    def _rivals(self, place: Place) -> list[Place]:
        return [
            p for p in self._open if not (p.trusted or p.ending) and (place.local or not p.local)
        ]

    def leave(self, place: Place) -> None:
        """The connection is closed."""
        with self._changed:
            self._open.discard(place)
            self._changed.notify()

    def end_late(self) -> None:
        """Receive no more of what did not arrive in time. An answer may still go out."""
        latest_s = time.monotonic() - DEADLINE_S
        with self._changed:
            for place in self._open:
                if place.since_s < latest_s and not place.ending:
                    place.hang_up(socket.SHUT_RD)
