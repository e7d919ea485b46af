"""What our own tiers have in common, over a dict: the suite, and the rule of outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvass.errors import TierDown
from kvass.testing import TierSuite
from kvass.testing.tier_suite import MakeTier
from kvass.tiers.base import Shards
from kvass.tiers.codec import pack, unpack
from kvass.tiers.record_tier import Outcome, RecordTier
from tests.tiers.records import KEYS, fill, hits

Held = dict[bytes | str, bytes]


class DictTier(RecordTier):
    """Notes have ``str`` keys. ``trouble``: what these keys meet instead."""

    def __init__(self, held: Held) -> None:
        super().__init__("dict")
        self.held = held
        self.trouble: dict[bytes, Outcome] = {}
        self.puts = 0

    def _exists(self, keys: Sequence[bytes]) -> list[Outcome]:
        return [self.trouble.get(key, key in self.held) for key in keys]

    def _get(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[Outcome]:
        return [self._one(key, shards) for key, shards in zip(keys, into, strict=True)]

    def _one(self, key: bytes, into: Shards) -> Outcome:
        raw = self.held.get(key, b"")
        return self.trouble.get(key, unpack(key, len(raw), [raw], into) is True)

    def _put(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[Outcome]:
        self.puts += len(keys)
        for key, shards in zip(keys, data, strict=True):
            self.held[key] = bytes(pack(key, shards))
        return [self.trouble.get(key, True) for key in keys]

    def _delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        for key in keys:
            self.held.pop(key, None)
        return [self.trouble.get(key, True) for key in keys]

    def _clear(self) -> None:
        for key in [key for key in self.held if isinstance(key, bytes)]:
            del self.held[key]

    def _get_note(self, name: str) -> bytes | None:
        return self.held.get(name)

    def _put_note(self, name: str, value: bytes) -> None:
        self.held[name] = value

    def _close(self) -> None:
        assert self._closing


class TestDict(TierSuite):
    @pytest.fixture
    def make_tier(self) -> MakeTier:
        held: Held = {}
        return lambda: DictTier(held)


def test_trouble_with_some_is_a_miss_and_with_all_is_the_tiers() -> None:
    tier = DictTier({})
    tier.trouble = {KEYS[0]: TierDown("first"), KEYS[1]: TierDown("second")}
    for ask in (fill, hits):
        assert ask(tier, KEYS[:3]) == [False, False, True]
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
    tier = DictTier({})
    assert fill(tier, [*KEYS, *KEYS]) == [True] * 20
    assert tier.puts == 10
