"""A daemon whose messages are sent late.

``python -m tests.support.wire.delayed_daemon 0.005 serve ...`` sends every message 5 ms late. It
reads and does everything at once and in order.
"""

from __future__ import annotations

import sys

from kvass.cli.main import main
from kvass.daemon.connection import Connection


def delay(seconds: float) -> None:
    """Make all connections of this process send so much later."""
    queue, flush = Connection.queue, Connection.flush

    def send(self: Connection, frame: bytes, fd: int | None) -> None:
        queue(self, frame, fd)
        flush(self)

    def queue_late(self: Connection, frame: bytes, fd: int | None = None) -> None:
        self._loop.call_later(seconds, send, self, frame, fd)

    Connection.queue = queue_late  # type: ignore[method-assign]


if __name__ == "__main__":
    delay(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
