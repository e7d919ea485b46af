"""What an engine tells routers about its rows in the daemon: which came, and which left L1.

Laws of this file:

- A row is announced once the daemon has said that it is there, and withdrawn once it has said, or
  we must assume, that it is not.
- An engine announces the rows that it stored or loaded itself. A load announces them again, as vLLM
  does with its own blocks, so that a router that missed messages learns of what is in use.
- What the daemon says of a row holds at the position of that answer. An answer names what left
  before it, so a row that left and was stored again is announced again.
- After a loss (another connection, an overrun, a clear) the daemon is asked for each announced row.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any, Final, NamedTuple, Protocol

from kvass.client.scheduler import SchedulerClient
from kvass.client.session import DaemonSession
from kvass.engine.protocols import Request
from kvass.engine.traffic import EngineTraffic
from kvass.errors import Unavailable
from kvass.messages import Error, Removals, Removed

IDLE_S: Final = 0.05
"""How often the daemon is asked what left L1."""
BUSY_S: Final = 0.005
"""As ``IDLE_S``, while rows wait to be announced or checked."""
CHECKED: Final = 4096
"""Rows of which one message asks whether they are there, and that are withdrawn at once."""
AWAY_S: Final = 5.0
"""After so long without a daemon its rows are withdrawn."""
STEPPING_S: Final = 1.0
"""So long an idle engine goes on stepping for a row that is not announced yet."""

Row = tuple[int, bytes]
"""Group, and digest as the daemon knows it."""


class EventMaker(Protocol):
    """Makes an engine's events."""

    def stored(self, request: Request, group: int, chunk: int) -> tuple[Any, Any]:
        """The event of one row, and what ``removed`` needs of it, which is kept."""

    def removed(self, group: int, rows: list[Any]) -> Any:
        """The event of rows that left."""


class Expected(NamedTuple):
    """A row that is announced when it is there, if it is so before ``until_s``."""

    request: Request
    chunk: int
    until_s: float


class RowEvents:
    """One engine's events. Used from the engine's scheduler thread only."""

    def __init__(self, client: SchedulerClient, make: EventMaker, traffic: EngineTraffic) -> None:
        self._client = client
        self._make = make
        self._traffic = traffic
        self._events: list[Any] = []
        self._announced: dict[Row, Any] = {}
        self._expected: dict[Row, Expected] = {}
        self._doubted: dict[Row, None] = {}
        """Announced rows that may be gone."""
        self._session: DaemonSession | None = None
        self._since = self._seq = 0
        self._width = 32
        self._asked: dict[int, dict[bytes, Expected | None]] = {}
        """By group: what the message on its way asks for."""
        self._asked_s = self._stepping_s = 0.0
        self._served_s = time.monotonic()
        """When there was last a daemon."""

    # ------------------------------------------------------------ rows

    def expect(
        self,
        request: Request,
        digests: bytes,
        width: int,
        rows: Iterable[tuple[int, int]],
        until_s: float,
    ) -> None:
        """Rows ``(group, chunk)`` of ``request`` are being stored, or loaded, until ``until_s``.
        ``digests``: of its chunks, from chunk 0 on, ``width`` bytes each; none of them, and no
        width, if there are no rows: only the part of a chunk is on its way."""
        rows = list(rows)
        if not rows:
            return
        self._width, self._stepping_s = width, time.monotonic() + STEPPING_S
        for group, chunk in rows:
            row = group, digests[chunk * width : (chunk + 1) * width]
            self._expected[row] = Expected(request, chunk, until_s)

    def forget(self) -> None:
        """Routers were told that this engine has nothing any more."""
        for rows in (self._announced, self._expected, self._doubted):
            rows.clear()
        self._events.clear()

    @property
    def pending(self) -> bool:
        """Whether the engine must keep stepping to announce a row."""
        return bool(self._expected) and time.monotonic() < self._stepping_s

    def take(self) -> list[Any]:
        """The events since the last call."""
        self.poll()
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ asking

    def poll(self) -> None:
        """Take in the daemon's answer, and ask again when it is time."""
        session, now_s = self._client.session, time.monotonic()
        if session is None:
            self._session = None
            if now_s - self._served_s > AWAY_S:
                self._withdraw(list(islice(self._announced, CHECKED)))
            return
        self._served_s = now_s
        if session is not self._session:
            self._session, self._since, self._seq, self._asked_s = session, 0, 0, 0.0
        if self._seq and not self._answered():
            return
        pause_s = BUSY_S if self._expected or self._doubted else IDLE_S
        if now_s - self._asked_s >= pause_s:
            self._ask(session, now_s)

    def _ask(self, session: DaemonSession, now_s: float) -> None:
        most = min(CHECKED, session.welcome.limits.keys_per_message)
        self._asked = {}
        for row in islice(chain(self._expected, self._doubted), most):
            self._asked.setdefault(row[0], {})[row[1]] = self._expected.get(row)
        groups = range(max(self._asked, default=-1) + 1)
        present = tuple(b"".join(self._asked.get(group, ())) for group in groups)
        asked = Removals(since=self._since, width=self._width, present=present)
        self._seq, self._asked_s = self._client.submit(asked), now_s

    def _answered(self) -> bool:
        """Take in the answer; False if it has not come."""
        try:
            reply = self._client.wait(self._seq, 0.0)
        except Unavailable:
            reply = Removed(lost=True)
        if reply is None:
            return False
        self._seq = 0
        if isinstance(reply, Error):
            self._client.refused(reply)
            return True
        assert isinstance(reply, Removed)
        self._since = reply.upto
        for group, blob in enumerate(reply.removed):
            gone = (blob[i : i + self._width] for i in range(0, len(blob), self._width))
            self._withdraw([(group, digest) for digest in gone])
        if reply.lost:
            self._traffic.count("event_resyncs", bool(self._announced and not self._doubted))
            self._doubted = dict.fromkeys(self._announced)
        absent = []
        for group, there in enumerate(reply.present):
            asked = self._asked.get(group, {})
            for (digest, expected), is_there in zip(asked.items(), there, strict=False):
                row = group, digest
                self._doubted.pop(row, None)
                if not is_there:
                    absent.append(row)
                if expected is not None and (is_there or expected.until_s < self._asked_s):
                    self._settle(row, expected, bool(is_there))
        self._withdraw(absent)
        return True

    def _settle(self, row: Row, expected: Expected, is_there: bool) -> None:
        """A row that was expected is there, or will not come."""
        if self._expected.get(row) is not expected:
            return  # it was stored once more since we asked
        del self._expected[row]
        if is_there:
            event, kept = self._make.stored(expected.request, row[0], expected.chunk)
            self._announced[row] = kept
            self._events.append(event)
            self._traffic.count("announced_rows")

    def _withdraw(self, rows: list[Row]) -> None:
        gone: dict[int, list[Any]] = {}
        for row in rows:
            self._doubted.pop(row, None)
            if (kept := self._announced.pop(row, None)) is not None:
                gone.setdefault(row[0], []).append(kept)
        for group, kept_rows in gone.items():
            self._events.append(self._make.removed(group, kept_rows))
            self._traffic.count("withdrawn_rows", len(kept_rows))
