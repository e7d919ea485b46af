"""A tier that fails on request: it keeps records in another tier, and is dead, slow or wrong.

Apart from ``raise`` it keeps the tier protocol.

::

    --tier 'tests.support.tiers.faulty:FaultyTier?inner=disk:/folder%3Fcapacity=64MiB&orders=/file'

``orders``: a file that names the faults of this moment: words of ``ORDERS``, or nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvass.errors import TierDown
from kvass.tiers.base import Shards, Tier
from kvass.tiers.url import open_tier

ORDERS: Final = (
    "dead",  # every call raises TierDown
    "raise",  # every call raises an error that no tier may raise
    "slow",  # a load or store takes a second
    "hang",  # a load or store does not return while this order stands
    "promise",  # a probe answers that everything is held
    "spoil",  # a load writes garbage into its buffers, and fails
)
_SLOW_S: Final = 1.0
_LOOK_S: Final = 0.01


class FaultyTier:
    """See the top of this file."""

    def __init__(self, inner: str, orders: str) -> None:
        self._inner: Tier = open_tier(inner)
        self._orders = Path(orders)

    def _told(self, word: str) -> bool:
        try:
            return word in self._orders.read_text().split()
        except FileNotFoundError:
            return False

    def _obey(self, bulk: bool = False) -> None:
        if self._told("dead"):
            raise TierDown("told to be dead")
        if self._told("raise"):
            raise RuntimeError("told to raise what no tier may")
        if bulk and self._told("slow"):
            time.sleep(_SLOW_S)
        while bulk and self._told("hang"):
            time.sleep(_LOOK_S)

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``Tier.probe``."""
        self._obey()
        held = self._inner.probe(keys)
        return [True] * len(keys) if self._told("promise") else held

    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        """See ``Tier.load``."""
        self._obey(bulk=True)
        if self._told("spoil"):
            for shards in into:
                for shard in shards:
                    shard[: len(shard) // 2] = 0x5A
            return [False] * len(keys)
        return self._inner.load(keys, into)

    def store(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """See ``Tier.store``."""
        self._obey(bulk=True)
        return self._inner.store(keys, data)

    def delete(self, keys: Sequence[bytes]) -> None:
        """See ``Tier.delete``."""
        self._obey()
        self._inner.delete(keys)

    def clear(self) -> None:
        """See ``Tier.clear``."""
        self._obey()
        self._inner.clear()

    def note(self, name: str) -> bytes | None:
        """See ``Tier.note``."""
        self._obey()
        return self._inner.note(name)

    def set_note(self, name: str, value: bytes) -> None:
        """See ``Tier.set_note``."""
        self._obey()
        self._inner.set_note(name, value)

    def close(self) -> None:
        """See ``Tier.close``."""
        self._inner.close()
