"""Which daemons the ranks of an engine reach: those that reach one daemon are a node.

Laws of this file:

- Names tell nothing, because each process tree of an engine may have another one. A daemon's boot
  does, which each rank reports.
- A step brings each rank what is known of it. What is not so is reported again, because the report
  of a step may be lost.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from kvass.client.steps import FromAgent

SETTLED_S: Final = 1.0
"""After ranks reached other daemons, how long nothing more must come of that before nodes are made
anew: while a daemon is restarted, its ranks reach the new one at different times."""
SETTLED_STEPS: Final = 2
"""How many steps must then begin and end without news, because ranks report only in steps: an
engine that was idle heard nothing. The report of one may be lost."""
APART_STEPS: Final = 100
"""After how many steps without nodes it is said which ranks are why."""


@dataclass(frozen=True)
class RankNews:
    """What a rank reports. ``boot``: of the daemon that it reached last, if the scheduler does not
    know it. ``form``: which nodes it knows. ``agent``: what its agent returns. ``failure``: why it
    has never had a connection, or its daemon refuses it, if the scheduler does not know it; empty:
    neither is so."""

    boot: bytes = b""
    form: int = 0
    agent: FromAgent | None = None
    failure: str | None = None


class Reached:
    """What ``ranks`` ranks reported."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._boots: dict[int, bytes] = {}
        """Which daemon each rank reached last."""
        self._failures: dict[int, str] = {}
        """Why ranks reach no daemon, or are refused."""
        self._news_s, self._apart = 0.0, 0
        """When ranks last reached another daemon, and for how many steps no nodes could be made."""
        self._quiet_from = 0
        """The first step that began ``SETTLED_S`` after that; 0: none has."""
        self.settled = False
        """Whether no rank has reached another daemon for a while."""

    def reported(self, rank: int, news: RankNews) -> None:
        """Take in what a rank reported."""
        if news.boot and news.boot != self._boots.get(rank):
            self._boots[rank], self._news_s = news.boot, time.monotonic()
            self._quiet_from, self.settled = 0, False
        if news.boot:  # it is connected, and before nodes are known it does not say so otherwise
            self._failures.pop(rank, None)
        if news.failure is not None:
            self._failures[rank] = news.failure

    def known(self, rank: int) -> tuple[bytes, str]:
        """Which daemon a rank reached last, and what it reported of a failure."""
        return self._boots.get(rank, b""), self._failures.get(rank, "")

    def stepped(self, begun: int, ended: int) -> None:
        """Step ``begun`` begins, and ``ended`` was the last one that has ended."""
        if not self._quiet_from and time.monotonic() - self._news_s > SETTLED_S:
            self._quiet_from = begun
        last = self._quiet_from + SETTLED_STEPS - 1
        self.settled = bool(self._quiet_from) and ended >= last

    def nodes(self, boot: bytes) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, in a step. First those that reach the daemon of ``boot``, the
        scheduler's. Empty: it is not known yet."""
        self._apart += 1
        if len(self._boots) < self._ranks:
            return ()
        of_boot = dict[bytes, list[int]]()
        for rank in range(self._ranks):
            of_boot.setdefault(self._boots[rank], []).append(rank)
        own = of_boot.pop(boot, None)
        if own is None:  # a daemon was restarted, and not all have noticed
            return ()
        self._apart = 0
        return (tuple(own), *map(tuple, of_boot.values()))

    def complaints(self) -> list[str]:
        """Which ranks have no daemon, and whether none uses the scheduler's."""
        said = {rank: why for rank, why in self._failures.items() if why}
        silent = set(range(self._ranks)) - self._boots.keys()
        for rank in silent if self._apart > APART_STEPS else ():
            said.setdefault(rank, "it has not reported which daemon it reaches")
        all_ = [f"rank {rank}: {why}" for rank, why in sorted(said.items())]
        if self._apart > APART_STEPS and self.settled and not silent:
            all_.append("no rank uses the daemon of the scheduler")
        return all_
