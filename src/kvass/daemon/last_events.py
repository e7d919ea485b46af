"""The last events of the core, for a report of its failure.

Laws of this file: nothing is formatted before the core has failed. The report contains hashes of
chunks, but no tokens of prompts (``core/event_lines.py``) and no secret seed. If the report cannot
be written, the failure itself is still reported.
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
    """A ring buffer of the last ``EVENTS`` events, with their times. ``config`` is the core's."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._kept = deque[tuple[float, Event, int]]()
        self._bytes = self._dropped = 0

    def add(self, now: float, event: Event, size: int) -> None:
        """Record an event that is about to be handled. ``size``: bytes of its frame, 0 if it had
        none."""
        self._kept.append((now, event, size))
        self._bytes += size
        while len(self._kept) > EVENTS or (self._bytes > BYTES and len(self._kept) > 1):
            self._bytes -= self._kept.popleft()[2]
            self._dropped += 1

    def write(self, path: str, error: Exception) -> None:
        """Write the report of ``error``, which the core raised at the last event.

        The report replaces an older one, and only its owner can read it. Its first line has the
        core's configuration, ``dropped`` (the number of earlier events that it lacks) and the
        traceback. Each other line is an event.
        """
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
