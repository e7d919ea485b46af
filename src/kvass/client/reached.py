"""Which daemons the ranks of an engine reach: those that reach one daemon are a node.

Laws of this file:

- Names tell nothing, because each process tree of an engine may have another one. A daemon's boot
  does, which each rank reports.
- A step brings each rank what is known of it. What is not so is reported again, because the report
  of a step may be lost.
- Nodes are made of what all ranks said in two steps in a row. While a daemon is restarted, its
  ranks reach the new one at different times, also within a step, and what they said shows nodes
  that never were. So once one of them reaches another daemon, all are asked again. Who says the
  same twice was there in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvass.client.steps import FromAgent

APART_STEPS: Final = 100
"""After how many steps without nodes it is said which ranks are why."""


@dataclass(frozen=True)
class RankNews:
    """What a rank reports. ``boot``: of the daemon that it is connected to, if the scheduler does
    not know it. ``form``: which nodes it knows. ``agent``: what its agent returns. ``failure``: why
    it has never had a connection, or its daemon refuses it, if the scheduler does not know it;
    empty: neither is so."""

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
        self._apart = 0
        """For how many steps no nodes could be made."""
        self._all_said = False
        """Whether all ranks said in the last step where they are."""
        self.certain = False
        """Whether all ranks said the same in two steps in a row, and none another thing since."""

    def reported(self, news: Mapping[int, RankNews]) -> None:
        """Take in what ranks reported after a step."""
        boots = {rank: one.boot for rank, one in news.items() if one.boot}
        moved = any(boot != self._boots.get(rank) for rank, boot in boots.items())
        before, self._all_said = self._all_said, len(boots) == self._ranks
        self.certain = not moved and (self.certain or (before and self._all_said))
        self._boots |= boots
        for rank, one in news.items():
            if one.boot:  # it is connected, and before nodes are known it does not say so otherwise
                self._failures.pop(rank, None)
            if one.failure is not None:
                self._failures[rank] = one.failure

    def known(self, rank: int) -> tuple[bytes, str]:
        """Which daemon a rank reached last, and what it reported of a failure. Without the daemon
        it says again where it is."""
        boot = self._boots.get(rank, b"") if self.certain else b""
        return boot, self._failures.get(rank, "")

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
        if self._apart > APART_STEPS and self.certain and not silent:
            all_.append("no rank uses the daemon of the scheduler")
        return all_
