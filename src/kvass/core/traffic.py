"""What engines asked a namespace for and were given, in tokens: in all, and in the last minute."""

from __future__ import annotations

from typing import Final

import msgspec

SLOT_S: Final = 10.0
SLOTS: Final = 6
"""The last minute: so many slots of ``SLOT_S``, the current one among them."""


class Traffic(msgspec.Struct):
    """``asked``: tokens that lookups asked for, beyond what the engine had itself. ``given``: those
    of them that lookups were given. ``from_tiers``: those of ``given`` that tiers loaded for it,
    by the tier's number; all others were in L1."""

    lookups: int = 0
    asked: int = 0
    given: int = 0
    from_tiers: list[int] = []
    slots: dict[int, list[int]] = {}
    """Tokens asked for and given in each slot."""

    def ask(self, now: float, tokens: int) -> None:
        """A lookup asks for so many tokens."""
        self.lookups += 1
        self.asked += tokens
        self._slot(now)[0] += tokens

    def give(self, now: float, tokens: int) -> None:
        """A lookup is given so many."""
        self.given += tokens
        self._slot(now)[1] += tokens

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
