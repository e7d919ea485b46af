"""The last events of the core, which are written to a file when the core fails.

Laws of this file: nothing is formatted before the core has failed. The file contains hashes of
chunks, but neither tokens of prompts (``core/event_lines.py``) nor the secret seed. If the file
cannot be written, the failure of the core is raised all the same.
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

MAX_EVENTS: Final = 200
MAX_FRAME_BYTES: Final = 16 << 20
"""Limit of the bytes of all frames in which the kept events came. Above it the oldest events are
dropped. The last event is always kept."""
_log: Final = logging.getLogger("kvass")


class LastEvents:
    """Keeps the last ``MAX_EVENTS`` events of the core and their times. ``config`` is the
    configuration of the core."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._kept = deque[tuple[float, Event, int]]()
        self._bytes = self._dropped = 0

    def add(self, now: float, event: Event, size: int) -> None:
        """Keep ``event``, which the core is about to handle. ``size``: bytes of its frame, or 0."""
        self._kept.append((now, event, size))
        self._bytes += size
        while len(self._kept) > MAX_EVENTS or (
            self._bytes > MAX_FRAME_BYTES and len(self._kept) > 1
        ):
            self._bytes -= self._kept.popleft()[2]
            self._dropped += 1

    def write(self, path: str, error: Exception) -> None:
        """Write the kept events to ``path`` after the core has failed with ``error``.

        An existing file is replaced. Only the owner can read it (mode 0600). The first line has the
        core's configuration, the number of events that were dropped, and the traceback. Each other
        line is an event.
        """
        trace = "".join(traceback.format_exception(error, limit=-20))[-16_384:]
        config = msgspec.to_builtins(msgspec.structs.replace(self._config, seed=b""))
        head = {"config": config, "dropped": self._dropped, "traceback": trace}
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
