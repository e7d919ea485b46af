"""The results of lookups, until they are sent (``messages.LookupResult``).

Laws of this file:

- A result goes to the run of the daemon that answered the lookup, once, or nowhere.
- The oldest is sent ``SEND_S`` after it was added, if no ``HandedOver`` was sent before that.
"""

from __future__ import annotations

import time
from typing import Final

from kvass.client.connection import DaemonConnection
from kvass.client.endpoint import Endpoint
from kvass.messages import MOST_RESULTS, RESULTS, HandedOver, LookupResult

SEND_S: Final = 0.5


def counts_results(connection: DaemonConnection | None) -> bool:
    """Whether the daemon of ``connection`` counts results of lookups."""
    return connection is not None and RESULTS in connection.welcome.features


class Results:
    """The results of one engine that are not sent yet. Used from its scheduler's thread only."""

    def __init__(self, client: Endpoint) -> None:
        self._client = client
        self._kept: list[LookupResult] = []
        self._boot = b""
        """The run of the daemon to which ``_kept`` go."""
        self._since_s = 0.0
        """CLOCK_MONOTONIC at which the first of ``_kept`` was added."""
        self._tokens_s = self._told_tokens_s = 0.0
        """The speed of the engine, and what the daemon was told of it; 0: nothing yet."""

    def add(self, result: LookupResult, boot: bytes) -> None:
        """Add a result of a lookup that the run ``boot`` of the daemon answered."""
        connection = self._client.connection
        if connection is not None and boot != connection.boot:
            return
        if boot != self._boot:
            self._kept, self._boot, self._told_tokens_s = [], boot, 0.0
        if not self._kept:
            self._since_s = time.monotonic()
        self._kept.append(result)
        if len(self._kept) >= MOST_RESULTS:
            self.send()

    def speed(self, tokens_s: float) -> None:
        """The engine computes ``tokens_s`` tokens per second; 0: it is not known."""
        self._tokens_s = tokens_s

    def add_to(self, message: HandedOver) -> None:
        if message.boot == self._boot and self._kept:
            message.results, message.prefill_tokens_s = tuple(self._kept), self._tokens_s
            self._kept, self._told_tokens_s = [], self._tokens_s

    def send_overdue(self) -> None:
        """Send the results if it is time."""
        if self._kept and time.monotonic() - self._since_s >= SEND_S:
            self.send()

    def send(self) -> None:
        """Send the results now, or the engine's speed if the daemon knows none."""
        connection, news = self._client.connection, self._tokens_s > 0 and not self._told_tokens_s
        if connection is not None and connection.boot == self._boot and (self._kept or news):
            message = HandedOver(boot=self._boot, prefill_tokens_s=self._tokens_s)
            message.results = tuple(self._kept)
            self._told_tokens_s = self._tokens_s
            self._client.post(message, connection)
        self._kept = []
