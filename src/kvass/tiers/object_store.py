"""Records in an object store: S3 and what speaks like it, Google Cloud Storage, Azure Blob Storage.

Law of this file: one record is one object, header and shards in one piece, so that replacing it is
one request and a reader never sees half of it. Nothing is listed but by ``clear``. Under the
prefix, ``records/`` holds an object per record, named by its key in hexadecimal, and ``notes/`` the
notes.
The bucket keeps the capacity: a lifecycle rule on ``records/`` is what lets old ones go.

Nothing is connected at start. A server that cannot be reached, refuses the credentials, has no such
bucket or says nothing for ``timeout_s`` makes a call raise ``TierDown``; the next call tries again.
Credentials come from the environment and the places that the provider's own tools look at, never
from the URL; no text of ours repeats them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from kvass.errors import ConfigError, TierDown
from kvass.tiers.base import MAX_NOTE_BYTES, Shards, check_batch, check_note
from kvass.tiers.crew import Answer, Crew
from kvass.tiers.gate import Gate
from kvass.tiers.piece import pack, size_of, unpack

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config

Store: TypeAlias = S3Store | GCSStore | AzureStore | MemoryStore

_MOST_BYTES: Final = 4 << 30
"""Of one record; S3 takes 5 GiB in one request, the others at least as much."""
_ROOM_BYTES: Final = 64 << 20
"""What all calls together have in memory of ours."""
_CHUNK_BYTES: Final = 1 << 20
"""What a load reads at a time. The client holds the next while we copy the last."""
_BULK: Final = 1000
"""Objects that S3 deletes in one request, or lists."""
_PATIENCE: Final = 10
"""A request that goes on, but never for ``timeout_s`` without a byte, may take as many of them."""
_TROUBLE: Final = (BaseError, OSError)
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound")


class ObjectTier:
    """``Tier`` over a store of obstore. ``bulk``: it deletes many at once, and minds no absent."""

    def __init__(
        self,
        name: str,
        store: Store,
        *,
        prefix: str,
        connections: int,
        timeout_s: int,
        bulk: bool,
    ) -> None:
        self._name = name
        self._store = store
        self._records = f"{prefix}/records"
        self._notes = f"{prefix}/notes"
        self._at_once = _BULK if bulk else 1
        self._crew = Crew(name, connections, _ROOM_BYTES, timeout_s)
        self._gate = Gate(name)
        self._bucket_seen = False

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are there: a HEAD for each, many at once."""
        check_batch(keys)
        with self._gate.call():
            held = self._judged(self._crew.each(lambda i: self._holds(keys[i]), [0] * len(keys)))
            if keys and not any(held):
                self._need_bucket(self._record(keys[0]))
            return held

    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        """See ``Tier.load``."""
        check_batch(keys, into)
        needs = [min(size_of(shards), 2 * _CHUNK_BYTES) for shards in into]
        with self._gate.call():
            return self._judged(self._crew.each(lambda i: self._get(keys[i], into[i]), needs))

    def store(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """See ``Tier.store``."""
        check_batch(keys, data)
        last = dict(zip(keys, data, strict=True))  # of duplicates the last
        names = list(last)
        needs = [size_of(shards) for shards in last.values()]
        with self._gate.call():
            put = self._crew.each(lambda i: self._put(names[i], last[names[i]]), needs)
            done = dict(zip(names, self._judged(put), strict=True))
            return [done[key] for key in keys]

    def delete(self, keys: Sequence[bytes]) -> None:
        """See ``Tier.delete``."""
        check_batch(keys)
        with self._gate.call():
            self._judged(self._remove([self._record(key) for key in dict.fromkeys(keys)]))

    def clear(self) -> None:
        """Forget all records under our prefix, whoever stored them."""
        with self._gate.call():
            try:
                for found in obstore.list(self._store, self._records, chunk_size=_BULK):
                    for answer in self._remove([one["path"] for one in found]):
                        if isinstance(answer, TierDown):
                            raise answer
            except _TROUBLE as error:
                raise self._down(error) from None

    def note(self, name: str) -> bytes | None:
        """See ``Tier.note``."""
        check_note(name)
        with self._gate.call():
            try:
                got = obstore.get(self._store, f"{self._notes}/{name}")
                return bytes(got.bytes()) if got.meta["size"] <= MAX_NOTE_BYTES else None
            except _TROUBLE as error:
                self._need_absent(error)
                return None

    def set_note(self, name: str, value: bytes) -> None:
        """See ``Tier.set_note``; what the store acknowledges is durable."""
        check_note(name, value)
        with self._gate.call():
            try:
                obstore.put(self._store, f"{self._notes}/{name}", value, use_multipart=False)
            except _TROUBLE as error:
                raise self._down(error) from None

    def close(self) -> None:
        """See ``Tier.close``."""
        if self._gate.shut():
            self._crew.close()

    # ------------------------------------------------------------ one record

    def _record(self, key: bytes) -> str:
        return f"{self._records}/{key.hex()}"

    def _holds(self, key: bytes) -> bool:
        try:
            obstore.head(self._store, self._record(key))
        except _TROUBLE as error:
            self._need_absent(error)
            return False
        return True

    def _get(self, key: bytes, into: Shards) -> bool:
        path = self._record(key)
        try:
            got = obstore.get(self._store, path)
            whole = unpack(key, got.meta["size"], got.stream(_CHUNK_BYTES), into)
        except _TROUBLE as error:
            self._need_absent(error)
            return False
        if whole is None:
            try:
                self._remove_some([path])
            except TierDown:
                pass  # a miss all the same; the next load finds it damaged again
        return bool(whole)

    def _put(self, key: bytes, shards: Shards) -> bool:
        if size_of(shards) > _MOST_BYTES:
            return False
        try:
            # In one request: parts of an upload that was broken off would stay and cost money.
            obstore.put(self._store, self._record(key), pack(key, shards), use_multipart=False)
        except _TROUBLE as error:
            raise self._down(error) from None
        return True

    def _remove(self, paths: Sequence[str]) -> list[Answer]:
        some = [paths[i : i + self._at_once] for i in range(0, len(paths), self._at_once)]
        return self._crew.each(lambda i: self._remove_some(some[i]), [0] * len(some))

    def _remove_some(self, paths: Sequence[str]) -> bool:
        try:
            obstore.delete(self._store, paths)
        except _TROUBLE as error:
            self._need_absent(error)
        return True

    # ------------------------------------------------------------ trouble

    def _judged(self, answers: Sequence[Answer]) -> list[bool]:
        """Which answers say yes. ``TierDown`` if none does, and one of them is trouble."""
        errors = [answer for answer in answers if isinstance(answer, TierDown)]
        done = [answer is True for answer in answers]
        if errors and not any(done):
            raise TierDown(str(errors[0]))
        return done

    def _need_absent(self, error: Exception) -> None:
        """Raise ``TierDown`` unless the error only says that there is no such object."""
        absent = isinstance(error, FileNotFoundError)
        if not absent or any(code in str(error) for code in _NO_BUCKET):
            raise self._down(error) from None

    def _need_bucket(self, path: str) -> None:
        """Raise ``TierDown`` if there is no bucket: a HEAD cannot tell that from an absent object,
        because its answer has no body. Asked until the bucket was seen once."""
        if not self._bucket_seen:
            try:
                obstore.get(self._store, path)
            except _TROUBLE as error:
                self._need_absent(error)
            self._bucket_seen = True

    def _down(self, error: Exception) -> TierDown:
        self._bucket_seen = False
        return TierDown(f"{self._name}: {_said(error)}")


def _said(error: Exception) -> str:
    """What went wrong, in one line, and nothing of a request but its address: a query or a longer
    answer may repeat a signature."""
    text, _, debug = str(error).partition("\n\nDebug source")
    code, message = (re.search(f"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
    if code:
        text = f"{code[1]}: {message[1]}" if message else code[1]
    elif cause := re.search(r'message: "([^"]*)"', debug) or re.search(r"kind: (Timeout)", debug):
        text = f"{text} ({cause[1]})"
    return re.sub(r"\?\S*", "", " ".join(text.split()))[:300]


# ---------------------------------------------------------------- URLs


def open_s3(
    where: str,
    *,
    endpoint: str = "",
    region: str = "",
    allow_http: str = "no",
    timeout_s: str = "10",
    connections: str = "32",
) -> ObjectTier:
    """``s3:BUCKET[/PREFIX]?...``; ``ConfigError``, connects nowhere."""
    at = _address("s3", where, endpoint, allow_http, timeout_s, connections)
    config: S3Config = {}
    if endpoint:
        config["endpoint"] = endpoint
    if region:
        config["region"] = region
    return at.open(
        lambda: S3Store(at.bucket, config=config, client_options=at.client, retry_config=at.retry),
        bulk=True,
    )


def open_gcs(
    where: str,
    *,
    endpoint: str = "",
    allow_http: str = "no",
    timeout_s: str = "10",
    connections: str = "32",
) -> ObjectTier:
    """``gcs:BUCKET[/PREFIX]?...``; ``ConfigError``, connects nowhere."""
    at = _address("gcs", where, endpoint, allow_http, timeout_s, connections)
    config: GCSConfig = {"base_url": endpoint} if endpoint else {}
    return at.open(
        lambda: GCSStore(at.bucket, config=config, client_options=at.client, retry_config=at.retry)
    )


def open_azure(
    where: str,
    *,
    account: str = "",
    endpoint: str = "",
    allow_http: str = "no",
    timeout_s: str = "10",
    connections: str = "32",
) -> ObjectTier:
    """``azure:CONTAINER[/PREFIX]?...``; ``ConfigError``, connects nowhere."""
    at = _address("azure", where, endpoint, allow_http, timeout_s, connections)
    config: AzureConfig = {}
    if account:
        config["account_name"] = account
    if endpoint:
        config["endpoint"] = endpoint
    return at.open(
        lambda: AzureStore(
            at.bucket, config=config, client_options=at.client, retry_config=at.retry
        )
    )


class _Address(NamedTuple):
    """What all of them say alike."""

    name: str
    bucket: str
    prefix: str
    connections: int
    timeout_s: int
    client: ClientConfig
    retry: RetryConfig

    def open(self, make: Callable[[], Store], *, bulk: bool = False) -> ObjectTier:
        try:
            store = make()
        except (*_TROUBLE, ValueError) as error:
            raise ConfigError(f"{self.name}: {_said(error)}") from None
        return ObjectTier(
            self.name,
            store,
            prefix=self.prefix,
            connections=self.connections,
            timeout_s=self.timeout_s,
            bulk=bulk,
        )


_BUCKET: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{1,221}")
_PREFIX: Final = re.compile(r"(?!.*(^|/)\.{1,2}(/|$))[0-9A-Za-z._-]+(/[0-9A-Za-z._-]+)*")
_MOST_PREFIX: Final = 400
"""Of the 1024 bytes of an object's name a record needs 520."""


def _address(
    scheme: str, where: str, endpoint: str, allow_http: str, timeout_s: str, connections: str
) -> _Address:
    name = f"{scheme}:{where}"
    bucket, slash, prefix = where.removeprefix("//").partition("/")
    prefix = prefix.rstrip("/") if slash else "kvass"
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"{name}: {bucket!r} is no bucket; write {scheme}:BUCKET/PREFIX")
    if {"records", "notes"} & set(prefix.split("/")):
        raise ConfigError(f"{name}: records and notes are names of ours, not of a prefix")
    if not _PREFIX.fullmatch(prefix) or len(prefix) > _MOST_PREFIX:
        raise ConfigError(
            f"{name}: {prefix!r:.100} is no prefix: names of 0-9 A-Z a-z . _ - with / between "
            f"them, at most {_MOST_PREFIX} characters"
        )
    for option, text, most in (("timeout_s", timeout_s, 3600), ("connections", connections, 256)):
        if not text.isdecimal() or not 1 <= int(text[:9]) <= most:
            raise ConfigError(f"{name}: {option}: {text!r} is not 1..{most}")
    if allow_http not in ("yes", "no"):
        raise ConfigError(f"{name}: allow_http: {allow_http!r} is neither yes nor no")
    if endpoint and not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", endpoint):
        raise ConfigError(f"{name}: endpoint: write https://HOST[:PORT], without user or query")
    if endpoint.startswith("http:") and allow_http == "no":
        raise ConfigError(f"{name}: endpoint: http is not encrypted; allow_http=yes allows it")
    most_s = int(timeout_s)
    return _Address(
        name, bucket, prefix, int(connections), most_s, *_bounds(allow_http == "yes", most_s)
    )


def _bounds(allow_http: bool, timeout_s: int) -> tuple[ClientConfig, RetryConfig]:
    """A server that is gone or silent is noticed in ``timeout_s``, not in the client's minutes."""
    silence = timedelta(seconds=timeout_s)
    client: ClientConfig = {
        "connect_timeout": silence,
        "read_timeout": silence,
        "timeout": _PATIENCE * silence,
    }
    if allow_http:  # else what the environment says
        client["allow_http"] = True
    retry: RetryConfig = {
        "max_retries": 2,
        "retry_timeout": silence,  # so what timed out is not tried again
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(seconds=1),
            "base": 2,
        },
    }
    return client, retry
