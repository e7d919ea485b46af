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
APART_STEPS: Final = 100
"""The same in steps, before it is said that no rank uses the scheduler's daemon: ranks report only
in steps."""


@dataclass(frozen=True)
class RankNews:
    """What a rank reports. ``boot``: of the daemon that it reached last, if the scheduler does not
    know it. ``form``: which nodes it knows. ``agent``: what its agent returns. ``refusal``: why its
    daemon refuses it, if the scheduler does not know it; empty: it does not."""

    boot: bytes = b""
    form: int = 0
    agent: FromAgent | None = None
    refusal: str | None = None


class Reached:
    """What ``ranks`` ranks reported."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._boots: dict[int, bytes] = {}
        """Which daemon each rank reached last."""
        self._refusals: dict[int, str] = {}
        """Why daemons refuse ranks."""
        self._news_s, self._apart = 0.0, 0
        """When ranks last reached another daemon, and for how many steps none has used ours."""

    def reported(self, rank: int, news: RankNews) -> None:
        """Take in what a rank reported."""
        if news.boot and news.boot != self._boots.get(rank):
            self._boots[rank], self._news_s = news.boot, time.monotonic()
        if news.refusal is not None:
            self._refusals[rank] = news.refusal

    def known(self, rank: int) -> tuple[bytes, str]:
        """Which daemon a rank reached last, and why that refuses it."""
        return self._boots.get(rank, b""), self._refusals.get(rank, "")

    @property
    def settled(self) -> bool:
        """Whether no rank has reached another daemon for a while."""
        return time.monotonic() - self._news_s > SETTLED_S

    def nodes(self, boot: bytes) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, in a step. First those that reach the daemon of ``boot``, the
        scheduler's. Empty: it is not known yet."""
        if len(self._boots) < self._ranks:
            return ()
        of_boot = dict[bytes, list[int]]()
        for rank in range(self._ranks):
            of_boot.setdefault(self._boots[rank], []).append(rank)
        own = of_boot.pop(boot, None)
        self._apart = self._apart + 1 if own is None else 0
        if own is None:  # a daemon was restarted, and not all have noticed
            return ()
        return (tuple(own), *map(tuple, of_boot.values()))

    def complaints(self) -> list[str]:
        """Which ranks are refused, and whether none uses the scheduler's daemon."""
        said = [f"rank {rank}: {why}" for rank, why in sorted(self._refusals.items()) if why]
        if self._apart > APART_STEPS and self.settled:
            said.append("no rank uses the daemon of the scheduler")
        return said
