"""How long one scheduler step of an engine may wait for the daemon, in all."""

from __future__ import annotations

import time

from kvass.client.endpoint import Endpoint
from kvass.messages import FromDaemon
from kvass.types import MAX_PATIENCE_S


class StepBudget:
    """``wait_s`` per step, of which ``left_s`` is left in this one."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = self.left_s = wait_s

    def renew(self) -> None:
        """A step begins."""
        self.left_s = self.wait_s

    def wait(self, client: Endpoint, seq: int, most_s: float = MAX_PATIENCE_S) -> FromDaemon | None:
        """As ``Endpoint.wait``, for ``most_s`` and for what is left at most."""
        began_s = time.monotonic()
        try:
            return client.wait(seq, min(most_s, self.left_s))
        finally:
            self.spend(began_s)

    def spend(self, began_s: float) -> None:
        """A wait that began then (CLOCK_MONOTONIC) is over."""
        self.left_s = max(self.left_s - (time.monotonic() - began_s), 0.0)
