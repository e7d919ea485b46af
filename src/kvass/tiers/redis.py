"""The tier of Redis and Valkey: a single server or a cluster, which several machines may share.

A record of up to ``PIECE_BYTES`` is one value, ``PREFIXr:KEY``: the header and the shards. For a
larger record, that value is the header alone. The shards' bytes are split into pieces,
``PREFIXp:KEY:CHECK:0``, ``:1`` and so on, where CHECK is the payload checksum in the header. Pieces
are set before their header and deleted after it. The checksum in their names keeps the pieces of
different bytes apart. So a reader that has a header gets its pieces, or a miss if one is gone.
Daemons that store the same bytes at the same time set the same values. If they encrypt, the values
differ, and so do their names. Pieces that no header names then stay until the server evicts them.

The server limits the capacity by ``maxmemory`` and an ``allkeys-lru`` policy. With ``ttl_s``
records expire.

No connection is made at start. A call raises ``TierDown`` if the server cannot be reached, refuses
the password, or does not answer within ``timeout_s``. The next call tries again, with a new
connection.

Others may write to the server. No read asks for more bytes than there can be. A value of another
type or size than ours is no record.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.connection import PythonRespSerializer
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
)
from redis.retry import Retry

from kvass.errors import ConfigError, ItemRefused, ItemUnreadable, TierDown
from kvass.tiers.base import MAX_NOTE_BYTES, Shards, Varying
from kvass.tiers.buffers import batches_by_size, size_of, split
from kvass.tiers.codec import (
    MAX_HEADER_BYTES,
    Header,
    Seal,
    decode_header,
    encode_header,
    header_bytes,
    pack,
    prepared,
    unpack_body,
)
from kvass.tiers.options import RedisOptions, host_and_port
from kvass.tiers.record_tier import Outcome, RecordTier, answers

PIECE_BYTES: Final = 8 << 20
"""Bytes of one request to the server, and of one answer. They are buffered in our memory. Measured:
values of 1 to 16 MiB were loaded at 1.2 to 1.8 GB/s and blocked other threads for at most 5 ms;
values of 64 MiB at 0.4 GB/s, and for 37 ms."""
_MOST_BYTES: Final = 64 << 30
"""The largest record, so that no header names pieces without end."""
_SEND_ALONE: Final = 6000
"""A value of more than this many bytes is sent on its own, without a copy."""
_SCAN: Final = 1000
_PORT: Final = 6379
_OF_THE_SERVER: Final = (
    OutOfMemoryError,
    ReadOnlyError,
    BusyLoadingError,
    MasterDownError,
    ClusterDownError,
)
"""Errors that are answers to one command, but say that the server cannot carry out any such."""
_TROUBLE: Final = (redis.RedisError, RedisClusterException, OSError)


class _AnyRefused(TierDown):
    """The server answered one command with an error that it would give to any such command."""


_REFUSED: Final = (ItemRefused, _AnyRefused)


class RedisTier(RecordTier):
    """``Tier`` with a Redis server as the backend. ``connect`` makes a client of redis-py; it is
    called at the first request."""

    def __init__(self, name: str, connect: Callable[[], Any], *, prefix: str, ttl_s: int) -> None:
        super().__init__(name)
        self._connect = connect
        self._prefix = prefix.encode()
        self._expiry: tuple[str | int, ...] = ("EX", ttl_s) if ttl_s else ()
        self._connecting = threading.Lock()
        self._client: Any = None

    def _exists(self, keys: Sequence[bytes]) -> list[Outcome]:
        most = PIECE_BYTES + MAX_HEADER_BYTES
        sizes = self._ask([("STRLEN", self._record_name(key)) for key in keys])
        longer = [isinstance(size, int) and size > most for size in sizes]
        return [
            self._too_long() if too else self._outcome(n)
            for n, too in zip(sizes, longer, strict=True)
        ]

    def _get(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[Outcome]:
        def some(which: range) -> list[Outcome]:
            values = self._ask(
                [("GETRANGE", self._record_name(keys[i]), 0, _most(into[i])) for i in which]
            )
            return [self._load(keys[i], v, into[i]) for i, v in zip(which, values, strict=True)]

        return self._in_groups(into, some)

    def _put(self, keys: Sequence[bytes], data: Sequence[Shards], tenant: str) -> list[Outcome]:
        seal = self._seal(tenant)

        def some(which: range) -> list[Outcome]:
            if (size := size_of(data[which[0]])) > _MOST_BYTES:  # then ``which`` has one index
                return [False]
            if size > PIECE_BYTES:
                return [self._store_pieces(keys[which[0]], data[which[0]], seal)]
            commands = [
                (
                    "SET",
                    self._record_name(keys[i]),
                    pack(keys[i], data[i], seal).data,
                    *self._expiry,
                )
                for i in which
            ]
            return self._outcomes(commands)

        return self._in_groups(data, some)

    def _delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        names = []
        for key, header in zip(keys, self._headers(keys), strict=True):
            names += [self._record_name(key), *self._piece_names(key, header)]
        return self._unlink(names)

    def _clear(self) -> None:
        """Delete all records with our prefix, also those that other daemons stored."""
        prefix = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._prefix)
        client = self._connected()
        try:
            found = client.scan_iter(match=prefix + b"[rp]:*", count=_SCAN)
            while some := list(islice(found, _SCAN)):
                for outcome in self._unlink(some):
                    if isinstance(outcome, TierDown):  # one that stays is no clear
                        raise outcome
        except redis.ResponseError as error:
            raise self._failure(error) from None
        except _TROUBLE as error:
            raise self._down(error) from error

    def _get_note(self, name: str) -> bytes | None:
        key = self._note_name(name)
        value: bytes
        part = ("GETRANGE", key, 0, MAX_NOTE_BYTES)  # and what a probe asks, so a check proves it
        held, _, value = self._ask_all([("EXISTS", key), ("STRLEN", key), part])
        return value if held else None

    def _put_note(self, name: str, value: bytes) -> None:
        """Set a note. It never expires, even if records do."""
        try:
            self._ask_one("SET", self._note_name(name), value)
        except _AnyRefused as error:  # it is full or read-only: what it has can be read
            raise ItemRefused(str(error)) from None

    def _renew(self) -> None:
        with self._connecting:
            self._client = None  # the old one closes when the last call that uses it has ended

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()

    # ------------------------------------------------------------ names

    def _record_name(self, key: bytes) -> bytes:
        return self._prefix + b"r:" + key

    def _piece_names(self, key: bytes, header: Header | None) -> list[bytes]:
        """Return the names of a record's pieces. Empty if the record is one value, or if the header
        is of another key."""
        total = sum(header.lengths) if header and header.key == key else 0
        if header is None or not PIECE_BYTES < total <= _MOST_BYTES:
            return []
        begin = b"%sp:%s:%016x" % (self._prefix, key, header.payload_checksum)
        return [b"%s:%d" % (begin, i) for i in range(-(-total // PIECE_BYTES))]

    def _note_name(self, name: str) -> bytes:
        return self._prefix + b"n:" + name.encode()

    # ------------------------------------------------------------ a record

    def _load(self, key: bytes, value: object, into: Shards) -> Outcome:
        if not value or not isinstance(value, bytes):
            return self._outcome(value)
        header = decode_header(value)
        right = None
        if header is not None:
            body = memoryview(value)[header_bytes(header) :]
            size, chunks = len(body), iter([body])
            try:
                if len(value) > _most(into):  # we have its beginning only
                    size = self._ask_one("STRLEN", self._record_name(key)) - header_bytes(header)
                elif names := self._piece_names(key, header):
                    size = sum(header.lengths)
                    chunks = self._pieces(names, min(size, size_of(into)))
                right = unpack_body(key, header, size, chunks, into, self._open)
            except _REFUSED as error:
                return error
        if right is None and (why := self._forget(key, header)):
            return self._undeletable(why)
        if right is None and len(value) > _most(into):
            return self._too_long()
        return right is True

    def _pieces(self, names: Sequence[bytes], left: int) -> Iterator[memoryview]:
        """Load pieces of ``left`` bytes together, one after another. Stops at the first one that is
        missing or of another size."""
        for name in names:
            size = min(left, PIECE_BYTES)
            piece = self._ask_one("GETRANGE", name, 0, size)
            if len(piece) != size:
                return
            yield memoryview(piece)
            left -= size

    def _store_pieces(self, key: bytes, shards: Shards, seal: Seal | None) -> Outcome:
        header, shards = prepared(key, shards, seal)
        names = self._piece_names(key, header)
        try:
            for name, parts in zip(names, split(shards, PIECE_BYTES), strict=True):
                piece = parts[0] if len(parts) == 1 else b"".join(parts)
                self._ask_one("SET", name, piece, *self._expiry)
            [old] = self._headers([key])
            self._ask_one("SET", self._record_name(key), encode_header(header), *self._expiry)
        except _REFUSED as error:  # usually the server is full
            self._forget(key, header)
            return error
        self._unlink(set(self._piece_names(key, old)).difference(names))
        return True

    def _forget(self, key: bytes, header: Header | None) -> TierDown | None:
        """Delete the pieces of an incomplete record. Its header is deleted only if the server still
        has this one. Returns why they could not be deleted, if so."""
        names = self._piece_names(key, header)
        try:
            if self._headers([key]) == [header]:
                names.append(self._record_name(key))
            answers(self._unlink(names))
        except TierDown as error:
            return error
        return None

    def _headers(self, keys: Sequence[bytes]) -> list[Header | None]:
        """Load the headers of these records. ``None`` for a record that is absent or has no valid
        header."""
        last = MAX_HEADER_BYTES - 1
        heads = self._ask([("GETRANGE", self._record_name(key), 0, last) for key in keys])
        return [decode_header(head) if isinstance(head, bytes) else None for head in heads]

    def _unlink(self, names: Iterable[bytes]) -> list[Outcome]:
        outcomes = self._outcomes([("UNLINK", name) for name in names])
        return [outcome if isinstance(outcome, TierDown) else True for outcome in outcomes]

    # ------------------------------------------------------------ the server

    def _in_groups(
        self, data: Sequence[Shards], some: Callable[[range], list[Outcome]]
    ) -> list[Outcome]:
        """Call ``some`` with ranges of indices whose data is at most ``PIECE_BYTES`` each, and
        return all outcomes."""
        outcomes: list[Outcome] = []
        for which in batches_by_size([size_of(shards) for shards in data], PIECE_BYTES):
            try:
                outcomes += some(which)
            except TierDown as error:
                return outcomes + [error] * (len(data) - len(outcomes))
        return outcomes

    def _outcomes(self, commands: list[tuple[Any, ...]]) -> list[Outcome]:
        return [self._outcome(answer) for answer in self._ask(commands)]

    def _outcome(self, answer: object) -> Outcome:
        if isinstance(answer, Exception):
            return self._failure(answer)
        return bool(answer)

    def _failure(self, answer: Exception) -> TierDown:
        """The outcome of a command that the server answered with an error: something is wrong with
        the server, with this command alone, or with a value that is of another type."""
        if isinstance(answer, _OF_THE_SERVER):
            return _AnyRefused(f"{self.name}: {answer}")
        kind = ItemUnreadable if str(answer).startswith("WRONGTYPE") else ItemRefused
        return kind(f"{self.name}: {answer}")

    def _ask_one(self, *command: Any) -> Any:
        """Send one command and return its answer. Raises one of ``_REFUSED`` if that is an
        error."""
        return self._ask_all([command])[0]

    def _ask_all(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Send commands as ``_ask`` does. Raises one of ``_REFUSED`` if an answer is an error."""
        got = self._ask(commands)
        for answer in got:
            if isinstance(answer, Exception):
                raise self._failure(answer)
        return got

    def _ask(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Send commands in one round trip, and return their answers. The answer to a command that
        failed is an exception."""
        if not commands:
            return []
        client = self._connected()  # kept: it would close its connections, also those in use
        try:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            got: list[Any] = pipeline.execute(raise_on_error=False)
        except _TROUBLE as error:
            raise self._down(error) from error
        return got

    def _connected(self) -> Any:
        with self._connecting:
            if self._client is None:
                try:
                    self._client = self._connect()
                except _TROUBLE as error:  # that of a cluster asks for its nodes
                    raise self._down(error) from error
            return self._client


def _most(into: Shards) -> int:
    """Return the most bytes that the value of a record with these shards may have."""
    size = size_of(into)
    if isinstance(into, Varying):
        size = min(size, PIECE_BYTES)
    return MAX_HEADER_BYTES + (size if size <= PIECE_BYTES else 0)


def open_redis(where: str, options: RedisOptions) -> RedisTier:
    """Open the tier of a URL ``redis:HOST[:PORT]?...`` or ``redis:/path/of/socket?...``. ``where``
    is the part between ``redis:`` and ``?``. Raises ``ConfigError``."""
    name = f"redis:{where}"
    if where.startswith("//"):
        raise ConfigError("redis: write redis:HOST:PORT?username=...&password=... instead of a URL")
    settings: dict[str, Any] = {
        "username": options.username or None,
        "password": options.password or None,
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": options.timeout_s,
        "protocol": 2,  # its errors say why a connection was refused
        "retry": Retry(NoBackoff(), 1),  # the server may have closed an idle connection
        **_address(name, where, options.tls == "yes"),
    }
    clustered = options.cluster == "yes"
    if clustered and "unix_socket_path" in settings:
        raise ConfigError(f"{name}: cluster: a cluster is reached by host and port")

    def connect() -> Any:
        if clustered:
            return RedisCluster(**settings)
        return _sending_values_alone(redis.Redis(db=options.db, **settings))

    return RedisTier(name, connect, prefix=options.prefix, ttl_s=options.ttl_s)


def _sending_values_alone(client: redis.Redis) -> redis.Redis:
    """Make ``client`` write large values to the socket without a copy. hiredis would copy each into
    a command first. That takes longer than sending it, and holds the GIL."""
    packer = PythonRespSerializer(_SEND_ALONE, client.get_encoder().encode)
    client.connection_pool.connection_kwargs["command_packer"] = packer
    return client


def _address(name: str, where: str, tls: bool) -> dict[str, Any]:
    if where.startswith("/"):
        if tls:
            raise ConfigError(f"{name}: tls: not over a unix socket")
        return {"unix_socket_path": where}
    host, port = host_and_port("redis", where, _PORT)
    return {"host": host, "port": port} | ({"ssl": True} if tls else {})
