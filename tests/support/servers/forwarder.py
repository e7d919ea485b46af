"""One address behind which servers take turns, as a failover or a balancer has it."""

from __future__ import annotations

import select
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
        self._living: dict[threading.Thread, socket.socket] = {}
        self._starting = threading.Lock()
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def cut(self) -> None:
        """End the connections that live."""
        with self._starting:
            living = list(self._living.items())
        for thread, client in living:
            _shut(client)
            thread.join()

    def close(self) -> None:
        _shut(self._listener)
        self._accepting.join()
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was shut
            while True:
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(client,))
                with self._starting:
                    self._living[thread] = client
                    thread.start()

    def _serve(self, client: socket.socket) -> None:
        family = socket.AF_UNIX if isinstance(self.target, str) else socket.AF_INET
        with client, socket.socket(family) as server, suppress(OSError):
            server.connect(self.target)
            other = {client: server, server: client}
            data = b"something"
            while data:
                for end in select.select([*other], [], [])[0]:
                    data = end.recv(1 << 16)
                    other[end].sendall(data)
        del self._living[threading.current_thread()]


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
