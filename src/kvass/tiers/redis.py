"""Records in Redis or Valkey, a single server or a cluster, which other machines may share.

Law of this file: what stands under a record's name is replaced by one command, so that a reader
never sees half of it: header and shards in one value, or, of a record above ``_GROUP_BYTES``, the
head of pieces (``cut``) that lie under names of their own, each of them only ever written once. The
pieces are there before their head is and go after it, so that one that is missing is a miss. The
server keeps the capacity: ``maxmemory`` and an ``allkeys-lru`` policy, and ``ttl_s`` if old records
shall go by themselves. It would evict notes first of all, so they are kept alive (``kept``).

Nothing is connected at start. A server that cannot be reached, refuses the password or does not
answer within ``timeout_s`` makes a call raise ``TierDown``; the next call tries again.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.connection import PythonRespSerializer
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from kvass.errors import ConfigError, TierDown
from kvass.tiers.base import Shards, check_batch, check_note
from kvass.tiers.codec import Header, decode_header, encode_header, header_bytes, payload_check
from kvass.tiers.cut import MAX_HEAD_BYTES, NONCE_BYTES, Head, cut, decode_head
from kvass.tiers.gate import Gate
from kvass.tiers.kept import Kept
from kvass.tiers.options import RedisOptions
from kvass.tiers.piece import size_of, unpack
from kvass.tiers.url import shown

_GROUP_BYTES: Final = 8 << 20
"""What goes to or comes from the server at a time, and lies in our memory meanwhile; of a larger
record a piece. So little that Python gets the same memory again and again, and keeps its lock for
shorter: 192 MiB in values of 1 to 16 MiB came back with 1.2 to 1.8 GB/s and kept other threads for
at most 5 ms; in values of 64 MiB with 0.4 GB/s, and 37 ms; in a single one with 0.5, and 105 ms."""
_ORPHANED_S: Final = 3600
"""How long pieces stay that no head has come to yet: a store that dies leaves nothing for ever."""
_KEEP_S: Final = 2.0
"""How often notes are kept alive. A server whose whole memory is replaced sooner may lose them
between our last call and our next start."""
_TRIES: Final = 4
"""How often a load goes after a record that is replaced meanwhile, and again."""
_PIECE_BYTES: Final = 6000
"""What is longer is sent by itself."""
_SCAN: Final = 1000
_RECORD: Final = b"r:"
_PIECE: Final = b"p:"
_NOTE: Final = b"n:"
_FORGET_IF: Final = """
if redis.call("GET", KEYS[1]) == ARGV[1] then return redis.call("UNLINK", KEYS[1]) end
return 0
"""
_TROUBLE: Final = (redis.RedisError, RedisClusterException, OSError)


class RedisTier:
    """``Tier`` over a server. ``connect`` gives a client of redis-py; it is called when needed."""

    def __init__(
        self, name: str, connect: Callable[[], Any], *, prefix: str = "kvass:", ttl_s: int = 0
    ) -> None:
        self._name = name
        self._connect = connect
        self._prefix = prefix.encode()
        self._expiry: tuple[str | int, ...] = ("EX", ttl_s) if ttl_s else ()
        self._gate = Gate(name)
        self._connecting = threading.Lock()
        self._client: Any = None
        self._kept = Kept(_KEEP_S, time.monotonic)

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are there; one round trip."""
        check_batch(keys)
        with self._gate.call():
            answers = self._ask([("EXISTS", self._record_name(key)) for key in keys])
            return self._judged([answer if answer != 0 else None for answer in answers])

    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        """See ``Tier.load``."""
        check_batch(keys, into)

        def some(which: range) -> list[object]:
            values = self._ask([("GET", self._record_name(keys[i])) for i in which])
            return [
                self._take(keys[i], value, into[i]) if isinstance(value, bytes) else value
                for i, value in zip(which, values, strict=True)
            ]

        with self._gate.call():
            which = self._in_groups(into, some)
            self._keep_notes()
            return which

    def store(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """See ``Tier.store``."""
        check_batch(keys, data)

        def some(which: range) -> list[object]:
            if size_of(data[which[0]]) > _GROUP_BYTES:  # then it is alone
                return [self._put_cut(keys[which[0]], data[which[0]])]
            return self._ask(
                [
                    ("SET", self._record_name(keys[i]), _value(keys[i], data[i]), *self._expiry)
                    for i in which
                ]
            )

        with self._gate.call():
            which = self._in_groups(data, some)
            self._keep_notes()
            return which

    def delete(self, keys: Sequence[bytes]) -> None:
        """See ``Tier.delete``."""
        check_batch(keys)
        with self._gate.call():
            self._judged(self._forget(keys))

    def clear(self) -> None:
        """Forget all records under our prefix, whoever stored them."""
        ours = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._prefix)
        pattern = ours + b"[" + _RECORD[:1] + _PIECE[:1] + b"]:*"
        with self._gate.call():
            try:
                found = list(self._connected().scan_iter(match=pattern, count=_SCAN))
            except _TROUBLE as error:
                raise self._down(error) from error
            for i in range(0, len(found), _SCAN):
                self._judged(self._ask([("UNLINK", key) for key in found[i : i + _SCAN]]))

    def note(self, name: str) -> bytes | None:
        """See ``Tier.note``."""
        check_note(name)
        with self._gate.call():
            value = self._ask([("GET", self._note_name(name))])[0]
            if isinstance(value, Exception):
                raise self._down(value) from value
            if value is None:
                return None
            self._kept.found(name, bytes(value))
            return bytes(value)

    def set_note(self, name: str, value: bytes) -> None:
        """See ``Tier.set_note``; without a time to live, whatever records have."""
        check_note(name, value)
        with self._gate.call():
            self._judged(self._ask([("SET", self._note_name(name), value)]))
            self._kept.remember(name, value)

    def close(self) -> None:
        """See ``Tier.close``."""
        if self._gate.shut() and self._client is not None:
            self._client.close()

    def _keep_notes(self) -> None:
        """Now and then, beside records: notes that the server let go of are set again (``NX``, for
        another daemon may have set a newer one), and the others read, which keeps them warm."""
        due = self._kept.due()
        commands: list[tuple[Any, ...]] = []
        for name, value in due:
            where = self._note_name(name)
            commands += [("SET", where, value, "NX"), ("GET", where)]
        try:
            answers = self._ask(commands)[1::2]
        except TierDown:  # the next call's own commands will tell
            return
        for (name, _), answer in zip(due, answers, strict=True):
            if isinstance(answer, bytes):
                self._kept.found(name, answer)

    def _record_name(self, key: bytes) -> bytes:
        return self._prefix + _RECORD + key

    def _piece_name(self, name: bytes) -> bytes:
        return self._prefix + _PIECE + name

    def _note_name(self, name: str) -> bytes:
        return self._prefix + _NOTE + name.encode()

    # ------------------------------------------------------------ a record

    def _take(self, key: bytes, value: bytes, into: Shards) -> object:
        """Fill ``into`` from what stands under the record's name; whether it is whole, or why we
        cannot tell."""
        for _ in range(_TRIES):
            head = decode_head(value)
            try:
                if head is None:
                    whole = _scatter(key, value, into)
                else:
                    whole = unpack(key, head.size, self._chunks(value, head), into)
                if whole is not None:
                    return whole
                before, value = value, self._ask_one("GET", self._record_name(key)) or b""
            except _TROUBLE as error:
                return error
            if value == before:  # it was not replaced: it is damaged
                self._forget_if(key, value)
                return False
        return False

    def _chunks(self, value: bytes, head: Head) -> Iterator[bytes]:
        """A cut record's bytes, header first; they end where a piece is missing."""
        yield value[: header_bytes(head.header)]
        for name, size in head.pieces():
            piece = self._ask_one("GET", self._piece_name(name))
            if not isinstance(piece, bytes) or len(piece) != size:
                return
            yield piece

    def _put_cut(self, key: bytes, shards: Shards) -> object:
        """Store a record in pieces, then its head, and only then let them stay."""
        header = Header(key, tuple(map(len, shards)), 0, payload_check(shards))
        head = Head(header, secrets.token_bytes(NONCE_BYTES), _GROUP_BYTES)
        names = [self._piece_name(name) for name, _ in head.pieces()]
        expiry = self._expiry or ("EX", _ORPHANED_S)
        stay = "EXISTS" if self._expiry else "PERSIST"
        try:
            for name, piece in zip(names, cut(shards, _GROUP_BYTES), strict=True):
                self._ask_one("SET", name, piece, *expiry)
            self._replace(key, head)
            if all(answer == 1 for answer in self._ask([(stay, name) for name in names])):
                return True
        except _TROUBLE as error:  # no room, as a rule
            self._ask([("UNLINK", name) for name in names])
            return error
        # Either a server that is smaller than the record let go of some already, or another daemon
        # stored the same meanwhile, and let go of ours: its head is not ours to forget.
        if self._forget_if(key, head.encode()):
            return False
        self._ask([("UNLINK", name) for name in names])
        return self._stands(header)

    def _replace(self, key: bytes, head: Head) -> None:
        """Let a new head stand under the record's name, and let go of the old one's pieces. Not
        asked for by whole records, for whose sake a small one would take twice as long: nobody
        stores equal keys in other sizes, and what such a one leaves, eviction takes."""
        set_ = ("SET", self._record_name(key), head.encode(), *self._expiry)
        [(old, done)] = self._ask_after_heads([set_])
        if isinstance(done, Exception):
            raise done
        self._ask([("UNLINK", name) for name in self._piece_names(old)])

    def _forget(self, keys: Sequence[bytes]) -> list[object]:
        """The records' names first, then their pieces."""
        answers = self._ask_after_heads([("UNLINK", self._record_name(key)) for key in keys])
        names = [name for old, _ in answers for name in self._piece_names(old)]
        return [done for _, done in answers] + self._ask([("UNLINK", name) for name in names])

    def _forget_if(self, key: bytes, value: bytes) -> bool:
        """Forget the record if ``value`` stands under its name; whether it did. In one step, or
        what another daemon puts there meanwhile would go instead."""
        name = self._record_name(key)
        [done] = self._ask([("EVAL", _FORGET_IF, 1, name, value)])
        if isinstance(done, Exception):  # a user who may run no scripts; then in two steps
            done = self._ask([("GET", name)])[0] == value and self._ask([("UNLINK", name)])[0] == 1
        if done:
            self._ask([("UNLINK", name) for name in self._piece_names(value)])
        return bool(done)

    def _stands(self, header: Header) -> bool:
        """Whether the same record is there, in pieces, whole."""
        [value] = self._ask([("GETRANGE", self._record_name(header.key), 0, MAX_HEAD_BYTES - 1)])
        head = decode_head(value) if isinstance(value, bytes) else None
        if head is None or head.header != header:
            return False
        names, sizes = zip(*head.pieces(), strict=True)
        return self._ask([("STRLEN", self._piece_name(name)) for name in names]) == [*sizes]

    def _ask_after_heads(self, commands: list[tuple[Any, ...]]) -> list[tuple[object, object]]:
        """What began the value that each command's name had, and what the command said."""
        both = [(("GETRANGE", one[1], 0, MAX_HEAD_BYTES - 1), one) for one in commands]
        answers = self._ask([command for pair in both for command in pair])
        return list(zip(answers[::2], answers[1::2], strict=True))

    def _piece_names(self, old: object) -> list[bytes]:
        """Of the record that began so."""
        head = decode_head(old) if isinstance(old, bytes) else None
        return [self._piece_name(name) for name, _ in head.pieces()] if head else []

    # ------------------------------------------------------------ the server

    def _in_groups(
        self, data: Sequence[Shards], some: Callable[[range], list[object]]
    ) -> list[bool]:
        """``some`` of ranges whose data is not too much at a time."""
        answers: list[object] = []
        for which in _groups(data):
            try:
                answers += some(which)
            except TierDown as error:
                answers += [error] * (len(data) - len(answers))
                break
        return self._judged(answers)

    def _judged(self, answers: list[Any]) -> list[bool]:
        """Which answers say yes. ``TierDown`` if none does, and one of them is trouble."""
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        done = [bool(answer) and not isinstance(answer, Exception) for answer in answers]
        if errors and not any(done):
            raise self._down(errors[0]) from errors[0]
        return done

    def _ask(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Send all and read all answers; what a single command failed with is its answer."""
        if not commands:
            return []
        try:
            pipeline = self._connected().pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        except _TROUBLE as error:
            raise self._down(error) from error
        return answers

    def _ask_one(self, *command: Any) -> Any:
        """Send a command; what it failed with is raised."""
        [answer] = self._ask([command])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _connected(self) -> Any:
        with self._connecting:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _down(self, error: Exception) -> TierDown:
        return error if isinstance(error, TierDown) else TierDown(f"{self._name}: {error}")


def _value(key: bytes, shards: Shards) -> bytes:
    header = Header(key, tuple(map(len, shards)), 0, payload_check(shards))
    return b"".join([encode_header(header), *(shard.data for shard in shards)])


def _scatter(key: bytes, value: bytes, into: Shards) -> bool | None:
    """``unpack`` of a record in a single value, which is faster checked where it was put."""
    header = decode_header(value)
    if header is None or header.key != key:
        return None
    at = header_bytes(header)
    if len(value) != at + sum(header.lengths):
        return None
    if header.lengths != tuple(map(len, into)):
        return False
    payload = memoryview(value)
    for shard in into:
        shard[:] = payload[at : at + len(shard)]
        at += len(shard)
    return True if payload_check(into) == header.payload_check else None


def _groups(data: Sequence[Shards]) -> Iterator[range]:
    """Neighbours that are at most ``_GROUP_BYTES`` together, or alone."""
    first = total = 0
    for i, shards in enumerate(data):
        if i > first and total + size_of(shards) > _GROUP_BYTES:
            yield range(first, i)
            first, total = i, 0
        total += size_of(shards)
    if data:
        yield range(first, len(data))


def open_redis(where: str, options: RedisOptions) -> RedisTier:
    """``redis:HOST[:PORT]?...``, ``redis:/path/of/socket?...``. Raises ``ConfigError``."""
    name = f"redis:{where}"
    if "@" in where or where.startswith("//"):
        raise ConfigError(
            f"{shown(name)}: write redis:HOST:PORT?username=...&password=... instead of a URL"
        )
    settings: dict[str, Any] = {
        "username": options.username or None,
        "password": options.password or None,
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": options.timeout_s,
        "protocol": 2,  # whose refusals say what is wrong
        "retry": Retry(NoBackoff(), 1),  # a connection that the server closed while it was idle
        **_address(name, where, options.tls),
    }
    if options.cluster and "unix_socket_path" in settings:
        raise ConfigError(f"{name}: cluster: a cluster is reached by host and port")

    def connect() -> Any:
        if options.cluster:
            return RedisCluster(**settings)
        return _sending_in_pieces(redis.Redis(db=options.db, **settings))

    return RedisTier(name, connect, prefix=options.prefix, ttl_s=options.ttl_s)


def _sending_in_pieces(client: redis.Redis) -> redis.Redis:
    """Values go to the socket as they are. hiredis would pack each into a command first, which
    takes longer than sending it, and nothing else in this process runs meanwhile."""
    packer = PythonRespSerializer(_PIECE_BYTES, client.get_encoder().encode)
    client.connection_pool.connection_kwargs["command_packer"] = packer
    return client


def _address(name: str, where: str, tls: bool) -> dict[str, Any]:
    if where.startswith("/"):
        if tls:
            raise ConfigError(f"{name}: tls: not over a unix socket")
        return {"unix_socket_path": where}
    host, _, port = where.rpartition(":")
    if not host:
        host, port = where, "6379"
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{name}: {port!r} is no port; write redis:HOST:PORT")
    return {"host": host, "port": int(port)} | ({"ssl": True} if tls else {})
