"""The last events of the core, for a report of its failure.

Laws of this file: nothing is formatted before the core has failed. What is written holds no tokens
of prompts (``core/event_lines.py``) and not the secret seed; of chunks it holds hashes. A file that
cannot be written hides no failure.
"""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections import deque
from contextlib import suppress
from typing import Final

import msgspec

from kvass.core.effects import Event
from kvass.core.event_lines import line
from kvass.core.state import CoreConfig

EVENTS: Final = 200
BYTES: Final = 16 << 20
"""Of frames whose messages are kept: then the oldest go sooner. The last event always stays."""
_log: Final = logging.getLogger("kvass")


class LastEvents:
    """At most ``EVENTS``, with their times. ``config``: that of the core."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._kept = deque[tuple[float, Event, int]]()
        self._bytes = self._dropped = 0

    def add(self, now: float, event: Event, size: int) -> None:
        """``event`` is about to be handled; it came in a frame of ``size`` bytes, or 0."""
        self._kept.append((now, event, size))
        self._bytes += size
        while len(self._kept) > EVENTS or (self._bytes > BYTES and len(self._kept) > 1):
            self._bytes -= self._kept.popleft()[2]
            self._dropped += 1

    def write(self, path: str, error: Exception) -> None:
        """The core has failed with ``error`` at the last event: a file, in place of an older one,
        for its owner alone. Its first line has what the core began with, ``dropped``, which is how
        many events are not in it, and the traceback; each other line is an event."""
        told = "".join(traceback.format_exception(error, limit=-20))[-16_384:]
        config = msgspec.to_builtins(msgspec.structs.replace(self._config, seed=b""))
        head = {"config": config, "dropped": self._dropped, "traceback": told}
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(json.dumps(head) + "\n")
                file.writelines(line(now, event) + "\n" for now, event, _ in self._kept)
        except OSError as failed:
            _log.error("%s, for the last events: %s", path, failed.strerror)
            return
        _log.critical("the last %d events are in %s: send it with the bug", len(self._kept), path)
