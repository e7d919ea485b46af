"""A session with a real daemon, message by message or byte by byte."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from kvass.errors import Unavailable
from kvass.messages import (
    AnyMessage,
    FromDaemon,
    Granted,
    Hello,
    Lookup,
    Matched,
    Promoting,
    Register,
    Registered,
    Reserve,
    ReserveItem,
    Welcome,
)
from kvass.types import SCHEDULER, GroupLayout, RankLayout
from kvass.wire.channel import Channel

WAIT_S = 20.0
CHUNK_TOKENS = 16
WIDTH = 8
LAYOUT = RankLayout((GroupLayout("full", CHUNK_TOKENS, ("layer",), (4096,)),))
"""One row is one page."""

R = TypeVar("R", bound=AnyMessage)


def keys(names: str) -> bytes:
    """One digest per letter."""
    return b"".join(name.encode() * WIDTH for name in names)


class RawSession:
    """A connection to the daemon at ``path``; nothing was sent yet."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)
        self.sock.setblocking(False)
        self.channel = Channel(self.sock)
        self.welcome = Welcome()
        self._seqs = itertools.count(1)
        self._queue: list[FromDaemon] = []

    def greet(self, **fields: Any) -> Self:
        """Send ``Hello`` and wait for ``Welcome``."""
        hello = Hello(**{"client": "test", "clock_s": time.monotonic(), **fields})
        self.welcome = self.ask(hello, Welcome)
        return self

    def register(self, instance: str = "engine", rank: int = 0, **fields: Any) -> Registered:
        """Register a rank (with ``LAYOUT``) or, with rank -1, a scheduler."""
        terms = {
            "instance": instance,
            "identity": {"model": "m"},
            "chunk_tokens": CHUNK_TOKENS,
            "rank": rank,
            "layout": None if rank < 0 else LAYOUT,
            **fields,
        }
        return self.ask(Register(**terms), Registered)

    def reserve(self, names: str) -> Granted:
        """Reserve the rows of ``keys(names)``."""
        return self.ask(Reserve(items=[ReserveItem("r", keys(names))], width=WIDTH), Granted)

    def lookup(self, names: str) -> Matched:
        """Look up the rows of ``keys(names)``."""
        return self.ask(Lookup(request="q", digests=keys(names), width=WIDTH), Matched)

    def ask(self, message: AnyMessage, answer: type[R]) -> R:
        """Send a request; returns its reply, which must be an ``answer``. A ``Promoting`` may come
        before it."""
        message.seq = next(self._seqs)
        self.channel.send(message)
        while True:
            reply = self.next()
            if reply.seq == message.seq and not isinstance(reply, Promoting):
                assert isinstance(reply, answer), reply
                return reply

    def raw(self, data: bytes) -> None:
        """Send any bytes."""
        self.sock.setblocking(True)
        self.sock.sendall(data)
        self.sock.setblocking(False)

    def next(self, kind: type[R] | None = None) -> Any:
        """The next message, or the next of one kind. Raises ``Unavailable`` at EOF."""
        while True:
            message = self._next()
            if kind is None or isinstance(message, kind):
                return message

    def rest(self) -> list[FromDaemon]:
        """All messages until EOF."""
        got: list[FromDaemon] = []
        while True:
            try:
                got.append(self._next())
            except Unavailable:
                return got

    def take_arena(self) -> int:
        """The arena's descriptor, which the caller closes."""
        fd = self.channel.take_fd()
        assert fd is not None
        return fd

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> FromDaemon:
        if not self._queue:
            self._queue += self.channel.receive(WAIT_S)
            assert self._queue, "the daemon says nothing"
        return self._queue.pop(0)


@contextmanager
def engine(path: str, instance: str = "engine") -> Iterator[tuple[RawSession, RawSession]]:
    """The scheduler and the only worker of a registered instance."""
    with RawSession(path).greet() as scheduler, RawSession(path).greet(wants_arena=True) as worker:
        worker.register(instance, 0)
        scheduler.register(instance, SCHEDULER)
        yield scheduler, worker
