"""Records that are too large for one value: in pieces, on one server and on several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from kvass.errors import TierDown
from kvass.testing import TierSuite
from kvass.testing.tier_suite import MakeTier, data_of, room_for, same
from kvass.tiers import open_tier
from kvass.tiers import redis as redis_tier
from kvass.tiers.base import Tier
from kvass.tiers.codec import Header
from kvass.tiers.redis import RedisTier
from tests.support.servers.redis import RedisCluster, RedisServer
from tests.tiers.conftest import Start
from tests.tiers.records import fill, hits, keys_of

PIECE = 4000
SHAPE = (5000, 0, 17, 9000)
"""Four pieces, the second one of bytes of three shards."""
KEYS = keys_of(6)
SERVER = RedisServer
numbers = count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    made = RedisCluster()
    yield made
    made.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_tier, "PIECE_BYTES", PIECE)


class TestPieces(TierSuite):
    """On a cluster: ``test_redis.py`` runs the suite on one server, with whole records."""

    @pytest.fixture
    def make_tier(self, cluster: RedisCluster, small_pieces: None) -> MakeTier:
        url = f"redis:{cluster.address}?cluster=yes&prefix=suite{next(numbers)}:"
        return lambda: open_tier(url)

    def test_one_key_torn_by_many_is_never_mixed(  # type: ignore[override]  # a fixture more
        self, tier: Tier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Records of five pieces; with 42 it takes 15 s."""
        monkeypatch.setattr(redis_tier, "PIECE_BYTES", 10 * PIECE)
        super().test_one_key_torn_by_many_is_never_mixed(tier)


@pytest.fixture
def tier(server: RedisServer, small_pieces: None) -> Iterator[RedisTier]:
    """The only one on the module's server, which is empty."""
    server.client().flushall()
    made = opened(server)
    yield made
    made.close()


def opened(server: RedisServer, options: str = "") -> RedisTier:
    tier = open_tier(f"redis:{server.address}?timeout_s=5&compress=off{options}")
    assert isinstance(tier, RedisTier)
    return tier


def names(server: RedisServer, kind: bytes = b"p") -> list[bytes]:
    found: Any = server.client().keys(b"kvass:" + kind + b":*")
    return sorted(found)


# ---------------------------------------------------------------- whole


def test_pieces_as_they_come(server: RedisServer) -> None:
    tier = open_tier(f"redis:{server.address}?prefix=huge:&compress=off")
    shape = (1000, 20 << 20)
    assert all(fill(tier, KEYS[:1], shape))
    client: Any = server.client()
    assert len(client.keys(b"huge:p:*")) == 3
    assert all(hits(tier, KEYS[:1], shape))
    tier.clear()
    assert client.keys(b"huge:*") == [b"huge:n:check"]
    tier.close()


def test_nothing_is_left_of_what_was_replaced(server: RedisServer, tier: RedisTier) -> None:
    for version, shape in enumerate([(100,), SHAPE, SHAPE, (30_000,), SHAPE]):
        assert all(fill(tier, KEYS[:2] * 2, shape, version))
        assert all(hits(tier, KEYS[:2], shape, 5))
        assert len(names(server)) == {SHAPE: 8, (30_000,): 16, (100,): 0}[shape]
    into = room_for(SHAPE)
    assert tier.load(KEYS[:1], [into]) == [True]
    assert same(into, data_of(KEYS[0], SHAPE, 4))


def test_pieces_live_on_every_node(cluster: RedisCluster, small_pieces: None) -> None:
    tier = open_tier(f"redis:{cluster.address}?cluster=yes&prefix=kvass:&compress=off")
    assert all(fill(tier, KEYS, (50_000,)))
    assert all(names(node) for node in cluster.nodes)
    assert all(hits(tier, KEYS, (50_000,)))
    client: Any = cluster.nodes[1].client()
    client.delete(names(cluster.nodes[1])[0])
    assert hits(tier, KEYS, (50_000,)).count(False) == 1
    tier.delete(KEYS)
    assert not any(names(node, b"[rp]") for node in cluster.nodes)
    tier.close()


# ---------------------------------------------------------------- lost, damaged, expired


def change(client: Any, name: bytes, how: str) -> None:
    value = client.get(name)
    if how == "lost":
        client.delete(name)
    elif how == "flipped":
        client.set(name, bytes([value[0] ^ 1]) + value[1:])
    elif how == "shorter":
        client.set(name, value[:-1])
    else:
        client.set(name, value + b"\0")


@pytest.mark.parametrize("how", ["lost", "flipped", "shorter", "longer"])
@pytest.mark.parametrize("which", range(4))
def test_a_piece_that_is_not_right_is_a_miss_of_its_record(
    server: RedisServer, tier: RedisTier, which: int, how: str
) -> None:
    assert all(fill(tier, KEYS[:1], SHAPE))
    name = names(server)[which]
    assert all(fill(tier, KEYS[1:], SHAPE))
    change(server.client(), name, how)
    assert tier.probe(KEYS) == [True] * 6
    assert hits(tier, KEYS, SHAPE) == [False] + [True] * 5
    assert tier.probe(KEYS) == [False] + [True] * 5
    assert len(names(server)) == 20, "pieces of what was forgotten are left"
    assert all(fill(tier, KEYS[:1], SHAPE))
    assert all(hits(tier, KEYS, SHAPE))


def test_pieces_that_changed_places_are_a_miss(server: RedisServer, tier: RedisTier) -> None:
    client: Any = server.client()
    assert all(fill(tier, KEYS[:1], SHAPE))
    first, second, *_ = names(server)
    client.rename(first, "kept")
    client.rename(second, first)
    client.rename("kept", second)
    assert hits(tier, KEYS[:1], SHAPE) == [False]
    assert all(fill(tier, KEYS[:2], SHAPE))
    client.copy(b"kvass:r:" + KEYS[0], b"kvass:r:" + KEYS[1], replace=True)
    assert hits(tier, KEYS[:2], SHAPE) == [True, False]  # whole, but another's


# ---------------------------------------------------------------- two at once


@pytest.mark.parametrize("version", [0, 1])
def test_a_damaged_record_that_is_replaced_before_it_is_deleted(
    server: RedisServer, tier: RedisTier, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Other bytes stay. The same bytes have the names of the damaged ones, and go with them."""
    other = opened(server)
    assert all(fill(tier, KEYS[:1], SHAPE))
    server.client().delete(names(server)[0])
    real = tier._forget

    def forget(key: bytes, header: Header | None) -> None:
        assert fill(other, KEYS[:1], SHAPE, version) == [True]
        real(key, header)

    with monkeypatch.context() as patch:
        patch.setattr(tier, "_forget", forget)
        assert hits(tier, KEYS[:1], SHAPE) == [False]
    assert hits(tier, KEYS[:1], SHAPE, 2) == [version == 1]
    assert fill(tier, KEYS[:1], SHAPE) == [True]
    assert hits(other, KEYS[:1], SHAPE) == [True]
    other.close()


# ---------------------------------------------------------------- half stored


def test_pieces_expire_with_their_record(server: RedisServer, small_pieces: None) -> None:
    client: Any = server.client()
    client.flushall()
    tier = opened(server, "&ttl_s=1000")
    assert all(fill(tier, KEYS, SHAPE))
    assert all(0 < client.ttl(name) <= 1000 for name in names(server, b"[rp]"))
    assert all(hits(tier, KEYS, SHAPE))
    tier.close()


def test_a_record_that_the_server_has_no_room_for(small_pieces: None, start: Start) -> None:
    server = start(RedisServer, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    tier = start(opened, server)
    assert all(fill(tier, KEYS, SHAPE))
    before = names(server)
    with pytest.raises(TierDown, match="memory"):
        fill(tier, [b"large"], (4 << 20,))
    assert names(server) == before
    assert all(hits(tier, KEYS, SHAPE))
    server.client().config_set("maxmemory-policy", "allkeys-lru")
    fill(tier, [b"large"], (4 << 20,))
    assert hits(tier, [b"large"], (4 << 20,)) == [False]  # its pieces make room for each other
    assert tier.probe([b"large"]) == [False]
    assert all(fill(tier, KEYS, SHAPE))
    assert all(hits(tier, KEYS, SHAPE))


@pytest.mark.parametrize("ask", [fill, hits])
def test_a_server_that_dies_between_two_pieces(
    small_pieces: None,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[..., list[bool]],
) -> None:
    server = start(RedisServer)
    tier = start(opened, server)
    assert all(fill(tier, KEYS, SHAPE))
    real = tier._ask_one
    asked = count()

    def dying(*command: Any) -> Any:
        if next(asked) == 6:
            server.kill()
        return real(*command)

    with monkeypatch.context() as patch:
        patch.setattr(tier, "_ask_one", dying)
        assert ask(tier, KEYS, SHAPE) == [True] + [False] * 5
    server.start()
    assert not any(hits(tier, KEYS, SHAPE))
