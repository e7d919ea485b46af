"""A process that keeps a daemon's tier busy in both directions, while another one measures.

Law of this file: it costs the machine next to nothing itself. Rows are committed as they lie, and
nothing promoted is looked at. It runs until it is ended, or has stored all that it may.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import msgspec

from bench.rows import Rows, tier_status
from kvass.cli.bench.rig import WIDTH, fresh_name
from kvass.errors import KvassError

QUEUE_BYTES: Final = 256 << 20
"""The flush queue is kept about so long."""
_LOOK_S: Final = 0.03


class Flood(msgspec.Struct, frozen=True):
    """What to do: promote ``keys`` of ``cold`` over and over; store up to ``store_bytes``."""

    socket: str
    cold: str
    keys: list[bytes]
    row_bytes: int
    store_bytes: int
    queue_bytes: int = QUEUE_BYTES


def run(todo: Flood) -> None:
    """Do it. Raises ``KvassError`` for what either direction meets."""
    most = max(1, todo.queue_bytes // 2 // todo.row_bytes)
    trouble: list[KvassError] = []
    with ExitStack() as ending:
        cold = Rows(todo.socket, todo.cold, todo.row_bytes, ending)
        rows = Rows(todo.socket, fresh_name(), todo.row_bytes, ending)
        threading.Thread(target=_promote, args=(cold, todo.keys, trouble), daemon=True).start()
        for _ in range(0, todo.store_bytes, most * todo.row_bytes):
            rows.store([os.urandom(WIDTH) for _ in range(most)], write=False)
            _wait(rows, most, trouble)
        _wait(rows, 0, trouble)


def _wait(rows: Rows, most: int, trouble: list[KvassError]) -> None:
    """Until no more than ``most`` rows wait for the tier."""
    while tier_status(rows.scheduler)["flush_queue_rows"] > most:
        if trouble:
            raise trouble[0]
        time.sleep(_LOOK_S)


def _promote(rows: Rows, keys: Sequence[bytes], trouble: list[KvassError]) -> None:
    try:
        while True:
            rows.release(rows.find(keys))
    except KvassError as error:
        trouble.append(error)


def main(arguments: Sequence[str]) -> int:
    """``arguments``: one, a ``Flood`` as JSON."""
    try:
        run(msgspec.json.decode(arguments[0], type=Flood))
    except KvassError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
