"""The Mooncake tier against a real master and real owners: shared, dead, slow, full, damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from kvass.errors import TierDown
from kvass.testing.tier_suite import MakeTier, data_of, eventually, room_for, same
from kvass.tiers import Tier, open_tier
from kvass.tiers.mooncake import MooncakeTier
from kvass.tiers.mooncake.client import MooncakeClient
from kvass.tiers.mooncake.transfer import DIRECT_BYTES
from tests.support.servers.mooncake import MooncakeServer, Owner
from tests.tiers.conftest import Start
from tests.tiers.records import KEYS, OpenAt, Raw, SharedSuite, down, fill, hits, keys_of, works

SERVER = MooncakeServer
LARGE = (1 << 20,)


class TestMooncake(SharedSuite):
    huge = 2 << 20

    @pytest.fixture(scope="class")
    def client(self, server: MooncakeServer) -> Iterator[Any]:
        """The library's, whose end takes a second."""
        with closing(open_tier(f"mooncake:{server.address}?compress=off")) as tier:
            assert isinstance(tier, MooncakeTier)
            yield tier._mooncake.client()

    @pytest.fixture
    def tier(self, make_tier: MakeTier, client: Any) -> Iterator[Tier]:
        """Those that no test closes share the library's client."""
        patched = mock.patch.object(MooncakeClient, "client", return_value=client)
        with patched, closing(make_tier()) as tier:
            yield tier

    @pytest.fixture
    def open_at(self, server: MooncakeServer) -> OpenAt:
        return lambda prefix: open_tier(f"mooncake:{server.address}?prefix={prefix}:")

    @pytest.fixture
    def raw(self, server: MooncakeServer) -> Raw:
        [owner] = server.owners
        return Raw(
            lambda prefix, key: owner.get(f"{prefix}:r:{key.hex()}"),
            lambda prefix, key, value: owner.put(f"{prefix}:r:{key.hex()}", value),
        )


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_large_shards_go_straight_and_small_ones_beside_the_header(
    server: MooncakeServer, protocol: str, start: Start
) -> None:
    """``rdma``: what is registered is, and nothing else is used; the transport is TCP all the
    same, for want of a device."""
    tier = start(open_tier, f"mooncake:{server.address}?prefix={protocol}:&compress=off")
    assert isinstance(tier, MooncakeTier)
    assert works(tier)
    link: Any = tier._mooncake
    link._options = msgspec.structs.replace(link._options, protocol=protocol)
    shape = (3 * DIRECT_BYTES, 17, DIRECT_BYTES - 1, DIRECT_BYTES + 17)
    arena = np.zeros(16 * DIRECT_BYTES, np.uint8)
    tier.register_memory(arena)
    inside = [arena[i * 4 * DIRECT_BYTES :][:n] for i, n in enumerate(shape)]
    assert link.direct(inside[0])
    assert link.direct(np.zeros(8, np.uint8)) is (protocol == "tcp")
    want = data_of(b"key", shape)
    for shard, source in zip(inside, want, strict=True):
        shard[:] = source
    assert tier.store([b"key"], [inside]) == [True]
    arena[:] = 0
    anywhere = room_for(shape)
    assert tier.load([b"key", b"key"], [inside, anywhere]) == [True, True]
    assert same(inside, want)
    assert same(anywhere, want)


def test_a_master_that_dies_and_comes_back(start: Start) -> None:
    """The only memory is our own."""
    server = start(MooncakeServer, owners=0)
    tier = start(open_tier, f"mooncake:{server.address}?timeout_s=2&segment=64MiB")
    assert works(tier)
    server.kill()
    assert all("mooncake:" in text for text in down(tier, at_once=7))
    server.start()
    eventually(lambda: works(tier), 60)
    server.kill()


def test_a_master_that_stands_still(start: Start) -> None:
    server = start(MooncakeServer)
    url = f"mooncake:{server.address}?timeout_s=1"
    tier, late = start(open_tier, url), start(open_tier, url)  # this one meets it when it stands
    assert works(tier)
    server.pause(True)
    assert all("does not" in text or "not be kept" in text for text in down(tier, at_once=7))
    down(late, at_once=7)
    server.pause(False)
    eventually(lambda: works(tier), 60)
    eventually(lambda: works(late), 60)


def test_an_owner_that_stands_still_or_dies(start: Start) -> None:
    server = start(MooncakeServer)
    tier = start(open_tier, f"mooncake:{server.address}?timeout_s=1")
    many = keys_of(80, "several groups")
    assert works(tier)
    assert all(fill(tier, many, LARGE))
    assert all(hits(tier, many, LARGE))
    server.owners[0].pause(True)
    with pytest.raises(TierDown):
        hits(tier, KEYS)
    server.owners[0].kill()
    assert not works(tier)
    server.owners.append(Owner(server.address))
    eventually(lambda: works(tier), 60)


def test_a_note_outlives_one_of_its_owners(start: Start) -> None:
    server = start(MooncakeServer, owners=2)
    tier = start(open_tier, f"mooncake:{server.address}?timeout_s=1")
    for i in range(3):
        tier.set_note("epoch", b"%d" % i)
    server.owners[0].kill()

    def kept() -> bool:
        try:
            return bool(tier.note("epoch") == b"2")
        except TierDown:
            return False

    eventually(kept, 60)


def test_without_any_memory_nothing_is_held(start: Start) -> None:
    server = start(MooncakeServer, owners=0)
    tier = start(open_tier, f"mooncake:{server.address}")
    assert not any(fill(tier, KEYS))
    assert not any(hits(tier, KEYS))
    with pytest.raises(TierDown, match="no room"):
        tier.set_note("name", b"value")


def full(tier: Tier, keys: list[bytes]) -> bool:
    return all(fill(tier, keys, LARGE))


def test_a_full_store_makes_room_and_keeps_notes(start: Start) -> None:
    server = start(MooncakeServer, "--default_kv_lease_ttl=10", owners=0)
    server.owners.append(Owner(server.address, segment=32 << 20))
    tier = start(open_tier, f"mooncake:{server.address}")
    tier.set_note("epoch", b"1")
    rounds = [keys_of(10, f"round {i}") for i in range(12)]
    for batch in rounds:
        eventually(partial(full, tier, batch), 60)
    assert any(hits(tier, rounds[-1], LARGE))
    assert sum(sum(hits(tier, batch, LARGE)) for batch in rounds) <= 32
    assert tier.note("epoch") == b"1"
