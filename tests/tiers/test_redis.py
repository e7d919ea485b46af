"""The Redis tier against real servers: single, clustered, dead, slow, full, guarded."""

from __future__ import annotations

from itertools import count
from typing import Any
from urllib.parse import quote

import pytest

from kvass.errors import TierDown
from kvass.tiers import open_tier
from tests.support.servers.redis import RedisServer
from tests.tiers.conftest import Start
from tests.tiers.records import KEYS, OpenAt, Raw, SharedSuite, down, fill, hits, keys_of, works

numbers = count()
SERVER = RedisServer


class TestRedis(SharedSuite):
    prefixes = ("a*?[b]", "axx[b]", "za*?[b]", "a*?[b]2", "a")

    @pytest.fixture
    def open_at(self, server: RedisServer) -> OpenAt:
        return lambda prefix: open_tier(f"redis:{server.address}?prefix={quote(prefix)}:")

    @pytest.fixture
    def raw(self, server: RedisServer) -> Raw:
        client: Any = server.client()
        return Raw(
            lambda prefix, key: client.get(prefix.encode() + b":r:" + key),
            lambda prefix, key, value: client.set(prefix.encode() + b":r:" + key, value),
        )


def test_a_value_of_another_type_is_a_miss(server: RedisServer) -> None:
    tier = open_tier(f"redis:{server.address}?prefix=type:")
    server.client().rpush(b"type:r:" + KEYS[3], "of another type")
    assert all(fill(tier, KEYS[:3]))
    assert hits(tier, KEYS[:4]) == [True] * 3 + [False]
    tier.clear()
    tier.close()


def test_records_expire_if_told_so(server: RedisServer) -> None:
    tier = open_tier(f"redis:{server.address}?prefix=ttl:&ttl_s=1000")
    assert all(fill(tier, KEYS[:1]))
    left = server.client().ttl(b"ttl:r:" + KEYS[0])
    assert isinstance(left, int)
    assert 0 < left <= 1000
    tier.close()


def test_a_server_that_dies_and_comes_back(start: Start) -> None:
    server = start(RedisServer)
    tier = open_tier(f"redis:{server.address}?timeout_s=2")
    assert all(fill(tier, KEYS))
    server.kill()
    assert all("redis:" in text for text in down(tier))
    server.start()
    assert not any(hits(tier, KEYS))
    assert works(tier)
    tier.close()


def test_a_server_that_stands_still(start: Start) -> None:
    server = start(RedisServer)
    tier = open_tier(f"redis:{server.address}?timeout_s=1")
    assert all(fill(tier, KEYS))
    server.pause(True)
    with pytest.raises(TierDown, match="imeout"):
        hits(tier, KEYS)
    server.pause(False)
    assert all(hits(tier, KEYS))
    tier.close()


def test_wrong_credentials_are_said_and_right_ones_work(
    start: Start,
) -> None:
    server = start(RedisServer, "--requirepass", "s3cr&t")
    for wrong in ("", "&password=no"):
        tier = open_tier(f"redis:{server.address}?db=0{wrong}")
        assert all("uthentication" in text or "password" in text for text in down(tier))
        tier.close()
    tier = open_tier(f"redis:{server.address}?password=s3cr%26t")
    assert works(tier)
    tier.close()


def test_a_full_server_refuses_and_serves(start: Start) -> None:
    server = start(RedisServer, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
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
