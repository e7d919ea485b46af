"""What a tier on a server is measured against: the same bytes, without the tier.

Law of this file: nothing of ours is in these paths. No header, no checksum, no index, and no more
threads than the tier has: the client library's own calls, in the same process, to the same server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from kvass.errors import TierDown
from kvass.tiers.base import Buffer, Tier
from kvass.tiers.url import TierUrl
from kvass.transfer.base import U8Array


class RedisLoop:
    """``set`` and ``get`` of one value after the other."""

    names = ("redis_put_vs_client", "redis_get_vs_client")

    def __init__(self, client: Any, prefix: str) -> None:
        self._client, self._prefix = client, prefix

    def put(self, data: Sequence[Buffer]) -> None:
        for i, value in enumerate(data):
            self._client.set(f"{self._prefix}raw:{i}", value.data)

    def get(self, into: Sequence[Buffer]) -> None:
        for i, value in enumerate(into):
            assert len(self._client.get(f"{self._prefix}raw:{i}")) == len(value), "it is gone"

    def close(self) -> None:
        for name in list(self._client.scan_iter(match=f"{self._prefix}*", count=1000)):
            self._client.unlink(name)
        self._client.close()


class ObjectLoop:
    """``put`` and ``get`` of obstore, by as many threads as the tier has connections."""

    def __init__(self, scheme: str, store: Any, prefix: str, connections: int) -> None:
        self.names = (f"{scheme}_put_vs_client", f"{scheme}_get_vs_client")
        self._store, self._prefix = store, prefix
        self._pool = ThreadPoolExecutor(connections, "bench-raw")

    def put(self, data: Sequence[Buffer]) -> None:
        import obstore

        def one(i: int) -> None:
            obstore.put(self._store, self._name(i), data[i].tobytes(), use_multipart=False)

        list(self._pool.map(one, range(len(data))))

    def get(self, into: Sequence[Buffer]) -> None:
        import obstore

        def one(i: int) -> None:
            obstore.get(self._store, self._name(i)).bytes()

        list(self._pool.map(one, range(len(into))))

    def close(self) -> None:
        import obstore

        for found in obstore.list(self._store, self._prefix):
            for one in found:
                obstore.delete(self._store, one["path"])
        self._pool.shutdown()

    def _name(self, i: int) -> str:
        return f"{self._prefix}/raw/{i}"


class MooncakeLoop:
    """``put_from`` and ``get_into`` of one object after the other, from and to ``memory``."""

    names = ("mooncake_put_vs_own", "mooncake_get_vs_own")

    def __init__(self, client: Any, prefix: str, memory: U8Array) -> None:
        self._client, self._prefix, self._memory = client, prefix, memory
        self._count = 0
        if code := client.register_buffer(memory.ctypes.data, len(memory)):
            raise TierDown(f"mooncake: memory cannot be registered: error {code}")

    def put(self, data: Sequence[Buffer]) -> None:
        self._count = len(data)
        for i, value in enumerate(data):
            code = self._client.put_from(self._name(i), value.ctypes.data, len(value))
            if code != 0:
                raise TierDown(f"mooncake: put_from: error {code} of the library")

    def get(self, into: Sequence[Buffer]) -> None:
        for i, value in enumerate(into):
            code = self._client.get_into(self._name(i), value.ctypes.data, len(value))
            if code != len(value):
                raise TierDown(f"mooncake: get_into: error {code} of the library")

    def forget(self) -> None:
        """Remove what was put: a put of a name that is there does nothing."""
        self._client.batch_remove([self._name(i) for i in range(self._count)], True)

    def close(self) -> None:
        self._client.remove_by_regex(f"^{self._prefix}", True)
        self._client.unregister_buffer(self._memory.ctypes.data)

    def _name(self, i: int) -> str:
        return f"{self._prefix}raw{i}"


def _plain_client(client: Any) -> Any:
    """A client of the same server, with nothing that the tier has changed about its connections."""
    redis = import_module("redis")
    pool = getattr(client, "connection_pool", None)
    if pool is None:  # a cluster's
        return client
    options = {k: v for k, v in pool.connection_kwargs.items() if k != "command_packer"}
    plain = redis.ConnectionPool(connection_class=pool.connection_class, **options)
    return redis.Redis(connection_pool=plain)


@contextmanager
def library_trouble(scheme: str) -> Iterator[None]:
    """What the library of a server raises is a ``TierDown`` here."""
    kinds: tuple[type[BaseException], ...] = ()
    if scheme == "redis":
        kinds = (import_module("redis").RedisError,)
    elif scheme in ("s3", "gcs", "azure"):
        kinds = (import_module("obstore.exceptions").BaseError,)
    try:
        yield
    except kinds as error:
        raise TierDown(f"{scheme}: {' '.join(str(error).split())[:300]}") from None


def of(url: TierUrl, tier: Tier, memory: U8Array) -> RedisLoop | ObjectLoop | MooncakeLoop:
    """What ``tier``, which ``url`` names, is measured against. Raises ``TierDown``."""
    mine: Any = tier
    if url.scheme == "redis":
        return RedisLoop(_plain_client(mine._connected()), url.options["prefix"])
    if url.scheme == "mooncake":
        return MooncakeLoop(mine._mooncake.client(), url.options["prefix"], memory)
    prefix = url.where.removeprefix("//").partition("/")[2]
    connections = int(url.options.get("connections", "32"))
    return ObjectLoop(url.scheme, mine._store, prefix, connections)
