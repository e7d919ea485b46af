"""Quotas of a disk tier: what is reserved stays, a cap holds, and both outlive a restart."""

from __future__ import annotations

import pytest

from kvass.errors import ConfigError
from kvass.testing.tier_suite import data_of
from kvass.tiers.disk import DiskTier
from kvass.tiers.url import open_tier, read_tier_url
from kvass.types import Quota
from tests.tiers.conftest import OpenDisk
from tests.tiers.records import SHAPE, hits, keys_of

MIB = 1 << 20
CALM = keys_of(100, "calm")  # 1.6 MiB in slots of 16 KiB
RESERVED = (Quota.parse("calm=:2MiB"),)


def put(
    tier: DiskTier, tenant: str, keys: list[bytes], shape: tuple[int, ...] = SHAPE
) -> list[bool]:
    return tier.store_for(tenant, keys, [data_of(key, shape) for key in keys])


def noise(tier: DiskTier, name: str, shape: tuple[int, ...] = SHAPE) -> None:
    """10 MiB, more than the tier has, and all of it is kept for a while."""
    for i in range(10):
        assert all(put(tier, "noisy", keys_of(64, f"{name} {i}"), shape))


def held(tier: DiskTier, tenant: str) -> int:
    """Bytes."""
    of_tenant: int = tier.report()["tenants"][tenant]["bytes"]
    return of_tenant


@pytest.mark.parametrize("quotas", [RESERVED, ()], ids=["reserved", "control"])
def test_what_is_reserved_stays(open_disk: OpenDisk, quotas: tuple[Quota, ...]) -> None:
    """The control has no quota."""
    tier = open_disk(8 * MIB, quotas=quotas)
    assert all(put(tier, "calm", CALM))
    noise(tier, "first")
    noise(tier, "another size", (40_000,))
    assert hits(tier, CALM) == [bool(quotas)] * 100
    tier.close()
    tier = open_disk(8 * MIB, quotas=quotas)
    noise(tier, "after a restart")
    assert hits(tier, CALM) == [bool(quotas)] * 100
    if quotas:
        assert held(tier, "default") > 5 * MIB, "the others have all the rest"


def test_what_is_reserved_is_there_later(open_disk: OpenDisk) -> None:
    """Others leave it free, and give it back if they had it before there was a quota."""
    tier = open_disk(8 * MIB)
    noise(tier, "before")
    tier.close()
    tier = open_disk(8 * MIB, quotas=RESERVED)
    noise(tier, "still first")
    assert all(put(tier, "calm", CALM))
    noise(tier, "again")
    assert all(hits(tier, CALM))


def test_a_cap_holds_and_costs_nobody_else(open_disk: OpenDisk) -> None:
    tier = open_disk(8 * MIB, quotas=[Quota.parse("batch=1MiB")])
    assert all(put(tier, "calm", CALM))
    for size in (5000, 40_000):  # slots of two sizes share the cap
        for i in range(20):
            keys = keys_of(16, f"batch {size} {i}")
            assert all(put(tier, "batch", keys, (size,)))
            assert held(tier, "batch") <= MIB
    assert all(hits(tier, keys[-8:], (40_000,))), "it has its own newest"
    assert all(hits(tier, CALM))
    assert put(tier, "batch", [b"huge"], (2 * MIB,)) == [False]
    assert put(tier, "calm", [b"huge"], (2 * MIB,)) == [True]


def test_more_than_is_reserved_goes_to_whoever_used_it_last(open_disk: OpenDisk) -> None:
    tier = open_disk(8 * MIB, quotas=RESERVED)
    many = keys_of(400, "many of calm")
    assert all(put(tier, "calm", many))
    assert held(tier, "calm") > 6 * MIB
    noise(tier, "newer")
    assert 2 * MIB <= held(tier, "calm") < 3 * MIB
    assert sum(hits(tier, many)) * 16384 > 1.5 * MIB


def test_lowered_limits_take_effect_at_the_next_start(open_disk: OpenDisk) -> None:
    tier = open_disk(8 * MIB, quotas=RESERVED)
    assert all(put(tier, "calm", CALM))
    noise(tier, "noise")
    tier.close()
    tier = open_disk(3 * MIB, quotas=RESERVED)
    assert tier.report()["bytes"] <= 3 * MIB
    assert all(hits(tier, CALM)), "they are older than all of the others"
    tier.close()
    tier = open_disk(3 * MIB, quotas=[Quota.parse("calm=1MiB")])
    assert 0 < held(tier, "calm") <= MIB
    tier.close()
    tier = open_disk(8 * MIB)
    assert 0 < sum(hits(tier, CALM)) < 100, "without a quota they are the others'"
    assert "tenants" not in tier.report()


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("a=1GiB:2GiB", "quota of a: the cap 1GiB is below what is reserved, 2GiB"),
        ("a=:60MiB;b=:60MiB", "120MiB are reserved of a capacity of 100MiB"),
        ("a=1MiB;a=2MiB", "a has two: give one"),
        ("a", "write NAME=CAP:RESERVED"),
        ("other=1MiB", "not 'other'"),
        ("a=lots", "no size: 'lots'"),
    ],
)
def test_bad_quotas(option: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        read_tier_url(f"disk:/nowhere?capacity=100MiB&quota={option}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis:localhost", "s3:bucket", "mooncake:master"])
def test_stores_that_evict_by_themselves_have_none(url: str) -> None:
    with pytest.raises(ConfigError, match="only the capacity of a disk tier can be divided"):
        open_tier(f"{url}?quota=a=1MiB")
