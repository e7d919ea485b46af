"""Resets of an engine's cache: nothing matches until the daemon has confirmed a reset.

Laws of this file:

- After ``clear`` a reset is pending until a daemon has confirmed a ``Clear``, on this connection or
  a later one. Then nothing matches that was stored or granted before.
- After ``new_generation`` a reset is pending until a daemon has registered the new
  generation, on this connection or on a later one.
- A ``Clear`` that is owed is sent before a new generation, because it is for the old namespace.
"""

from __future__ import annotations

import os
import time
from typing import Final

import msgspec

from kvass.client.endpoint import Endpoint
from kvass.errors import KvassError, Unavailable
from kvass.messages import Clear, Error, Register

AGAIN_S: Final = 1.0
"""Seconds after which a refused request is repeated. Each ``Clear`` removes the
namespace's rows from L1, for other engines too, even if a tier cannot note it."""
GENERATION_BYTES: Final = 16
UNCACHED_CHARS: Final = 256


class NamespaceReset:
    """The resets that the daemon has not confirmed yet. Used from one thread."""

    def __init__(self, endpoint: Endpoint, registration: Register) -> None:
        self.registration = registration
        """The newest registration. The endpoint gets it as soon as no ``Clear`` is owed."""
        self._endpoint = endpoint
        self._clear_owed = False
        self._seq = 0
        """The ``seq`` of the ``Clear`` or ``Register`` in flight; 0: there is none."""
        self._not_before_s = 0.0
        """CLOCK_MONOTONIC before which no request is sent."""

    @property
    def pending(self) -> bool:
        """Whether a ``Clear`` is owed, or the daemon has an older registration of this engine."""
        connection = self._endpoint.connection
        unknown = connection is not None and connection.registration is not self.registration
        return self._clear_owed or unknown

    def clear(self, timeout_s: float) -> bool:
        """Forget this namespace's rows; False: not confirmed within ``timeout_s``."""
        self._drop()  # a Clear in flight may be too early for what was stored since
        self._clear_owed = True
        deadline_s = time.monotonic() + timeout_s
        try:
            self._endpoint.connect(timeout_s)
        except KvassError:
            return False
        return self._confirm_clear(max(deadline_s - time.monotonic(), 0.0))

    def new_generation(self, timeout_s: float, token: bytes = b"") -> None:
        """Move to the namespace of the generation ``token``, or to one that no other engine has."""
        generation = token or os.urandom(GENERATION_BYTES)
        self.registration = msgspec.structs.replace(self.registration, generation=generation)
        if not self._clear_owed:
            self._drop()
        self.go_on(timeout_s)

    def tell_uncached(self, why: str) -> None:
        """Register again with ``why`` this engine uses no cache, at once if no ``Clear`` is
        owed."""
        why = why[:UNCACHED_CHARS]
        self.registration = msgspec.structs.replace(self.registration, uncached=why)
        self.go_on()

    def go_on(self, timeout_s: float = 0.0) -> None:
        """Send what is owed and read confirmations. Waits only for a registration."""
        if self._clear_owed and not self._confirm_clear(0.0):
            return
        self._endpoint.registration = self.registration
        connection = self._endpoint.connection
        if connection is None or connection.registration is self.registration:
            return
        if self._confirmed(msgspec.structs.replace(self.registration), timeout_s):
            connection.registration = self.registration

    def _confirm_clear(self, timeout_s: float) -> bool:
        if self._clear_owed and self._confirmed(Clear(), timeout_s):
            self._clear_owed = False
        return not self._clear_owed

    def _confirmed(self, message: Clear | Register, timeout_s: float) -> bool:
        """Send ``message`` if none is in flight; whether it was confirmed within ``timeout_s``."""
        if not self._seq and time.monotonic() >= self._not_before_s:
            self._seq = self._endpoint.submit(message)
        if not self._seq:
            return False
        try:
            reply = self._endpoint.wait(self._seq, timeout_s)
        except Unavailable:  # lost with its connection: sent again by the next call
            self._seq = 0
            return False
        if reply is None:
            return False
        self._seq = 0
        if isinstance(reply, Error):
            self._endpoint.refused(reply)
            self._not_before_s = time.monotonic() + AGAIN_S
        return not isinstance(reply, Error)

    def _drop(self) -> None:
        """Stop waiting for the request in flight. The next call sends at once."""
        if self._seq:
            self._endpoint.discard(self._seq)
        self._seq, self._not_before_s = 0, 0.0
