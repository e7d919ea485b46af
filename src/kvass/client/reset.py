"""When an engine resets its cache: the daemon confirms it before anything matches again.

Laws of this file:

- After ``clear`` a reset is pending until a daemon has confirmed a ``Clear``, on whatever
  connection; then what was stored or granted before can match no more.
- After ``new_generation`` a reset is pending until a daemon has registered us under it, now or when
  we connect again. A daemon that keeps no generations apart is not used.
- An owed ``Clear`` comes before a new generation: it is one of the namespace that we leave.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Final

import msgspec

from kvass.client.client import Client
from kvass.client.session import DaemonSession
from kvass.errors import KvassError, Unavailable
from kvass.messages import Clear, Cleared, Error, FromDaemon, Register, Registered, Request

AGAIN_S: Final = 1.0
"""After this a refused request is repeated. A ``Clear`` that a tier could not note costs others of
the namespace what L1 has, each time."""
GENERATION_BYTES: Final = 16
_log: Final = logging.getLogger("kvass.client")


class NamespaceReset:
    """The resets that the daemon does not know of yet. Used from one thread."""

    def __init__(self, client: Client, registration: Register) -> None:
        self.registration = registration
        """How we want to be registered; the connection has this too, once no Clear is owed."""
        self._client = client
        self._clear_owed = False
        self._clear = _Repeated(client)
        self._register = _Repeated(client)

    @property
    def pending(self) -> bool:
        """Whether a Clear is owed, or the daemon that is there takes us for what we were before."""
        session = self._client.session
        return self._clear_owed or (session is not None and not self._knows_us(session))

    def clear(self, timeout_s: float) -> bool:
        """Forget this namespace's rows; False: not confirmed within ``timeout_s``."""
        self._clear.drop()  # it may be too early for what was stored since
        self._clear_owed = True
        deadline_s = time.monotonic() + timeout_s
        try:
            self._client.connect(timeout_s)
        except KvassError:
            return False
        return self._confirm_clear(max(deadline_s - time.monotonic(), 0.0))

    def new_generation(self, timeout_s: float) -> None:
        """Leave the namespace, also the rows of others in it, for one that nobody else has."""
        generation = os.urandom(GENERATION_BYTES)
        self.registration = msgspec.structs.replace(self.registration, generation=generation)
        self._register.drop()
        self.go_on(timeout_s)

    def go_on(self, timeout_s: float = 0.0) -> None:
        """Say what is owed, and take in what was confirmed; waits for a registration alone."""
        if self._confirm_clear(0.0):
            self._confirm_generation(timeout_s)

    def _knows_us(self, session: DaemonSession) -> bool:
        """Whether the daemon of ``session`` has us registered under our generation."""
        apart = not self.registration.generation or "generations" in session.welcome.features
        return apart and session.registration is self.registration

    def _confirm_clear(self, timeout_s: float) -> bool:
        """Whether no Clear is owed now. A daemon refuses it while ranks are missing, since it does
        not know their namespace then; that may change at once, so it is repeated at once."""
        if self._clear_owed:
            reply = self._clear.ask(Clear(), timeout_s)
            if isinstance(reply, Cleared):
                self._clear_owed = False
            elif isinstance(reply, Error) and reply.code == "tier_down":
                self._clear.not_before_s = time.monotonic() + AGAIN_S
        return not self._clear_owed

    def _confirm_generation(self, timeout_s: float) -> None:
        connection = self._client.connection
        connection.registration = self.registration
        session = connection.session
        if session is None or self._knows_us(session):
            return
        if "generations" not in session.welcome.features:
            if not connection.counters["too_old"]:
                _log.warning(
                    "the daemon cannot tell new weights from old ones; uncached until it "
                    "is upgraded, or the engine starts anew"
                )
            connection.counters["too_old"] += 1
            return
        reply = self._register.ask(msgspec.structs.replace(self.registration), timeout_s)
        if isinstance(reply, Registered):
            session.registration = self.registration
        elif isinstance(reply, Error):
            connection.refused(reply)
            self._register.not_before_s = time.monotonic() + AGAIN_S


class _Repeated:
    """A request that is sent again until it was answered as wished."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._seq = 0
        """Of the one in flight; 0: there is none."""
        self.not_before_s = 0.0
        """CLOCK_MONOTONIC."""

    def ask(self, message: Request, timeout_s: float) -> FromDaemon | None:
        """Send ``message`` if none is in flight; the reply, if it is here within ``timeout_s``."""
        if not self._seq and time.monotonic() >= self.not_before_s:
            self._seq = self._client.submit(message)
        try:
            reply = self._client.wait(self._seq, timeout_s) if self._seq else None
        except Unavailable:  # lost with its connection: sent again by the next call
            self._seq = 0
            return None
        if reply is not None:
            self._seq = 0
        return reply

    def drop(self) -> None:
        """Wait no more for the one in flight; the next call sends at once."""
        if self._seq:
            self._client.discard(self._seq)
        self._seq, self.not_before_s = 0, 0.0
