"""The wait budget of a scheduler step: how long it may wait for the daemon in all."""

from __future__ import annotations

import time

from kvass.client.endpoint import Endpoint
from kvass.messages import FromDaemon
from kvass.types import MAX_PATIENCE_S


class StepBudget:
    """The wait budget. ``wait_s``: seconds per step; ``left_s``: those left in this step."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = self.left_s = wait_s

    def renew(self) -> None:
        """Begin a step: ``left_s`` is ``wait_s`` again."""
        self.left_s = self.wait_s

    def wait(self, client: Endpoint, seq: int, most_s: float = MAX_PATIENCE_S) -> FromDaemon | None:
        """``Endpoint.wait`` for at most ``most_s``, and at most ``left_s``."""
        began_s = time.monotonic()
        try:
            return client.wait(seq, min(most_s, self.left_s))
        finally:
            self.spend(began_s)

    def spend(self, began_s: float) -> None:
        """Subtract a wait that began at ``began_s`` (CLOCK_MONOTONIC) and ends now."""
        self.left_s = max(self.left_s - (time.monotonic() - began_s), 0.0)
