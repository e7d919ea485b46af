"""The tokens that lookups asked for and hit: in all, and in the last minute.

Law of this file: every token that was asked for is either hit or missed for one reason.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvass.core.clients.shadow_figures import ShadowFigures
from kvass.core.metrics import MISSES

SLOT_S: Final = 10.0
SLOTS: Final = 6
"""The last minute is this many slots of ``SLOT_S``, including the current one."""


def prefill_s(tokens: int, tokens_s: float) -> float:
    """The time to compute ``tokens`` at ``tokens_s`` tokens per second; 0 if that is not known."""
    # No engine is slower than one token per second, and sums of this must stay finite.
    return tokens / tokens_s if tokens_s >= 1.0 else 0.0


class Traffic(msgspec.Struct):
    """The counts of the lookups of a namespace or a tenant. A lookup counts when it is answered.

    ``lookup_tokens``: tokens that lookups asked for, beyond those in the engine's own cache.
    ``hit_tokens``: those of them that lookups hit. ``miss_tokens``: all others, by reason.
    ``from_tiers``: those of ``hit_tokens`` that a tier loaded for the lookup, by the tier's number;
    all others were in L1. ``stored_tokens``: tokens whose rows became readable. ``saved_s``: the
    time that computing ``hit_tokens`` would have taken.
    """

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    miss_tokens: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(MISSES, 0))
    from_tiers: list[int] = []
    stored_tokens: int = 0
    saved_s: float = 0.0
    shadow: ShadowFigures | None = None
    """What engines in shadow mode have reported; of a namespace only."""
    slots: dict[int, list[int]] = {}
    """``[lookup_tokens, hit_tokens]`` of each slot."""

    def count_lookup(
        self,
        now: float,
        lookup_tokens: int,
        hit_tokens: int,
        why: str,
        prefill_tokens_s: float = 0.0,
        again: bool = False,
    ) -> None:
        """Count a lookup. ``why``: the reason for its misses, of ``metrics.MISSES``. ``again``: it
        continues the last lookup, and does not count as another."""
        self.lookups += not again
        self.lookup_tokens += lookup_tokens
        self.hit_tokens += hit_tokens
        self.miss_tokens[why] += lookup_tokens - hit_tokens
        self.saved_s += prefill_s(hit_tokens, prefill_tokens_s)
        slot = self._slot(now)
        slot[0] += lookup_tokens
        slot[1] += hit_tokens

    def add(self, other: Traffic) -> None:
        """Add the counts of ``other``, without those of the last minute."""
        self.lookups += other.lookups
        self.lookup_tokens += other.lookup_tokens
        self.hit_tokens += other.hit_tokens
        self.stored_tokens += other.stored_tokens
        self.saved_s += other.saved_s
        if other.shadow is not None:
            self.shadow = (self.shadow or ShadowFigures()).plus(other.shadow)
        self.miss_tokens = {why: n + other.miss_tokens[why] for why, n in self.miss_tokens.items()}
        self.from_tiers = [a + b for a, b in zip(self.from_tiers, other.from_tiers, strict=True)]

    def last_minute(self, now: float) -> tuple[int, int]:
        """The lookup tokens and hit tokens of the last minute."""
        if not self.slots:
            return 0, 0
        oldest = int(now // SLOT_S) - SLOTS
        recent = [pair for slot, pair in self.slots.items() if slot > oldest]
        return sum(lookup for lookup, _ in recent), sum(hit for _, hit in recent)

    def _slot(self, now: float) -> list[int]:
        number = int(now // SLOT_S)
        if number not in self.slots:
            self.slots = {k: v for k, v in self.slots.items() if k > number - SLOTS}
            self.slots[number] = [0, 0]
        return self.slots[number]
