"""One address behind which servers take turns, as a failover or a balancer has it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

Address = str | tuple[str, int]
"""The path of a unix socket, or host and port."""


class Forwarder:
    """Forwards new connections to ``target``, which may be replaced. A connection that lives stays
    with the server that it began with. ``port``: on 127.0.0.1."""

    def __init__(self, target: Address) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self._ends: list[socket.socket] = []

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                self._ends.append(client)
                try:
                    self._ends.append(server := _connected(self.target))
                except OSError:
                    client.close()
                    continue
                for pair in ((client, server), (server, client)):
                    self._threads.append(threading.Thread(target=_forward, args=pair))
                    self._threads[-1].start()

    def close(self) -> None:
        """End all connections."""
        for end in (self._listener, *self._ends):
            _shut(end)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()


def _connected(target: Address) -> socket.socket:
    family = socket.AF_UNIX if isinstance(target, str) else socket.AF_INET
    made = socket.socket(family)
    try:
        made.connect(target)
    except OSError:
        made.close()
        raise
    return made


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):  # the other thread notices
        _shut(end)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
