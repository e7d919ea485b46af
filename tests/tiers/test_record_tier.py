"""The rule of outcomes, which all our own tiers have in common. The rest of it: their suites."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvass.errors import TierDown
from kvass.tiers.record_tier import Outcome, RecordTier
from tests.tiers.records import KEYS, fill, hits


class Outcomes(RecordTier):
    """Keeps no bytes. ``trouble``: what these keys meet."""

    def __init__(self) -> None:
        super().__init__("outcomes")
        self.held: list[bytes] = []
        self.trouble: dict[bytes, Outcome] = {}

    def _exists(self, keys: Sequence[bytes]) -> list[Outcome]:
        return [self.trouble.get(key, key in self.held) for key in keys]

    def _put(self, keys: Sequence[bytes], data: object, tenant: str) -> list[Outcome]:
        self.held += keys
        return self._exists(keys)

    def _delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        self.held = [key for key in self.held if key not in keys]
        return [self.trouble.get(key, True) for key in keys]

    def _get(self, keys: Sequence[bytes], into: object) -> list[Outcome]:
        return self._exists(keys)

    def _clear(self) -> None: ...

    def _get_note(self, name: str) -> None: ...

    def _put_note(self, name: str, value: bytes) -> None: ...

    def _close(self) -> None: ...


def test_trouble_with_some_is_a_miss_and_with_all_is_the_tiers() -> None:
    tier = Outcomes()
    tier.trouble = {KEYS[0]: TierDown("first"), KEYS[1]: TierDown("second")}
    assert fill(tier, KEYS[:3]) == tier.load(KEYS[:3], [[]] * 3) == [False, False, True]
    for ask in (fill, hits):
        with pytest.raises(TierDown, match="first"):
            ask(tier, KEYS[:2])
    assert tier.probe(KEYS[:3]) == [False, False, True]
    tier.delete(KEYS[:3])
    with pytest.raises(TierDown, match="second"):
        tier.delete(KEYS[1:2])
    with pytest.raises(TierDown, match="first"):
        tier.probe([KEYS[5], KEYS[0]])  # absence is no success
    assert tier.probe(KEYS[2:3]) == [False]


def test_a_key_is_put_once() -> None:
    tier = Outcomes()
    assert fill(tier, [*KEYS, *KEYS]) == [True] * 20
    assert tier.held == KEYS
