"""The Redis tier against real servers: single, clustered, dead, slow, full, guarded."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any
from urllib.parse import quote

import pytest

from kvass.errors import ItemRefused, TierDown
from kvass.testing.tier_suite import eventually
from kvass.tiers import Tier, open_tier
from kvass.tiers.base import MAX_NOTE_BYTES
from kvass.tiers.codec import Header, encode_header
from kvass.tiers.redis import PIECE_BYTES
from tests.support.servers.forwarder import Forwarder
from tests.support.servers.redis import RedisServer
from tests.tiers.conftest import Start
from tests.tiers.records import (
    HUGE,
    KEYS,
    OpenAt,
    Raw,
    SharedSuite,
    allocating,
    down,
    fill,
    hits,
    keys_of,
    works,
)

numbers = count()
SERVER = RedisServer


class TestRedis(SharedSuite):
    prefixes = ("a*?[b]", "axx[b]", "za*?[b]", "a*?[b]2", "a")
    huge = HUGE

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


def test_a_value_of_another_type_is_a_miss(server: RedisServer, start: Start) -> None:
    tier = start(open_tier, f"redis:{server.address}?prefix=type:")
    server.client().rpush(b"type:r:" + KEYS[3], "of another type")
    assert all(fill(tier, KEYS[:3]))
    assert hits(tier, KEYS[:4]) == [True] * 3 + [False]
    tier.clear()


def test_records_expire_if_told_so(server: RedisServer, start: Start) -> None:
    tier = start(open_tier, f"redis:{server.address}?prefix=ttl:&ttl_s=1000")
    assert all(fill(tier, KEYS[:1]))
    left = server.client().ttl(b"ttl:r:" + KEYS[0])
    assert isinstance(left, int)
    assert 0 < left <= 1000


def test_a_server_that_dies_and_comes_back(start: Start) -> None:
    server = start(RedisServer)
    tier = start(open_tier, f"redis:{server.address}?timeout_s=2")
    assert all(fill(tier, KEYS))
    server.kill()
    assert all("redis:" in text for text in down(tier))
    server.start()
    assert not any(hits(tier, KEYS))
    assert works(tier)


def test_a_server_that_stands_still(start: Start) -> None:
    server = start(RedisServer)
    tier = start(open_tier, f"redis:{server.address}?timeout_s=1")
    assert all(fill(tier, KEYS))
    server.pause(True)
    with pytest.raises(TierDown, match="imeout"):
        hits(tier, KEYS)
    server.pause(False)
    assert all(hits(tier, KEYS))


DEMOTED: dict[str, tuple[tuple[str, ...], Callable[[Tier], object]]] = {
    "READONLY|read only": (("REPLICAOF", "127.0.0.1", "1"), lambda tier: fill(tier, KEYS)),
    "MASTERDOWN|Link with MASTER": (("REPLICAOF", "127.0.0.1", "1"), lambda tier: hits(tier, KEYS)),
    "NOREPLICAS": (("CONFIG", "SET", "min-replicas-to-write", "1"), lambda tier: fill(tier, KEYS)),
    "READONLY|read.only": (
        ("REPLICAOF", "127.0.0.1", "1"),
        lambda tier: tier.set_note("epoch", b"7"),
    ),
}
"""What a server says that others have replaced; what makes it say so; and to whom."""


@pytest.mark.parametrize("says", DEMOTED)
def test_a_failover_behind_one_address(server: RedisServer, start: Start, says: str) -> None:
    """Connections stay with the server that they began with, which answers for ever. Two threads
    have one each. The next try is with the new server."""
    old, new = start(RedisServer, "--replica-serve-stale-data", "no"), server
    front = start(Forwarder, old.socket)
    tier = start(open_tier, f"redis:127.0.0.1:{front.port}?prefix={quote(says)}:")
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda _: works(tier), range(2)))
    demote, ask = DEMOTED[says]
    old.client().execute_command(*demote)
    front.target = new.socket
    with pytest.raises(TierDown, match=says):
        ask(tier)
    assert works(tier)
    eventually(lambda: len(old.client().client_list()) == 1, 10)  # this one: the tier has left it
    assert new.client().exists(f"{says}:r:".encode() + KEYS[0])


class Demoted(socketserver.StreamRequestHandler):
    """Answers every command with ``server.says``."""

    def handle(self) -> None:
        while head := self.rfile.readline():
            for _ in range(int(head[1:])):
                self.rfile.read(int(self.rfile.readline()[1:]) + 2)
            self.wfile.write(b"-%s\r\n" % self.server.says.encode())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "says",
    [
        "MOVED 3999 127.0.0.1:1",
        "LOADING Redis is loading the dataset in memory",
        "CLUSTERDOWN The cluster is down",
        "NOAUTH Authentication required.",
        "ERR upstream failure",
    ],
)
def test_what_answers_only_this_is_left(server: RedisServer, start: Start, says: str) -> None:
    """However long it lives: the next try is with who is there now."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Demoted) as other:
        other.says = says  # type: ignore[attr-defined]
        other.daemon_threads = True  # they end with their connections
        threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
        there = "127.0.0.1", other.server_address[1]
        front = start(Forwarder, there)
        tier = start(open_tier, f"redis:127.0.0.1:{front.port}?prefix={says[:3]}:")
        asks: list[Callable[[], object]] = [
            lambda: fill(tier, KEYS),
            lambda: hits(tier, KEYS),
            lambda: tier.probe(KEYS),
        ]
        for ask in asks:
            with pytest.raises(TierDown):
                ask()
            front.target = server.socket
            assert works(tier)
            front.target = there
            front.cut()
        other.shutdown()


def test_wrong_credentials_are_said_and_right_ones_work(start: Start) -> None:
    server = start(RedisServer, "--requirepass", "s3cr&t")
    for wrong in ("", "&password=no"):
        tier = start(open_tier, f"redis:{server.address}?db=0{wrong}")
        assert all("uthentication" in text or "password" in text for text in down(tier))
    tier = start(open_tier, f"redis:{server.address}?password=s3cr%26t")
    assert works(tier)


def test_a_clear_without_the_right_to_list_says_so(start: Start) -> None:
    server = start(RedisServer)
    client: Any = server.client()
    client.execute_command("ACL SETUSER me on >s3cret ~* +@all -scan -keys")
    tier = start(open_tier, f"redis:{server.address}?username=me&password=s3cret")
    assert works(tier)
    with pytest.raises(ItemRefused, match=r"permission.*scan"):  # stores go on
        tier.clear()
    assert all(hits(tier, KEYS))


@pytest.mark.parametrize("command", ["strlen", "getrange", "exists"])
def test_a_command_that_may_not_be_given_is_said(start: Start, command: str) -> None:
    """By the check: a probe of which all is refused is a miss, and every row is stored again."""
    server = start(RedisServer)
    client: Any = server.client()
    client.execute_command(f"ACL SETUSER me on >s3cret ~* +@all -{command}")
    tier = start(open_tier, f"redis:{server.address}?username=me&password=s3cret")
    asks: list[Callable[[], object]] = [tier.check_store, lambda: tier.note("epoch")]
    asks += [lambda: tier.probe(KEYS)] if command == "strlen" else []
    for ask in asks:
        with pytest.raises(TierDown, match=f"permission.*{command}"):
            ask()


def test_a_clear_that_may_delete_some_says_so(start: Start) -> None:
    server = start(RedisServer)
    mine = "~kvass:n:*", "~kvass:r:*1"
    client: Any = server.client()
    client.execute_command("ACL", "SETUSER", "me", "on", ">s3cret", "+@all", *mine)
    tier = start(open_tier, f"redis:{server.address}?username=me&password=s3cret")
    writer = start(open_tier, f"redis:{server.address}?compress=off")
    assert all(fill(writer, KEYS))
    with pytest.raises(ItemRefused, match="permission"):
        tier.clear()
    assert sum(hits(writer, KEYS)) >= 9
    writer.clear()
    assert not any(writer.probe(KEYS))


def test_a_full_server_refuses_and_serves(start: Start) -> None:
    server = start(RedisServer, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    tier = start(open_tier, f"redis:{server.address}?compress=off")
    many = keys_of(400)
    stored = fill(tier, many)
    assert 10 < sum(stored) < 400
    with pytest.raises(TierDown, match="memory"):
        fill(tier, keys_of(3, "more"), (400_000,))  # it frees a little when its client is idle
    assert hits(tier, many) == stored
    server.client().config_set("maxmemory-policy", "allkeys-lru")
    assert all(fill(tier, keys_of(100, "newer")))
    assert sum(hits(tier, keys_of(100, "newer"))) > 0


NO_WRITES: dict[str, tuple[str, ...]] = {
    "memory": ("CONFIG", "SET", "maxmemory", "1kb"),
    "read only": ("REPLICAOF", "127.0.0.1", "1"),
    "NOREPLICAS": ("CONFIG", "SET", "min-replicas-to-write", "1"),
}


@pytest.mark.parametrize("why", NO_WRITES)
def test_a_server_that_takes_no_writes_is_read(start: Start, why: str) -> None:
    """With and without a note of an earlier check: a kvass of before it had checks wrote none."""
    server = start(RedisServer)
    tier = start(open_tier, f"redis:{server.address}?compress=off")
    tier.set_note("epoch", b"7")
    tier.check_store()
    assert all(fill(tier, KEYS))
    server.client().execute_command(*NO_WRITES[why])
    for _ in range(2):
        tier.check_store()
        tier.check_store(whole=False)
        assert tier.note("epoch") == b"7"
        assert tier.note("none") is None
        assert all(tier.probe(KEYS))
        assert all(hits(tier, KEYS))
        with pytest.raises(ItemRefused, match=why):
            tier.set_note("epoch", b"8")
        with pytest.raises(TierDown, match=why) as caught:
            fill(tier, KEYS)
        assert not isinstance(caught.value, ItemRefused)
        if why == "memory":
            server.client().delete("kvass:n:check")
    if why == "memory":
        tier.clear()


def test_a_note_of_any_size_is_none_and_is_replaced(server: RedisServer, start: Start) -> None:
    tier = start(open_tier, f"redis:{server.address}?prefix=note:")
    client: Any = server.client()
    for name, value in (("long", bytes(MAX_NOTE_BYTES + 1)), ("huge", bytes(HUGE))):
        client.set(f"note:n:{name}", value)
        with allocating(HUGE // 2):
            assert tier.note(name) is None
        tier.set_note(name, bytes(MAX_NOTE_BYTES))
        assert tier.note(name) == bytes(MAX_NOTE_BYTES)


def test_what_cannot_be_a_record_is_not_found_and_is_replaced(
    server: RedisServer, start: Start
) -> None:
    """A store asks first what is there."""
    tier = start(open_tier, f"redis:{server.address}?prefix=odd:&compress=off")
    client: Any = server.client()
    client.rpush(b"odd:r:" + KEYS[0], "a list")
    client.set(b"odd:r:" + KEYS[1], b"")
    client.setrange(b"odd:r:" + KEYS[2], 2 * PIECE_BYTES, b"x")
    assert fill(tier, KEYS[3:5]) == [True] * 2
    assert tier.probe(KEYS[:5]) == hits(tier, KEYS[:5]) == [False] * 3 + [True] * 2
    kind, longer = sorted(tier.report()["refusals"])
    assert "WRONGTYPE" in kind
    assert "longer" in longer
    assert works(tier)
    tier.clear()


def test_other_lengths_are_no_damage(server: RedisServer, start: Start) -> None:
    """Although only the beginning of a longer record is read."""
    tier = start(open_tier, f"redis:{server.address}?prefix=lengths:")
    assert all(fill(tier, KEYS[:2], (90_000, 10)))
    assert hits(tier, KEYS[:2], (9000,)) == [False] * 2
    assert hits(tier, KEYS[:2], (90_000, 10)) == [True] * 2


def test_calls_that_run_when_another_one_fails_go_on(server: RedisServer, start: Start) -> None:
    tier = start(open_tier, f"redis:{server.address}?prefix=running:&compress=off")
    assert works(tier)
    with ThreadPoolExecutor(3) as pool:
        asks = [pool.submit(lambda: all(hits(tier, KEYS))) for _ in range(20)]
        while not all(ask.done() for ask in asks):
            tier._renew()
    assert all(ask.result() for ask in asks)


def test_a_header_that_promises_pieces_without_end(server: RedisServer, start: Start) -> None:
    tier = start(open_tier, f"redis:{server.address}?prefix=endless:")
    client: Any = server.client()
    client.set(b"endless:r:" + KEYS[0], encode_header(Header(KEYS[0], (1 << 62,), 0, 0)))
    assert hits(tier, KEYS[:1]) == [False]
    assert all(fill(tier, KEYS[:1]))
    tier.delete(KEYS[:1])
