"""The gate of a tier: calls go in until it is shut, and shutting waits for those inside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvass.errors import UsageError


class Gate:
    """``with gate.call():`` around every method of a tier but ``close``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._inside = 0
        self.shutting = False
        """Whether ``shut`` was called; what runs for long looks here."""

    @contextmanager
    def call(self) -> Iterator[None]:
        """Raises ``UsageError`` once the gate is shut."""
        with self._changed:
            if self.shutting:
                raise UsageError(f"{self._name}: this tier is closed")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self) -> bool:
        """Let nobody in and wait until everybody left; whether this was the first time."""
        with self._changed:
            first, self.shutting = not self.shutting, True
            while self._inside:
                self._changed.wait()
        return first
