"""The log of the daemon and of its processes: lines on stderr.

Laws of this file:

- No thread waits for the reader of the log. A thread writes queued lines. If the reader is stuck,
  the queue fills up and further lines are dropped.
- A secret that this process has seen is in no line, whoever wrote it.
- Each log call (file and line) may write ``BURST`` lines in ``WINDOW_S`` seconds. The next line of
  the same call says how many were left out.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import threading
from datetime import UTC, datetime
from typing import Final

from kvass.tiers.url import without_seen

MAX_LINES: Final = 1000
"""Size of the queue of lines for the reader of the log."""
BURST: Final = 50
WINDOW_S: Final = 10.0
_END_S: Final = 2.0
"""Seconds that the process waits for the reader before it exits."""
_STDERR: Final = 2
_kvass: Final = logging.getLogger("kvass")


def start_logging(level: str, log_format: str) -> None:
    """Log to stderr: records of kvass at ``level`` or above, and warnings of other libraries, whose
    lower levels may contain secrets. ``log_format``: ``text`` or ``json``."""
    handler = _Writer()
    handler.setFormatter(_Json() if log_format == "json" else _Text())
    handler.addFilter(_Limit())
    logging.getLogger().addHandler(handler)
    set_level(level)


def set_level(level: str) -> None:
    """Set the level: ``debug``, ``info``, ``warning`` or ``error``."""
    _kvass.setLevel(level.upper())


def level() -> str:
    """Return the current level, as ``set_level`` takes it."""
    return logging.getLevelName(_kvass.getEffectiveLevel()).lower()


class _Writer(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = without_seen(record.getMessage()), ()
        self._put(without_seen(self.format(record)) + "\n")  # with the text of an exception

    def close(self) -> None:
        """Called by ``logging`` when the process ends."""
        self._put(None)
        self._thread.join(_END_S)
        super().close()

    def _put(self, line: str | None) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:  # the reader of our stderr is stuck
            pass

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            left = line.encode(errors="backslashreplace")  # file names may be invalid UTF-8
            try:
                while left:  # not through sys.stderr: its lock could block the exit of the process
                    left = left[os.write(_STDERR, left) :]
            except OSError:  # the reader has closed it
                pass


class _Limit(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}
        """For each log call (file, line): start of its window, and the number of lines since."""

    def filter(self, record: logging.LogRecord) -> bool:
        place = record.pathname, record.lineno
        began, count = self._windows.get(place, (record.created, 0))
        if not 0 <= record.created - began < WINDOW_S:
            if count > BURST:
                record.msg = f"{record.getMessage()} ({count - BURST} such lines were left out)"
                record.args = ()
            began, count = record.created, 0
        self._windows[place] = began, count + 1
        return count < BURST or record.levelno >= logging.CRITICAL


class _Text(logging.Formatter):
    """Formats a record as text. It escapes control characters, because the text may contain names
    that peers chose: those can neither start a new line nor move the cursor."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s kvass %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        when = datetime.fromtimestamp(record.created, UTC)
        return when.strftime(f"%Y-%m-%dT%H:%M:%S.{when.microsecond // 1000:03}Z")

    def format(self, record: logging.LogRecord) -> str:
        plain = re.sub(
            r"[^\n\x20-\x7e\xa0-\uffff]", lambda c: ascii(c[0])[1:-1], super().format(record)
        )
        return plain.replace("\n", "\n  ")


class _Json(_Text):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)
