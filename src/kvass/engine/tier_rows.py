"""KV events for routers: which rows that left L1 a tier has.

Laws of this file:

- A row is announced after the daemon has confirmed that a tier has it (or L1, again). It is asked
  for again after ``again_s`` at the latest, as far as the rate allows, and when it may have been
  cleared. It is withdrawn when it is not there any more.
- One question is open at a time, of at most ``ROWS_PER_QUESTION`` rows, and ``PAUSE_S`` pass
  between two. So the rate of questions and of events is bounded.
- At most ``MOST`` rows are announced, and as many wait to be asked for: the oldest go first.

No tier tells what it evicts, and other daemons may write to it. Therefore rows are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

from kvass.client.connection import DaemonConnection
from kvass.client.scheduler import SchedulerClient
from kvass.engine.traffic import EngineTraffic
from kvass.errors import Unavailable
from kvass.messages import PRESENT, Presence, Present

ROWS_PER_QUESTION: Final = 256
PAUSE_S: Final = 0.1
"""From the answer to a question to the next question."""
NEW_DAEMON_S: Final = 3.0
"""From a new connection to the first question: a daemon that has just begun may not know yet what
its tiers have."""
MOST: Final = 1 << 16
"""The most rows that are announced, and the most that wait to be asked for."""

Row = tuple[int, bytes]
"""The key of a row: group, and chunk hash as the daemon knows it."""


class TierEventMaker(Protocol):
    """The maker of the events. ``kept``: what was kept of a row when it was announced in L1."""

    def stored_in_tier(self, kept: Any) -> Any:
        """The event of a row that a tier has."""

    def removed(self, group: int, rows: list[Any], tier: bool) -> Any:
        """The event of rows that are not there any more."""


class Announced(NamedTuple):
    """A row that is announced, and when the daemon was last asked for it (CLOCK_MONOTONIC)."""

    kept: Any
    asked_s: float


class TierRows:
    """The rows of one engine that are in tiers. Used from the engine's scheduler thread only.

    ``again_s``: how long the daemon's answer about an announced row is believed.
    """

    def __init__(
        self,
        client: SchedulerClient,
        event_maker: TierEventMaker,
        traffic: EngineTraffic,
        again_s: float,
    ) -> None:
        self._client = client
        self._event_maker = event_maker
        self._traffic = traffic
        self._again_s = again_s
        self._left: dict[Row, Any] = {}
        """Rows to be asked for because they left L1. The oldest is first."""
        self._announced: dict[Row, Announced] = {}
        """The one that was not asked for for the longest time is first."""
        self._doubted_s = 0.0
        """Rows that were asked for before are asked for at once."""
        self._asked: dict[Row, Any] = {}
        """The rows of the open question, of one group."""
        self._connection: DaemonConnection | None = None
        self._seq = 0
        self._asked_s = self._next_s = 0.0

    def left(self, rows: Iterable[tuple[Row, Any]]) -> None:
        """These rows left L1."""
        self._left.update(rows)
        for row in [*islice(self._left, max(0, len(self._left) - MOST))]:
            del self._left[row]

    def doubt(self) -> None:
        """Rows may have been cleared."""
        self._doubted_s = time.monotonic()

    def forget(self) -> None:
        """Forget all rows. An answer that is on its way is not taken in."""
        for rows in (self._left, self._announced, self._asked):
            rows.clear()

    def withdraw(self, most: int) -> list[Any]:
        """The events that withdraw up to ``most`` rows, because there is no daemon."""
        self._left.clear()
        return self._withdraw(list(islice(self._announced, most)))

    def poll(self, width: int) -> list[Any]:
        """The events since the last call. Takes in the answer, and asks the next question when it
        is due. Digests have ``width`` bytes. There is a daemon."""
        now_s = time.monotonic()
        if self._seq:
            try:
                reply = self._client.wait(self._seq, 0.0)
            except Unavailable:
                self._seq = 0
                self.left(self._asked.items())
                return []
            if reply is None:
                return []
            self._seq, self._next_s = 0, now_s + PAUSE_S
            if isinstance(reply, Presence):
                return self._answered(reply.held)
            self.left(self._asked.items())
        if self._client.connection is not self._connection:
            self._connection, self._next_s = self._client.connection, now_s + NEW_DAEMON_S
        if now_s >= self._next_s:
            self._ask(width, now_s)
        return []

    def _ask(self, width: int, now_s: float) -> None:
        if self._connection is None or PRESENT not in self._connection.welcome.features:
            self._left.clear()
            return
        due_s = max(self._doubted_s, now_s - self._again_s)
        due = dict(islice(self._left.items(), ROWS_PER_QUESTION))
        for row, one in islice(self._announced.items(), ROWS_PER_QUESTION - len(due)):
            if one.asked_s >= due_s:
                break
            due.setdefault(row, one.kept)
        if not due:
            return
        group = next(iter(due))[0]
        self._asked = {row: kept for row, kept in due.items() if row[0] == group}
        blob = b"".join(digest for _, digest in self._asked)
        question = Present(digests=blob, width=width, tiers=True, groups=1 << group)
        self._seq, self._asked_s = self._client.submit(question), now_s
        if not self._seq:
            self._asked = {}
            return
        for row in self._asked:
            self._left.pop(row, None)

    def _answered(self, held: bytes) -> list[Any]:
        absent, events = [], []
        for (row, kept), is_there in zip(self._asked.items(), held, strict=False):
            if not is_there:
                absent.append(row)
                continue
            if self._announced.pop(row, None) is None:
                events.append(self._event_maker.stored_in_tier(kept))
                self._traffic.count("announced_rows")
            self._announced[row] = Announced(kept, self._asked_s)
        self._asked = {}
        oldest = islice(self._announced, max(0, len(self._announced) - MOST))
        return events + self._withdraw([*absent, *oldest])

    def _withdraw(self, rows: list[Row]) -> list[Any]:
        gone: dict[int, list[Any]] = {}
        for row in rows:
            if (one := self._announced.pop(row, None)) is not None:
                gone.setdefault(row[0], []).append(one.kept)
        self._traffic.count("withdrawn_rows", sum(map(len, gone.values())))
        return [self._event_maker.removed(group, kept, True) for group, kept in gone.items()]
