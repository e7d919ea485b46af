"""The tokens that lookups asked for and hit: in all, and in the last minute.

Law of this file: every token that was asked for is either hit or missed for one reason.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvass.core.clients.shadow_figures import ShadowFigures
from kvass.core.metrics import MISSES
from kvass.messages import LookupResult

SLOT_S: Final = 10.0
SLOTS: Final = 6
"""The last minute is this many slots of ``SLOT_S``, including the current one."""
_NOTHING: Final = (0, 0, 0, 0)


class Savings(msgspec.Struct):
    """The time that computing hit tokens would have taken.

    ``seconds``: of those whose time is known. ``unpriced``: the others; call ``learn`` after adding
    to them. ``tokens_s``: the last known speed, in tokens per second; 0: none.
    """

    seconds: float = 0.0
    unpriced: int = 0
    tokens_s: float = 0.0

    def learn(self, tokens_s: float) -> None:
        """An engine computes ``tokens_s`` tokens per second; 0: the last known speed counts."""
        # No engine is slower than one token per second, and sums of this must stay finite.
        if tokens_s >= 1.0:
            self.tokens_s = tokens_s
        if self.unpriced and self.tokens_s:
            self.seconds += self.unpriced / self.tokens_s
            self.unpriced = 0

    @property
    def known_s(self) -> float | None:
        """The time as far as it is known; None: nothing of it is."""
        return None if self.unpriced and not self.seconds else round(self.seconds, 3)


class Traffic(msgspec.Struct):
    """The counts of the lookups of a namespace or a tenant (``results.py`` says when they count).

    ``lookup_tokens``: tokens that lookups asked for, beyond those in the engine's own cache.
    ``hit_tokens``: those of them that engines loaded. ``miss_tokens``: all others, by reason.
    ``from_tiers``: those of ``hit_tokens`` that a tier loaded for the lookup, by the tier's number;
    all others were in L1. ``stored_tokens``: tokens whose rows became readable. ``loads``: lookups
    whose hit was to be loaded. ``failed_loads``: those of them whose load failed. ``saved``: the
    time that computing ``hit_tokens`` would have taken. ``answer_tokens``: of answers from which a
    later prompt went on; ``repeated_tokens``: those of them with which it did.
    """

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    miss_tokens: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(MISSES, 0))
    from_tiers: list[int] = []
    stored_tokens: int = 0
    loads: int = 0
    failed_loads: int = 0
    saved: Savings = msgspec.field(default_factory=Savings)
    answer_tokens: int = 0
    repeated_tokens: int = 0
    shadow: ShadowFigures | None = None
    """What engines in shadow mode have reported; of a namespace only."""
    slots: dict[int, list[int]] = {}
    """``[lookup_tokens, hit_tokens, loads, failed_loads]`` of each slot."""

    def count_lookup(self, now: float, result: LookupResult, why: str, again: bool = False) -> None:
        """Count a lookup. ``why``: the reason for its misses, of ``metrics.MISSES``. ``again``: it
        continues the last lookup, and does not count as another."""
        asked, hit, failed = result.lookup_tokens, result.hit_tokens, int(result.failed)
        loads = int(failed or (hit > 0 and not again))
        self.lookups += not again
        self.lookup_tokens += asked
        self.hit_tokens += hit
        self.miss_tokens[why] += asked - hit
        self.loads += loads
        self.failed_loads += failed
        self.answer_tokens += result.answer_tokens
        self.repeated_tokens += result.repeated_tokens
        self.saved.unpriced += hit
        if result.tiers:
            self._count_tiers(result.tiers, hit)
        slot = self._slot(now)
        slot[0] += asked
        slot[1] += hit
        slot[2] += loads
        slot[3] += failed

    def _count_tiers(self, tiers: tuple[int, ...], left: int) -> None:
        """Count of ``left`` hit tokens those that each tier loaded."""
        for tier, tokens in enumerate(tiers[: len(self.from_tiers)]):
            self.from_tiers[tier] += (of_tier := min(tokens, left))
            left -= of_tier

    def add(self, other: Traffic) -> None:
        """Add the counts of ``other``, without those of the last minute."""
        self.lookups += other.lookups
        self.lookup_tokens += other.lookup_tokens
        self.hit_tokens += other.hit_tokens
        self.stored_tokens += other.stored_tokens
        self.loads += other.loads
        self.failed_loads += other.failed_loads
        self.answer_tokens += other.answer_tokens
        self.repeated_tokens += other.repeated_tokens
        self.saved.seconds += other.saved.seconds
        self.saved.unpriced += other.saved.unpriced
        if other.shadow is not None:
            self.shadow = (self.shadow or ShadowFigures()).plus(other.shadow)
        self.miss_tokens = {why: n + other.miss_tokens[why] for why, n in self.miss_tokens.items()}
        self.from_tiers = [a + b for a, b in zip(self.from_tiers, other.from_tiers, strict=True)]

    def last_minute(self, now: float) -> list[int]:
        """The lookup tokens, hit tokens, loads and failed loads of the last minute."""
        if not self.slots:  # before the first step there is no time
            return [*_NOTHING]
        oldest = int(now // SLOT_S) - SLOTS
        recent = [counts for slot, counts in self.slots.items() if slot > oldest]
        return [sum(each) for each in zip(_NOTHING, *recent, strict=True)]

    def _slot(self, now: float) -> list[int]:
        number = int(now // SLOT_S)
        if number not in self.slots:
            self.slots = {k: v for k, v in self.slots.items() if k > number - SLOTS}
            self.slots[number] = [*_NOTHING]
        return self.slots[number]
