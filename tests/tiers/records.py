"""Records that a test stores, and the only question it asks of them later: right, or a miss?"""

from __future__ import annotations

from kvass.testing.tier_suite import data_of, room_for, same
from kvass.tiers.base import Buffer, Tier

SHAPE = (5000, 4096)
"""Two pages and one, and the header's: slots of 16 KiB."""


def keys_of(count: int, name: str = "key") -> list[bytes]:
    return [b"%s %d" % (name.encode(), i) for i in range(count)]


def fill(
    tier: Tier, keys: list[bytes], shape: tuple[int, ...] = SHAPE, version: int = 0
) -> list[bool]:
    return tier.store(keys, [data_of(key, shape, version) for key in keys])


def hits(
    tier: Tier, keys: list[bytes], shape: tuple[int, ...] = SHAPE, versions: int = 1
) -> list[bool]:
    """Which are held; every byte that was served is right, or the test fails."""
    into: list[list[Buffer]] = [room_for(shape) for _ in keys]
    which = tier.load(keys, into)
    for key, got, held in zip(keys, into, which, strict=True):
        wanted = (data_of(key, shape, v) for v in range(versions))
        assert not held or any(same(got, want) for want in wanted), f"wrong bytes: {key!r}"
    return which
