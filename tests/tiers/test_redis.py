"""The Redis tier against real servers: single, clustered, dead, slow, full, guarded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from kvass.errors import TierDown
from kvass.testing.tier_suite import MakeTier
from kvass.tiers import open_tier
from tests.support.servers.redis import RedisCluster, RedisServer
from tests.tiers.records import KEYS, SharedSuite, down, fill, hits, keys_of, works

numbers = count()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    made = RedisServer()
    yield made
    made.close()


@pytest.fixture
def own_server() -> Iterator[Callable[..., RedisServer]]:
    """Servers that a test may break."""
    made: list[RedisServer] = []

    def start(*options: str) -> RedisServer:
        made.append(RedisServer(*options))
        return made[-1]

    yield start
    for one in made:
        one.close()


class TestRedis(SharedSuite):
    @pytest.fixture
    def make_tier(self, server: RedisServer) -> MakeTier:
        url = f"redis:{server.address}?prefix=test{next(numbers)}:"
        return lambda: open_tier(url)


class TestCluster(SharedSuite):
    @pytest.fixture(scope="class")
    def cluster(self) -> Iterator[RedisCluster]:
        made = RedisCluster()
        yield made
        made.close()

    @pytest.fixture
    def make_tier(self, cluster: RedisCluster) -> MakeTier:
        url = f"redis:{cluster.address}?cluster=yes&prefix=test{next(numbers)}:"
        return lambda: open_tier(url)


def test_a_clear_leaves_others_alone(server: RedisServer) -> None:
    client = server.client()
    client.set("cleare", "1")
    client.set("clear*d", "2")
    tier = open_tier(f"redis:{server.address}?prefix=clear*:")
    assert all(fill(tier, KEYS))
    tier.clear()
    assert not any(tier.probe(KEYS))
    assert client.mget("cleare", "clear*d") == [b"1", b"2"]
    tier.close()


def test_a_damaged_value_is_a_miss_and_forgotten(server: RedisServer) -> None:
    tier = open_tier(f"redis:{server.address}?prefix=damage:")
    client: Any = server.client()
    size = 0
    for at in (0, 9, 33, 60, 100, 5000, -1):
        assert all(fill(tier, KEYS))
        name = b"damage:r:" + KEYS[3]
        value = bytearray(client.get(name) or b"")
        size = len(value)
        value[at] ^= 1
        client.set(name, bytes(value))
        assert hits(tier, KEYS).count(False) == 1
        assert tier.probe(KEYS).count(False) == 1
    for cut in (0, 5, 70, 5000, size - 1, size + 1):
        assert all(fill(tier, KEYS))
        value = bytearray(client.get(name) or b"").ljust(cut, b"\0")
        client.set(name, bytes(value[:cut]))
        assert hits(tier, KEYS).count(False) == 1
    client.set(name, client.get(b"damage:r:" + KEYS[4]) or b"")
    assert hits(tier, KEYS).count(False) == 1
    client.delete(name)
    client.rpush(name, "of another type")
    assert hits(tier, KEYS).count(False) == 1
    tier.clear()
    tier.close()


def test_records_expire_if_told_so(server: RedisServer) -> None:
    tier = open_tier(f"redis:{server.address}?prefix=ttl:&ttl_s=1000")
    assert all(fill(tier, KEYS[:1]))
    left = server.client().ttl(b"ttl:r:" + KEYS[0])
    assert isinstance(left, int)
    assert 0 < left <= 1000
    tier.close()


def test_a_server_that_dies_and_comes_back(own_server: Callable[..., RedisServer]) -> None:
    server = own_server()
    tier = open_tier(f"redis:{server.address}?timeout_s=2")
    assert all(fill(tier, KEYS))
    server.kill()
    assert all("redis:" in text for text in down(tier))
    server.start()
    assert not any(hits(tier, KEYS))
    assert works(tier)
    tier.close()


def test_a_server_that_stands_still(own_server: Callable[..., RedisServer]) -> None:
    server = own_server()
    tier = open_tier(f"redis:{server.address}?timeout_s=1")
    assert all(fill(tier, KEYS))
    server.pause(True)
    with pytest.raises(TierDown, match="imeout"):
        hits(tier, KEYS)
    server.pause(False)
    assert all(hits(tier, KEYS))
    tier.close()


def test_wrong_credentials_are_said_and_right_ones_work(
    own_server: Callable[..., RedisServer],
) -> None:
    server = own_server("--requirepass", "s3cr&t")
    for wrong in ("", "&password=no"):
        tier = open_tier(f"redis:{server.address}?db=0{wrong}")
        assert all("uthentication" in text or "password" in text for text in down(tier))
        tier.close()
    tier = open_tier(f"redis:{server.address}?password=s3cr%26t")
    assert works(tier)
    tier.close()


def test_a_full_server_refuses_and_serves(own_server: Callable[..., RedisServer]) -> None:
    server = own_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    tier = open_tier(f"redis:{server.address}")
    many = keys_of(400)
    stored = fill(tier, many)
    assert 10 < sum(stored) < 400
    with pytest.raises(TierDown, match="memory"):
        fill(tier, keys_of(3, "more"))
    assert hits(tier, many) == stored
    server.client().config_set("maxmemory-policy", "allkeys-lru")
    assert all(fill(tier, keys_of(100, "newer")))
    assert sum(hits(tier, keys_of(100, "newer"))) > 0
    tier.close()


def test_nobody_there_at_the_start() -> None:
    for url in ("redis:/no/such/socket", "redis:127.0.0.1:1?cluster=yes&timeout_s=1"):
        tier = open_tier(url)
        assert len(down(tier)) == 7
        tier.close()
