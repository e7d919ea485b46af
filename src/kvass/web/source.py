"""What the web pages show: the daemon's status, asked for at most once a second, and its history.

Law of this file: memory is bounded. The history is ``SAMPLES`` samples of fixed fields.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Final

from kvass.client.client import Client
from kvass.errors import KvassError

FRESH_S: Final = 1.0
"""A status so old is asked for again."""
ANSWER_S: Final = 2.0
"""A daemon that does not answer in this time is down."""
SAMPLE_S: Final = 10.0
SAMPLES: Final = 1440  # four hours

_COUNTED: Final = ("lookups", "lookup_chunks", "hit_chunks", "promoted_chunks", "chunks_granted")
_GAUGED: Final = ("l1_used_bytes", "l1_capacity_bytes", "rows", "instances", "leases")
COLUMNS: Final = ("time_s", *_COUNTED, *_GAUGED)


class Source:
    """The daemon at ``socket``, as it was a moment ago. Thread-safe."""

    def __init__(self, socket: str) -> None:
        self.client = Client(socket)
        self._lock = threading.Lock()
        self._fields: dict[str, Any] | None = None
        self._trouble = "not asked yet"
        self._asked_s = -FRESH_S
        self._history: deque[tuple[float, ...]] = deque(maxlen=SAMPLES)

    def status(self) -> tuple[dict[str, Any] | None, str]:
        """The fields of ``kvass status``, or ``None`` and why the daemon gave none."""
        with self._lock:
            if time.monotonic() - self._asked_s >= FRESH_S:
                try:
                    self._fields, self._trouble = self.client.status(ANSWER_S), ""
                except KvassError as error:
                    self._fields, self._trouble = None, str(error)
                self._asked_s = time.monotonic()
            return self._fields, self._trouble

    def sample(self) -> None:
        """Add a sample to the history, unless the daemon is down."""
        fields, _ = self.status()
        if fields is None:
            return
        counted = (fields["counters"].get(name, 0) for name in _COUNTED)
        gauged = (fields.get(name, 0) for name in _GAUGED)
        self._history.append((round(time.time(), 1), *counted, *gauged))

    def sample_for_ever(self) -> None:
        """A thread's whole work."""
        while True:
            self.sample()
            time.sleep(SAMPLE_S)

    def history(self) -> dict[str, Any]:
        """JSON-able: the ``columns`` and the samples, oldest first. Counters begin again at 0 when
        the daemon does."""
        return {"columns": COLUMNS, "samples": list(self._history)}
