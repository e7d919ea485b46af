"""What engines asked a namespace for and were given, in tokens: in all, and in the last minute."""

from __future__ import annotations

from typing import Final

import msgspec

from kvass.core.metrics import MISSES

SLOT_S: Final = 10.0
SLOTS: Final = 6
"""The last minute: so many slots of ``SLOT_S``, the current one among them."""


class Traffic(msgspec.Struct):
    """``asked``: tokens that lookups asked for, beyond what the engine had itself. ``given``: those
    of them that lookups were given; ``missed``: all others, by reason. ``from_tiers``: those of
    ``given`` that tiers loaded for it, by the tier's number; all others were in L1. ``stored``:
    tokens that became readable. ``saved_s``: what computing ``given`` would have taken. Lookups
    count when they are answered."""

    lookups: int = 0
    asked: int = 0
    given: int = 0
    missed: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(MISSES, 0))
    from_tiers: list[int] = []
    stored: int = 0
    saved_s: float = 0.0
    slots: dict[int, list[int]] = {}
    """Tokens asked for and given in each slot."""

    def answered(
        self,
        now: float,
        asked: int,
        given: int,
        why: str,
        prefill_tokens_s: float = 0.0,
        again: bool = False,
    ) -> None:
        """A lookup asked for so many tokens and was given so many; ``why`` not all. ``again``: it
        went on where the last one ended, and is not counted as another."""
        self.lookups += not again
        self.asked += asked
        self.given += given
        self.missed[why] += asked - given
        if prefill_tokens_s >= 1.0:  # no engine is slower, and a sum stays finite
            self.saved_s += given / prefill_tokens_s
        slot = self._slot(now)
        slot[0] += asked
        slot[1] += given

    def add(self, other: Traffic) -> None:
        """What ``other`` counted in all, too."""
        self.lookups += other.lookups
        self.asked += other.asked
        self.given += other.given
        self.stored += other.stored
        self.saved_s += other.saved_s
        self.missed = {why: n + other.missed[why] for why, n in self.missed.items()}
        self.from_tiers = [a + b for a, b in zip(self.from_tiers, other.from_tiers, strict=True)]

    def last_minute(self, now: float) -> tuple[int, int]:
        """Tokens asked for and given."""
        if not self.slots:
            return 0, 0
        oldest = int(now // SLOT_S) - SLOTS
        recent = [pair for slot, pair in self.slots.items() if slot > oldest]
        return sum(asked for asked, _ in recent), sum(given for _, given in recent)

    def _slot(self, now: float) -> list[int]:
        number = int(now // SLOT_S)
        if number not in self.slots:
            self.slots = {k: v for k, v in self.slots.items() if k > number - SLOTS}
            self.slots[number] = [0, 0]
        return self.slots[number]
