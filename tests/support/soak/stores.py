"""Stores that lie: a soak whose tiers are Redis and S3, each behind an address.

- An endpoint of S3 turns into a portal, which answers everything with 200 and a page.
- Redis fails over, to a server that has an older state. Connections stay with the old one.
- Strangers set values at names of records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from random import Random
from typing import Any, Final

import redis

from tests.support.servers.forwarder import Forwarder
from tests.support.servers.front import LOGIN, PAGE, Front
from tests.support.servers.redis import RedisServer
from tests.support.servers.s3 import S3Server, credentials
from tests.support.soak.world import Mischief, World, cleared

PREFIX: Final = "soak"
HUGE: Final = 16 << 20
"""Bytes of a stranger's value: hundreds of records."""
SOME: Final = 24
"""So many records at a time get a stranger's value."""


class StoresWorld(World):
    """See the top of this file. Redis has no room for all, so that rows are loaded from both."""

    def start_tiers(self) -> list[str]:
        servers = self.servers
        servers.enter_context(credentials())
        room = "--maxmemory", "96mb", "--maxmemory-policy", "allkeys-lru"
        self.redis, self.standby = RedisServer(*room), RedisServer(*room)
        self.s3, self.portal = S3Server(), Front()
        self.portal.everything = PAGE
        self.redis_front, self.s3_front = Forwarder(self.redis.socket), Forwarder(self.s3_address)
        for one in (self.redis, self.standby, self.s3, self.portal):
            servers.callback(one.close)
        for front in (self.redis_front, self.s3_front):
            servers.callback(front.close)
        endpoint = self.s3.url(PREFIX).replace(f":{self.s3.port}", f":{self.s3_front.port}")
        return [
            f"redis:127.0.0.1:{self.redis_front.port}?timeout_s=2",
            f"{endpoint}&timeout_s=2&connections=4",
        ]

    @property
    def s3_address(self) -> tuple[str, int]:
        return "127.0.0.1", self.s3.port


def _stores(world: World) -> StoresWorld:
    assert isinstance(world, StoresWorld)
    return world


def s3_is_a_portal(world: World, _: int) -> Iterator[None]:
    """At its end, connections stay with the portal."""
    front = _stores(world).s3_front
    front.target = "127.0.0.1", _stores(world).portal.port
    front.cut()
    yield
    front.target = _stores(world).s3_address


def redis_fails_over(world: World, _: int) -> Iterator[None]:
    """The old server is a replica of nobody: it serves reads, and refuses writes."""
    stores = _stores(world)
    old, stores.redis, stores.standby = stores.redis, stores.standby, stores.redis
    client: Any = stores.redis.client()
    client.execute_command("REPLICAOF", "NO", "ONE")
    client = old.client()
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    stores.redis_front.target = stores.redis.socket
    yield


def strangers_in_redis(world: World, number: int) -> Iterator[None]:
    client: Any = world.redis.client()
    names = sorted(client.keys("kvass:r:*"))
    if len(names) < 2 * SOME:
        return

    def listed(name: bytes) -> None:
        client.delete(name)
        client.rpush(name, "a list")

    odd: list[Callable[[bytes], object]] = [
        listed,
        lambda name: client.setrange(name, HUGE, "x"),
        lambda name: client.copy(names[0], name, replace=True),
        lambda name: client.set(name, LOGIN),
        lambda name: client.set(name, b""),
        lambda name: client.set(name, client.getrange(name, 0, -2)),
    ]
    for name, change in zip(Random(number).sample(names[1:], SOME), cycle(odd), strict=False):
        with suppress(redis.ResponseError):  # it is a list already
            change(name)
    yield


def strangers_in_s3(world: World, number: int) -> Iterator[None]:
    s3 = _stores(world).s3
    names = s3.names(f"{PREFIX}/records/")
    if len(names) < 2 * SOME:
        return
    odd: list[Callable[[str], bytes]] = [
        lambda name: s3.get(name) + bytes(HUGE),
        lambda name: s3.get(names[0]),
        lambda name: LOGIN,
        lambda name: b"",
        lambda name: s3.get(name)[:-1],
    ]
    for name, value in zip(Random(number).sample(names[1:], SOME), cycle(odd), strict=False):
        with suppress(OSError):  # it was deleted meanwhile
            s3.put(name, value(name))
    yield


MISCHIEF: Final[dict[str, tuple[str, Mischief]]] = {
    "s3 is a portal": ("s3", s3_is_a_portal),
    "redis fails over": ("redis", redis_fails_over),
    "strangers in redis": ("redis", strangers_in_redis),
    "strangers in s3": ("s3", strangers_in_s3),
    "cleared": ("daemon", cleared),
}
"""As ``world.MISCHIEF``."""
