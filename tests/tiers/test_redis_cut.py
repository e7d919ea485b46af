"""Records that are too large for one value: in pieces, on one server and on several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvass.errors import TierDown
from kvass.testing import TierSuite
from kvass.testing.tier_suite import MakeTier, data_of, fetch, room_for, same
from kvass.tiers import open_tier
from kvass.tiers import redis as redis_tier
from kvass.tiers.codec import Header
from kvass.tiers.cut import Head, cut, decode_head
from kvass.tiers.redis import RedisTier
from tests.support.servers.redis import RedisCluster, RedisServer
from tests.tiers.records import fill, hits, keys_of

numbers = count()
PIECE = 4000
SHAPE = (5000, 0, 17, 9000)
"""Four pieces, the second one of bytes of three shards."""
KEYS = keys_of(6)

OpenTier = Callable[..., RedisTier]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    made = RedisServer()
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    made = RedisCluster()
    yield made
    made.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_tier, "_GROUP_BYTES", PIECE)


@pytest.mark.usefixtures("small_pieces")
class TestCut(TierSuite):
    @pytest.fixture
    def make_tier(self, server: RedisServer) -> MakeTier:
        url = f"redis:{server.address}?prefix=test{next(numbers)}:"
        return lambda: open_tier(url)


@pytest.mark.usefixtures("small_pieces")
class TestCutCluster(TierSuite):
    @pytest.fixture
    def make_tier(self, cluster: RedisCluster) -> MakeTier:
        url = f"redis:{cluster.address}?cluster=yes&prefix=test{next(numbers)}:"
        return lambda: open_tier(url)


@pytest.fixture
def own(small_pieces: None) -> Iterator[Callable[..., tuple[RedisServer, RedisTier]]]:
    """A server of the test's own, empty, and a tier on it."""
    made: list[RedisServer] = []
    tiers: list[RedisTier] = []

    def start(*options: str, url: str = "") -> tuple[RedisServer, RedisTier]:
        made.append(RedisServer(*options))
        tier = open_tier(f"redis:{made[-1].address}?timeout_s=5{url}")
        assert isinstance(tier, RedisTier)
        tiers.append(tier)
        return made[-1], tier

    yield start
    for tier in tiers:
        tier.close()
    for one in made:
        one.close()


Own = Callable[..., tuple[RedisServer, RedisTier]]


def names(server: RedisServer, kind: bytes = b"p") -> list[bytes]:
    found: Any = server.client().keys(b"kvass:" + kind + b":*")
    return sorted(found)


# ---------------------------------------------------------------- whole


@pytest.mark.parametrize("size", [1, 7, 4000, 4999, 5000, 5001, 14_017, 99_999])
def test_pieces_are_the_shards_bytes_in_order(size: int) -> None:
    shards = data_of(b"key", SHAPE)
    pieces = [bytes(piece) for piece in cut(shards, size)]
    assert b"".join(pieces) == b"".join(shard.tobytes() for shard in shards)
    assert {len(piece) for piece in pieces[:-1]} <= {size}
    head = Head(Header(b"key", SHAPE, 0, 1), bytes(16), size)
    assert [length for _, length in head.pieces()] == [len(piece) for piece in pieces]


def test_a_head_that_is_damaged_is_none() -> None:
    raw = Head(Header(b"key", SHAPE, 0, 1), bytes(range(16)), PIECE).encode()
    assert decode_head(raw) == Head(Header(b"key", SHAPE, 0, 1), bytes(range(16)), PIECE)
    for at in range(len(raw)):
        bad = bytearray(raw)
        bad[at] ^= 1 << at % 8
        assert decode_head(bytes(bad)) is None, at
        assert decode_head(raw[:at]) is None
    assert decode_head(raw + b"\0") is None


def test_a_record_larger_than_any_value(server: RedisServer) -> None:
    """As it comes: the server takes values of 512 MiB, and none of ours is a tenth of that."""
    tier = open_tier(f"redis:{server.address}?prefix=huge:&timeout_s=60")
    shard = np.arange(65 << 20, dtype=np.uint64).view(np.uint8)  # 520 MiB, no two words alike
    assert tier.store([b"huge"], [[shard[:1000], shard]]) == [True]
    client: Any = server.client()
    assert len(client.keys(b"huge:p:*")) == 66
    into = [np.zeros(1000, np.uint8), np.zeros_like(shard)]
    assert tier.load([b"huge"], [into]) == [True]
    assert (into[1] == shard).all()
    assert (into[0] == shard[:1000]).all()
    tier.clear()
    assert client.keys(b"huge:*") == []
    tier.close()


@pytest.mark.parametrize("end", ["delete", "clear"])
def test_nothing_is_left_of_what_was_deleted(own: Own, end: str) -> None:
    server, tier = own()
    assert all(fill(tier, KEYS, SHAPE))
    assert all(fill(tier, [b"small"], (10,)))
    assert len(names(server)) == 4 * len(KEYS)
    if end == "delete":
        tier.delete([*KEYS, b"small"])
    else:
        tier.clear()
    assert names(server, b"[rp]") == []


def test_nothing_is_left_of_what_was_replaced(own: Own) -> None:
    server, tier = own()
    for version, shape in enumerate([(100,), SHAPE, SHAPE, (30_000,), SHAPE]):
        assert all(fill(tier, KEYS[:2] * 2, shape, version))
        assert all(hits(tier, KEYS[:2], shape, 5))
        assert len(names(server)) == {SHAPE: 8, (30_000,): 16, (100,): 0}[shape]
    into = room_for(SHAPE)
    assert tier.load(KEYS[:1], [into]) == [True]
    assert same(into, data_of(KEYS[0], SHAPE, 4))


def test_pieces_live_on_every_node(cluster: RedisCluster, small_pieces: None) -> None:
    tier = open_tier(f"redis:{cluster.address}?cluster=yes&prefix=kvass:")
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
    elif how == "expired":
        client.pexpire(name, 1)
        while client.exists(name):
            pass
    elif how == "flipped":
        client.set(name, bytes([value[0] ^ 1]) + value[1:])
    elif how == "shorter":
        client.set(name, value[:-1])
    else:
        client.set(name, value + b"\0")


@pytest.mark.parametrize("how", ["lost", "expired", "flipped", "shorter", "longer"])
@pytest.mark.parametrize("which", range(4))
def test_a_piece_that_is_not_right_is_a_miss_of_its_record(own: Own, which: int, how: str) -> None:
    server, tier = own()
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


def test_pieces_that_changed_places_are_a_miss(own: Own) -> None:
    server, tier = own()
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


def test_other_lengths_are_a_miss_and_it_stays(own: Own) -> None:
    _, tier = own()
    assert all(fill(tier, KEYS, SHAPE))
    for other in [(5000, 0, 9000, 17), (14_017,), SHAPE[:-1]]:
        assert fetch(tier, KEYS[0], other) is None
    assert all(hits(tier, KEYS, SHAPE))


# ---------------------------------------------------------------- replaced under a reader


def test_a_record_that_is_replaced_while_it_is_read(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader has the head and half of the pieces; what it gets is the new one, whole."""
    server, tier = own()
    assert all(fill(tier, KEYS, SHAPE))
    other = open_tier(f"redis:{server.address}")
    real = tier._ask_one
    asked = count()

    def slow(*command: Any) -> Any:
        if command[0] == "GET" and next(asked) == 2:
            assert all(fill(other, KEYS[:1], SHAPE, 1))
        return real(*command)

    monkeypatch.setattr(tier, "_ask_one", slow)
    into = room_for(SHAPE)
    assert tier.load(KEYS[:1], [into]) == [True]
    assert same(into, data_of(KEYS[0], SHAPE, 1))
    assert all(hits(tier, KEYS, SHAPE, 2))
    other.close()


def test_a_record_that_is_never_left_in_peace_is_a_miss_and_stays(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, tier = own()
    assert all(fill(tier, KEYS, SHAPE))
    other = open_tier(f"redis:{server.address}")
    real = tier._ask_one

    def slow(*command: Any) -> Any:
        if command[0] == "GET" and command[1].startswith(b"kvass:p:"):
            assert all(fill(other, KEYS[:1], SHAPE, 1))
        return real(*command)

    with monkeypatch.context() as patch:
        patch.setattr(tier, "_ask_one", slow)
        assert tier.load(KEYS[:1], [room_for(SHAPE)]) == [False]
    assert all(hits(tier, KEYS, SHAPE, 2))
    assert len(names(server)) == 24
    other.close()


# ---------------------------------------------------------------- stored by two at once


def before_it_lets_them_stay(
    tier: RedisTier, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> None:
    """``act``, once the tier has put pieces and head and lets go of nothing any more."""
    real = tier._ask

    def ask(commands: list[tuple[Any, ...]]) -> list[Any]:
        if commands and commands[0][0] in ("PERSIST", "EXISTS"):
            monkeypatch.setattr(tier, "_ask", real)
            act()
        return real(commands)

    monkeypatch.setattr(tier, "_ask", ask)


@pytest.mark.parametrize("url", ["", "&ttl_s=1000"])
def test_two_that_store_the_same_at_once_both_have_it(
    own: Own, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """The other one's head replaces ours, and our pieces are gone: what stands there is as good."""
    server, tier = own(url=url)
    other = open_tier(f"redis:{server.address}?timeout_s=5{url}")
    said: list[list[bool]] = []
    before_it_lets_them_stay(tier, monkeypatch, lambda: said.append(fill(other, KEYS[:1], SHAPE)))
    assert fill(tier, KEYS[:1], SHAPE) == [True]
    assert said == [[True]]
    for one in (tier, other):
        assert hits(one, KEYS[:1], SHAPE) == [True]
    assert len(names(server)) == 4, "pieces that no head tells of are left"
    other.close()


@pytest.mark.parametrize("how", ["in half", "other bytes", "nothing"])
def test_what_another_put_there_is_not_taken_for_ours(
    own: Own, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    server, tier = own()
    client: Any = server.client()
    other = open_tier(f"redis:{server.address}?timeout_s=5")

    def replace() -> None:
        if how == "nothing":
            other.delete(KEYS[:1])
            return
        assert fill(other, KEYS[:1], SHAPE, 1 if how == "other bytes" else 0) == [True]
        if how == "in half":
            client.delete(names(server)[0])

    before_it_lets_them_stay(tier, monkeypatch, replace)
    assert fill(tier, KEYS[:1], SHAPE) == [False]
    assert hits(tier, KEYS[:1], SHAPE, 2) == [how == "other bytes"]
    other.close()


@pytest.mark.parametrize("scripts", ["+eval", "-eval"])
def test_what_is_damaged_is_forgotten_with_and_without_scripts(own: Own, scripts: str) -> None:
    server, tier = own()
    client: Any = server.client()
    client.execute_command("ACL", "SETUSER", "default", scripts)
    assert all(fill(tier, KEYS, SHAPE))
    client.delete(names(server)[0])
    assert hits(tier, KEYS, SHAPE).count(False) == 1
    assert tier.probe(KEYS).count(False) == 1
    assert len(names(server)) == 20


def test_what_is_damaged_is_left_alone_once_it_was_replaced(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one stores it anew between our look at the damage and our forgetting it."""
    server, tier = own()
    other = open_tier(f"redis:{server.address}?timeout_s=5")
    assert all(fill(tier, KEYS[:1], SHAPE))
    server.client().delete(names(server)[0])
    real = tier._ask

    def ask(commands: list[tuple[Any, ...]]) -> list[Any]:
        if commands and commands[0][0] in ("EVAL", "UNLINK", "GETRANGE"):
            monkeypatch.setattr(tier, "_ask", real)
            assert fill(other, KEYS[:1], SHAPE) == [True]
        return real(commands)

    monkeypatch.setattr(tier, "_ask", ask)
    assert hits(tier, KEYS[:1], SHAPE) == [False]
    assert hits(tier, KEYS[:1], SHAPE) == [True]
    other.close()


# ---------------------------------------------------------------- half stored


def test_a_store_that_dies_leaves_nothing_for_ever(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, tier = own()
    client: Any = server.client()
    real = tier._ask_one
    asked = count()

    def dies(*command: Any) -> Any:
        if next(asked) == 2:
            raise TierDown("died")
        return real(*command)

    with monkeypatch.context() as patch:
        patch.setattr(tier, "_ask_one", dies)
        with pytest.raises(TierDown):
            fill(tier, KEYS[:1], SHAPE)
    assert len(names(server)) == 2
    assert all(0 < client.ttl(name) <= 3600 for name in names(server))
    assert tier.probe(KEYS[:1]) == [False]
    client.flushall()
    assert all(fill(tier, KEYS[:1], SHAPE))
    assert [client.ttl(name) for name in names(server, b"[rp]")] == [-1] * 5


def test_pieces_expire_with_their_record(own: Own) -> None:
    server, tier = own(url="&ttl_s=1000")
    client: Any = server.client()
    assert all(fill(tier, KEYS, SHAPE))
    assert all(0 < client.ttl(name) <= 1000 for name in names(server, b"[rp]"))
    assert all(hits(tier, KEYS, SHAPE))


def test_a_record_that_the_server_has_no_room_for(own: Own) -> None:
    server, tier = own("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    assert all(fill(tier, KEYS, SHAPE))
    before = names(server)
    with pytest.raises(TierDown, match="memory"):
        fill(tier, [b"large"], (4 << 20,))
    assert names(server) == before
    assert all(hits(tier, KEYS, SHAPE))
    server.client().config_set("maxmemory-policy", "allkeys-lru")
    assert fill(tier, [b"large"], (4 << 20,)) == [False]  # its pieces make room for each other
    assert tier.probe([b"large"]) == [False]
    assert all(fill(tier, KEYS, SHAPE))
    assert all(hits(tier, KEYS, SHAPE))


def test_a_server_that_dies_between_two_pieces(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    server, tier = own()
    real = tier._ask_one
    asked = count()

    def dying(kill_at: int, *command: Any) -> Any:
        if next(asked) == kill_at:
            server.kill()
        return real(*command)

    for ask in (fill, hits):
        assert all(fill(tier, KEYS, SHAPE))
        asked = count()
        with monkeypatch.context() as patch:
            patch.setattr(tier, "_ask_one", partial(dying, 6))
            assert ask(tier, KEYS, SHAPE) == [True] + [False] * 5
        server.start()
        assert not any(hits(tier, KEYS, SHAPE))
