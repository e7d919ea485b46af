"""Many threads, little room, several sizes: no wrong byte, and a consistent index afterwards."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvass.testing.tier_suite import data_of
from kvass.tiers.disk import DiskTier
from kvass.tiers.disk.index import DiskIndex
from kvass.types import Quota
from tests.tiers.conftest import OpenDisk
from tests.tiers.records import hits, keys_of

CAPACITY = 1 << 20
SHAPES = [(5000, 4096), (20_000,), (300,), (4096, 4096, 4096, 4096)]
KEYS = keys_of(120)


def check(of: DiskIndex) -> None:
    """What holds of an index that nobody uses just now."""
    found = 0
    for number, segment in of.segments.items():
        assert segment.file.number == number
        assert not segment.gone
        assert segment.users == 0
        assert not segment.pins.any()
        free = [
            at for at in segment.owner.classes[segment.file.slot_bytes].free if at >> 32 == number
        ]
        empty = (segment.fingerprint == 0).nonzero()[0]
        assert sorted(free) == [segment.slot_id(slot) for slot in empty.tolist()]
        assert segment.used == segment.file.slots - len(free) > 0, "an empty segment was kept"
        for slot in segment.fingerprint.nonzero()[0].tolist():
            key = int(segment.fingerprint[slot])
            assert of._slot_ids.get(key) == segment.slot_id(slot)
            found += 1
    assert found == len(of), "the index has records that no slot holds"
    assert of.dead == []
    assert of.spent == sum(segment.file.bytes for segment in of.segments.values()) <= of.capacity
    held = [s for o in of.owners.values() for one in o.classes.values() for s in one.segments]
    assert len(held) == len(of.segments)
    for owner in of.owners.values():
        theirs = [s for one in owner.classes.values() for s in one.segments]
        assert all(s.owner is owner for s in theirs)
        assert owner.spent == sum(s.file.bytes for s in theirs) <= owner.cap


def torture(tier: DiskTier, seed: int, who: int, steps: int, stored: list[list[int]]) -> None:
    rng = random.Random(seed * 5 + who)
    for _ in range(steps):
        some = rng.sample(range(len(KEYS)), rng.randint(1, 5))
        keys = [KEYS[i] for i in some]
        what = rng.random()
        if what < 0.5:
            shapes = [SHAPES[i % 4] for i in some]
            versions = [rng.randrange(4) for _ in some]
            data = [data_of(*each) for each in zip(keys, shapes, versions, strict=True)]
            tenant = rng.choice(["a", "b", "nobody"])
            stored[who].append(sum(tier.store_for(tenant, keys, data)))
        elif what < 0.9:
            for i in some:
                hits(tier, [KEYS[i]], SHAPES[i % 4], versions=4)
        elif what < 0.99:
            tier.delete(keys)
        else:
            tier.clear()


@pytest.mark.parametrize("quotas", ["", "a=400KiB:300KiB;b=:200KiB"])
def test_torture(open_disk: OpenDisk, quotas: str) -> None:
    parts, seed = [Quota.parse(text) for text in quotas.split(";") if text], len(quotas)
    tier = open_disk(CAPACITY, threads=2, quotas=parts)
    stored: list[list[int]] = [[] for _ in range(5)]
    with ThreadPoolExecutor(5) as pool:
        for done in [pool.submit(torture, tier, seed, i, 90, stored) for i in range(5)]:
            done.result(timeout=120)
    assert sum(map(sum, stored)) > 300
    assert tier.report()["evicted"] > 0
    assert tier.report()["damaged"] == 0
    check(tier._index)
    before = [hits(tier, [key], SHAPES[i % 4], versions=4) for i, key in enumerate(KEYS)]
    tier.close()
    tier = open_disk(CAPACITY, quotas=parts)
    check(tier._index)
    after = [hits(tier, [key], SHAPES[i % 4], versions=4) for i, key in enumerate(KEYS)]
    assert after == before


def test_keys_of_one_fingerprint_push_each_other_out(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvass.tiers.disk.tier.fingerprint", lambda key: key[-1] % 7 + 1)
    tier = open_disk(CAPACITY)
    for key in KEYS[:60]:
        assert tier.store([key], [data_of(key, SHAPES[0])]) == [True]
        assert hits(tier, [key]) == [True]
    assert sum(hits(tier, KEYS[:60])) <= 7
    check(tier._index)


def test_the_check_notices() -> None:
    """The control: an index that counts a byte too many is not consistent."""
    one = DiskIndex(CAPACITY, 0)
    one.spent += 1
    with pytest.raises(AssertionError):
        check(one)
