"""A tier that fails on request: it keeps records in another tier, and is dead, slow or wrong.

Apart from ``raise`` it keeps the tier protocol.

::

    --tier 'tests.support.tiers.faulty:FaultyTier?inner=disk:/folder%3Fcapacity=64MiB&orders=/file'

``orders``: a file that names the faults of this moment: words of ``ORDERS``, or nothing.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvass.errors import TierDown
from kvass.tiers.url import open_tier

ORDERS: Final = (
    "dead",  # every call raises TierDown
    "raise",  # every call raises an error that no tier may raise
    "slow",  # a load or store takes a second
    "hang",  # a load or store does not return while this order stands
    "promise",  # a probe answers that everything is held
    "spoil",  # a load writes garbage into its buffers, and fails
)
_CALLS: Final = ("probe", "load", "store", "delete", "clear", "note", "set_note")
_SLOW_S: Final = 1.0
_LOOK_S: Final = 0.01


class FaultyTier:
    """See the top of this file."""

    def __init__(self, inner: str, orders: str) -> None:
        self._inner = open_tier(inner)
        self._orders = Path(orders)
        self.close = self._inner.close
        for name in _CALLS:
            setattr(self, name, partial(self._call, name))

    def _told(self, word: str) -> bool:
        try:
            return word in self._orders.read_text().split()
        except FileNotFoundError:
            return False

    def _call(self, name: str, *arguments: Any) -> Any:
        bulk = name in ("load", "store")
        if self._told("dead"):
            raise TierDown("told to be dead")
        if self._told("raise"):
            raise RuntimeError("told to raise what no tier may")
        if bulk and self._told("slow"):
            time.sleep(_SLOW_S)
        while bulk and self._told("hang"):
            time.sleep(_LOOK_S)
        if name == "probe" and self._told("promise"):
            return [True] * len(arguments[0])
        if name == "load" and self._told("spoil"):
            for shards in arguments[1]:
                for shard in shards:
                    shard[: len(shard) // 2] = 0x5A
            return [False] * len(arguments[0])
        return getattr(self._inner, name)(*arguments)
