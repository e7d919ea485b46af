"""What a tier is measured against: the same bytes, without the tier.

Law of this file: nothing of ours is in these paths. No header, no checksum, no index, and no more
threads than the tier has. For a disk that is a file of its own in the same folder; for a server the
client library's own calls, in the same process, to the same server.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from kvass.errors import ConfigError, TierDown
from kvass.tiers.base import Buffer, Tier
from kvass.tiers.url import TierUrl, shown
from kvass.transfer.base import U8Array
from kvass.types import PAGE

_SPARE: Final = 4
"""The raw file has a place more for every so many, as the tier under test has."""


class Counterpart(Protocol):
    """A store of the last records that were put, by their place in the list."""

    names: tuple[str, str]
    """What the ratios of a put and a get are called."""
    evicts: bool
    """Whether the tier is full in all rounds, and old records leave by themselves."""

    def put(self, data: Sequence[Buffer]) -> None:
        """Keep all of them."""
        ...

    def get(self, into: Sequence[Buffer]) -> None:
        """Fetch all of them; where the library itself says where, that is ``into``."""
        ...

    def forget(self) -> None:
        """Between rounds, and not measured: what has to go so that a put is a put."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


def places(count: int) -> int:
    """How many records a disk holds that is measured with ``count``: then the oldest leave."""
    return count + max(1, count // _SPARE)


class Crowd:
    """``threads`` threads that share a list of work: whoever is free takes the next."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "bench-raw")

    def each(self, work: Callable[[int], object], count: int) -> None:
        """``work(i)`` of every ``i`` below ``count``. Raises what it raises."""
        todo = iter(range(count))

        def some() -> None:
            for i in todo:
                work(i)

        for one in [self._pool.submit(some) for _ in range(min(self._threads, count))]:
            one.result()

    def close(self) -> None:
        self._pool.shutdown()


class RawFile:
    """A fallocated file, written and read past the page cache (``direct``: whether it can be)."""

    names = ("disk_write_vs_raw", "disk_read_vs_raw")
    evicts = True

    def __init__(self, folder: Path, size: int, count: int, threads: int) -> None:
        self._size, self._places, self._first = size, places(count), 0
        self._crowd = Crowd(threads)
        self._path = folder / "raw"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(self._path, flags | os.O_DIRECT, 0o600)
            self.direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(self._path, flags, 0o600)
            self.direct = False
        os.posix_fallocate(self._fd, 0, self._places * size)

    def fill(self) -> None:
        """Write every place once."""
        noise = np.random.default_rng(1).integers(0, 256, self._size + PAGE, np.uint8)
        noise = noise[-noise.ctypes.data % PAGE :][: self._size]
        self.put([noise] * self._places)

    def put(self, data: Sequence[Buffer]) -> None:
        self._first = (self._first + len(data)) % self._places

        def one(i: int) -> None:
            assert os.pwritev(self._fd, [data[i].data], self._at(i)) == self._size, "a short write"

        self._crowd.each(one, len(data))

    def get(self, into: Sequence[Buffer]) -> None:
        def one(i: int) -> None:
            assert os.preadv(self._fd, [into[i].data], self._at(i)) == self._size, "a short read"

        self._crowd.each(one, len(into))

    def forget(self) -> None:
        """The oldest are written over."""

    def close(self) -> None:
        self._crowd.close()
        os.close(self._fd)
        self._path.unlink()

    def _at(self, i: int) -> int:
        return (self._first + i) % self._places * self._size


class RedisLoop:
    """``set`` and ``get`` of one value after the other."""

    names = ("redis_put_vs_client", "redis_get_vs_client")
    evicts = False

    def __init__(self, client: Any, prefix: str) -> None:
        self._client, self._prefix = client, prefix

    def put(self, data: Sequence[Buffer]) -> None:
        for i, value in enumerate(data):
            self._client.set(f"{self._prefix}raw:{i}", value.data)

    def get(self, into: Sequence[Buffer]) -> None:
        for i, value in enumerate(into):
            assert len(self._client.get(f"{self._prefix}raw:{i}")) == len(value), "it is gone"

    def forget(self) -> None:
        """A set replaces."""

    def close(self) -> None:
        for name in list(self._client.scan_iter(match=f"{self._prefix}*", count=1000)):
            self._client.unlink(name)
        self._client.close()


class ObjectLoop:
    """``put`` and ``get`` of obstore, by as many threads as the tier has connections."""

    evicts = False

    def __init__(self, scheme: str, store: Any, prefix: str, connections: int) -> None:
        self.names = (f"{scheme}_put_vs_client", f"{scheme}_get_vs_client")
        self._store, self._prefix = store, prefix
        self._crowd = Crowd(connections)

    def put(self, data: Sequence[Buffer]) -> None:
        import obstore

        self._crowd.each(
            lambda i: obstore.put(
                self._store, f"{self._prefix}/raw/{i}", data[i].tobytes(), use_multipart=False
            ),
            len(data),
        )

    def get(self, into: Sequence[Buffer]) -> None:
        import obstore

        self._crowd.each(
            lambda i: obstore.get(self._store, f"{self._prefix}/raw/{i}").bytes(), len(into)
        )

    def forget(self) -> None:
        """A put replaces."""

    def close(self) -> None:
        import obstore

        for found in obstore.list(self._store, self._prefix):
            for one in found:
                obstore.delete(self._store, one["path"])
        self._crowd.close()


class MooncakeLoop:
    """``put_from`` and ``get_into`` of one object after the other, from and to ``memory``."""

    names = ("mooncake_put_vs_own", "mooncake_get_vs_own")
    evicts = False

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
        self._client.batch_remove([self._name(i) for i in range(self._count)], True)

    def close(self) -> None:
        self._client.remove_by_regex(f"^{self._prefix}", True)
        self._client.unregister_buffer(self._memory.ctypes.data)

    def _name(self, i: int) -> str:
        return f"{self._prefix}raw{i}"


def _as_it_comes(client: Any) -> Any:
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


def of(url: TierUrl, tier: Tier, memory: U8Array, size: int, count: int) -> Counterpart:
    """What ``tier``, which ``url`` names, is measured against. Raises ``KvassError``."""
    mine: Any = tier
    try:
        if url.scheme == "disk":
            threads = int(url.options.get("threads", "4"))
            return RawFile(Path(url.where).parent, size, count, threads)
        if url.scheme == "redis":
            return RedisLoop(_as_it_comes(mine._connected()), url.options["prefix"])
        if url.scheme == "mooncake":
            return MooncakeLoop(mine._mooncake.client(), url.options["prefix"], memory)
        if url.scheme in ("s3", "gcs", "azure"):
            prefix = url.where.removeprefix("//").partition("/")[2]
            connections = int(url.options.get("connections", "32"))
            return ObjectLoop(url.scheme, mine._store, prefix, connections)
    except OSError as error:
        raise TierDown(f"{shown(url.where)}: {error.strerror or error}") from error
    raise ConfigError(f"bench knows nothing to measure {url.scheme}:{shown(url.where)} against")
