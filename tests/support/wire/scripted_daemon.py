"""A scripted daemon on a real unix socket: slow, silent, hostile or restarted, as a test needs.

It decides nothing: ``answers`` says by message type what it answers. It keeps what it received.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self, TypeVar

from kvass.arena import memory
from kvass.errors import FrameError
from kvass.messages import (
    Clear,
    Cleared,
    FromClient,
    FromDaemon,
    Grant,
    Granted,
    Hello,
    Lookup,
    Matched,
    Ping,
    Pong,
    Register,
    Registered,
    Reserve,
    Status,
    StatusReply,
    Welcome,
)
from kvass.types import Slots
from kvass.wire import framing
from tests.support.waiting import eventually

ARENA_BYTES: Final = 1 << 20

M = TypeVar("M", bound=FromClient)
Answer = Callable[[FromClient], Sequence[FromDaemon | bytes]]
"""Bytes are sent as they are: a frame of another version."""


class ScriptedDaemon:
    """``with ScriptedDaemon(path) as daemon``. ``answers`` and ``welcome`` may change at any time.

    It reads nothing while ``reading`` is not set. ``eofs`` counts sessions that the client closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.boot = os.urandom(16)
        self.reading = threading.Event()
        self.reading.set()
        self.received: list[FromClient] = []
        self.eofs = 0
        self.welcome: Callable[[Welcome], Welcome] = lambda welcome: welcome
        self.answers: dict[type, Answer] = {
            Hello: self._greet,
            Register: lambda m: [Registered(seq=m.seq, namespace=b"n" * 32)],
            Ping: lambda m: [Pong(seq=m.seq)],
            Clear: lambda m: [Cleared(seq=m.seq)],
            Status: lambda m: [StatusReply(seq=m.seq, fields={"leases": 0})],
            Lookup: self.miss,
            Reserve: self.grant,
        }
        self._sessions: list[socket.socket] = []
        self._ids = iter(range(1, 1 << 30))
        self._arena = memory.create(ARENA_BYTES)

    def __enter__(self) -> Self:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._arena.close()

    def kill(self) -> None:
        """Close every socket without a word, as ``kill -9`` does."""
        Path(self.path).unlink(missing_ok=True)
        for sock in (self._listener, *self._sessions):
            try:
                sock.shutdown(socket.SHUT_RDWR)  # of the listener: its accept() returns
            except OSError:
                pass  # closed already
        self._listener.close()
        self._sessions.clear()
        self.reading.set()

    def restart(self) -> None:
        """Kill it and start it again with another boot id."""
        self.kill()
        self.boot = os.urandom(16)
        self.__enter__()

    def push(self, data: FromDaemon | bytes) -> None:
        """Send to every session, unasked."""
        frame = data if isinstance(data, bytes) else framing.encode(data)
        for session in list(self._sessions):
            session.sendall(frame)

    def half_close(self) -> None:
        """Send nothing more, and wait for the clients' EOF."""
        for session in self._sessions:
            session.shutdown(socket.SHUT_WR)

    def got(self, kind: type[M], count: int = 1) -> list[M]:
        """Wait for ``count`` messages of ``kind`` and return them; fails after ``WAIT_S``."""
        found: list[M] = []

        def enough() -> bool:
            found[:] = [m for m in self.received if isinstance(m, kind)]
            return len(found) >= count

        assert eventually(enough), f"{len(found)} of {count} {kind.__name__}"
        return found

    def miss(self, message: FromClient) -> list[FromDaemon]:
        """No row matches."""
        assert isinstance(message, Lookup)
        return [Matched(seq=message.seq, boot=self.boot, first=message.first, chunks=message.first)]

    def hit(self, message: FromClient, lease_s: float = 60.0) -> list[FromDaemon]:
        """Every row matches, under a new lease."""
        assert isinstance(message, Lookup)
        return [
            Matched(
                seq=message.seq,
                boot=self.boot,
                lease=next(self._ids),
                first=message.first,
                chunks=len(message.digests) // message.width,
                deadline_s=time.monotonic() + lease_s,
            )
        ]

    def grant(self, message: FromClient) -> list[FromDaemon]:
        """Every item is granted its first chunk, with empty slots for each group."""
        assert isinstance(message, Reserve)
        grants = [
            Grant(next(self._ids), (i.first,), (Slots(),) * i.groups.bit_count())
            for i in message.items
        ]
        return [Granted(seq=message.seq, boot=self.boot, grants=grants)]

    def _greet(self, message: FromClient) -> list[FromDaemon]:
        return [
            self.welcome(
                Welcome(
                    seq=message.seq,
                    boot=self.boot,
                    version="scripted",
                    clock_s=time.monotonic(),
                    arena_bytes=ARENA_BYTES,
                    populated_bytes=ARENA_BYTES // 2,
                )
            )
        ]

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                session, _ = listener.accept()
            except OSError:
                return  # killed
            self._sessions.append(session)
            threading.Thread(target=self._serve, args=(session,), daemon=True).start()

    def _serve(self, session: socket.socket) -> None:
        decoder = framing.from_clients()
        with session:
            try:
                while data := session.recv(1 << 16):
                    self.reading.wait()
                    for message in decoder.feed(data):
                        self.received.append(message)
                        self._answer(session, message)
                self.eofs += session in self._sessions
            except (OSError, FrameError):
                pass  # the daemon or the client was killed
        if session in self._sessions:
            self._sessions.remove(session)

    def _answer(self, session: socket.socket, message: FromClient) -> None:
        answer = self.answers.get(type(message))
        for reply in answer(message) if answer is not None else ():
            frame = reply if isinstance(reply, bytes) else framing.encode(reply)
            welcome = b"\xa1t\xa7welcome" in frame
            if welcome and isinstance(message, Hello) and message.wants_arena:
                sent = socket.send_fds(session, [frame], [self._arena.fileno()])
                frame = frame[sent:]
            session.sendall(frame)
