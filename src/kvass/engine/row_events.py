"""KV events for routers: which rows of the engine are in the daemon's L1, and which left it.

Laws of this file:

- A row is announced after the daemon has confirmed that it is there. It is withdrawn after the
  daemon has reported that it left, or when that must be assumed.
- An engine announces the rows that it stored or loaded itself. It announces loaded rows again, as
  vLLM does with its own blocks, so that a router that missed messages learns which rows are in use.
- Each answer of the daemon (``Removed``) names the rows that left before it, and says which of the
  queried rows are there at that time. So a row that left and was stored again is announced again.
- If removals may have been missed (a new connection, an overrun, a clear), the daemon is queried
  for each announced row.
- What leaves L1 may be in a tier: ``tier_rows.py`` follows it from there on, if that is wanted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kvass.client.connection import DaemonConnection
from kvass.client.lookups import Match
from kvass.client.scheduler import SchedulerClient
from kvass.engine.observers import Observer
from kvass.engine.protocols import Request
from kvass.engine.request_state import RequestState
from kvass.engine.tier_rows import Row, TierEventMaker, TierRows
from kvass.engine.traffic import EngineTraffic
from kvass.errors import Unavailable
from kvass.messages import Error, Grant, Granted, Removals, Removed

if TYPE_CHECKING:
    from kvass.engine.offers import Offer

IDLE_S: Final = 0.05
"""The interval at which the daemon is queried for rows that left L1."""
BUSY_S: Final = 0.005
"""As ``IDLE_S``, while rows wait to be announced or checked."""
ROWS_PER_MESSAGE: Final = 4096
"""The most rows that one message queries, and that one call withdraws without a daemon."""
AWAY_S: Final = 5.0
"""After this long without a daemon, its rows are withdrawn."""
STEPPING_S: Final = 1.0
"""The longest time that an idle engine keeps stepping for rows that are not announced yet."""


class EventMaker(TierEventMaker, Protocol):
    """The maker of an engine's KV events."""

    def stored(self, request: Request, group: int, chunk: int) -> tuple[Any, Any]:
        """The event of a row that came, and a value that is kept for the events to come."""


class Expected(NamedTuple):
    """A row that is being stored or loaded until ``until_s``. It is announced when the daemon has
    confirmed it."""

    request: Request
    chunk: int
    until_s: float


class RowEvents(Observer):
    """The KV events of one engine. Used from the engine's scheduler thread only."""

    def __init__(
        self,
        client: SchedulerClient,
        event_maker: EventMaker,
        traffic: EngineTraffic,
        tier_s: float = 0.0,
    ) -> None:
        """``tier_s``: as ``EngineSetup.tier_events_s``."""
        self._client = client
        self._event_maker = event_maker
        self._traffic = traffic
        self._events: list[Any] = []
        self._announced: dict[Row, Any] = {}
        self._expected: dict[Row, Expected] = {}
        self._doubted: dict[Row, None] = {}
        """Announced rows that may have left."""
        self._tiers = TierRows(client, event_maker, traffic, tier_s) if tier_s else None
        self._connection: DaemonConnection | None = None
        self._since = self._seq = 0
        self._width = 32
        self._query: dict[int, dict[bytes, Expected | None]] = {}
        """The rows of the last query, by group and digest."""
        self._query_s = self._stepping_s = 0.0
        self._served_s = time.monotonic()
        """When a daemon was last connected."""

    # ------------------------------------------------------------ rows

    def _expect(
        self,
        request: Request,
        digests: bytes,
        width: int,
        rows: Iterable[tuple[int, int]],
        until_s: float,
    ) -> None:
        """Announce these rows ``(group, chunk)`` of ``request`` when they are there. They are being
        stored or loaded until ``until_s``. ``digests``: the hashes of its chunks, from chunk 0 on,
        ``width`` bytes each. Both may be empty if there are no rows."""
        rows = list(rows)
        if not rows:
            return
        self._width, self._stepping_s = width, time.monotonic() + STEPPING_S
        for group, chunk in rows:
            row = group, digests[chunk * width : (chunk + 1) * width]
            self._expected[row] = Expected(request, chunk, until_s)

    def loading(self, state: RequestState, match: Match) -> None:
        """Announce the rows of ``match`` as soon as they are loaded."""
        named = None if state.answer is None else state.answer.named
        digests, width = state.digests(match.chunks, b"" if named is None else named.salt)
        rows = [  # ordered by chunk: a router ignores a block whose parent it does not know
            (group, chunk)
            for group, slots in enumerate(match.slots)
            for chunk in range(match.chunks - len(slots) + (match.blocks > 0), match.chunks)
        ]
        self._expect(state.request, digests, width, rows, match.deadline_s)

    def stored(self, offer: Offer, grant: Grant, granted: Granted) -> None:
        """Announce the rows of a grant once they are stored. A tail is not announced."""
        if not grant.chunks:
            return
        groups = [g for g in range(offer.item.groups.bit_length()) if offer.item.groups >> g & 1]
        whole = offer.end - (offer.tail > 0)
        rows = [
            (group, chunk)
            for group, chunks in zip(groups, grant.rows(), strict=True)
            for chunk in chunks
            if chunk < whole
        ]
        digests, width = offer.item.digests, len(offer.item.digests) // max(1, whole)
        self._expect(offer.state.request, digests, width, rows, granted.deadline_s)

    def forget(self) -> None:
        """Forget all rows, because the engine published that all its blocks are gone."""
        for rows in (self._announced, self._expected, self._doubted):
            rows.clear()
        self._events.clear()
        if self._tiers is not None:
            self._tiers.forget()

    @property
    def pending(self) -> bool:
        """Whether the engine must keep stepping to announce a row."""
        return bool(self._expected) and time.monotonic() < self._stepping_s

    def take(self) -> list[Any]:
        """The events since the last call."""
        self.poll()
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ queries

    def poll(self) -> None:
        """Take in the daemon's answer, and send the next query when it is due."""
        connection, now_s = self._client.connection, time.monotonic()
        if connection is None:
            self._connection = None
            if now_s - self._served_s > AWAY_S:
                self._withdraw(list(islice(self._announced, ROWS_PER_MESSAGE)))
                if self._tiers is not None:
                    self._events += self._tiers.withdraw(ROWS_PER_MESSAGE)
            return
        self._served_s = now_s
        if self._tiers is not None:
            self._events += self._tiers.poll(self._width)
        if connection is not self._connection:
            self._connection, self._since, self._seq, self._query_s = connection, 0, 0, 0.0
        if self._seq and not self._answered():
            return
        pause_s = BUSY_S if self._expected or self._doubted else IDLE_S
        if now_s - self._query_s >= pause_s:
            self._ask(connection, now_s)

    def _ask(self, connection: DaemonConnection, now_s: float) -> None:
        most = min(ROWS_PER_MESSAGE, connection.welcome.limits.keys_per_message)
        self._query = {}
        for row in islice(chain(self._expected, self._doubted), most):
            self._query.setdefault(row[0], {})[row[1]] = self._expected.get(row)
        groups = range(max(self._query, default=-1) + 1)
        present = tuple(b"".join(self._query.get(group, ())) for group in groups)
        query = Removals(since=self._since, width=self._width, present=present)
        self._seq, self._query_s = self._client.submit(query), now_s

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
            self._left_l1([(group, digest) for digest in gone])
        if reply.lost:
            if self._tiers is not None:
                self._tiers.doubt()
            self._traffic.count("event_resyncs", bool(self._announced and not self._doubted))
            self._doubted = dict.fromkeys(self._announced)
        absent = []
        for group, there in enumerate(reply.present):
            queried = self._query.get(group, {})
            for (digest, expected), is_there in zip(queried.items(), there, strict=False):
                row = group, digest
                self._doubted.pop(row, None)
                if not is_there:
                    absent.append(row)
                if expected is not None and (is_there or expected.until_s < self._query_s):
                    self._resolve(row, expected, bool(is_there))
        self._left_l1(absent)
        return True

    def _resolve(self, row: Row, expected: Expected, is_there: bool) -> None:
        """Stop expecting a row. Announce it if it is there."""
        if self._expected.get(row) is not expected:
            return  # it was stored again after the query
        del self._expected[row]
        if is_there:
            event, kept = self._event_maker.stored(expected.request, row[0], expected.chunk)
            self._announced[row] = kept
            self._events.append(event)
            self._traffic.count("announced_rows")

    def _left_l1(self, rows: list[Row]) -> None:
        if self._tiers is not None:
            self._tiers.left((row, self._announced[row]) for row in rows if row in self._announced)
        self._withdraw(rows)

    def _withdraw(self, rows: list[Row]) -> None:
        gone: dict[int, list[Any]] = {}
        for row in rows:
            self._doubted.pop(row, None)
            if (kept := self._announced.pop(row, None)) is not None:
                gone.setdefault(row[0], []).append(kept)
        for group, kept_rows in gone.items():
            self._events.append(self._event_maker.removed(group, kept_rows, False))
            self._traffic.count("withdrawn_rows", len(kept_rows))
