"""Tiers in object stores: S3 and compatible stores, Google Cloud Storage, Azure Blob Storage.

A record is one object, so that replacing it is one request and a reader never sees half of it.
Under the prefix, ``records/`` holds an object per record, named by its key in hexadecimal, and
``notes/`` the notes. Only ``clear`` lists objects. The bucket keeps the capacity: a lifecycle rule
for ``records/`` deletes old ones.

Nothing is connected at start. A call raises ``TierDown`` if the server cannot be reached, refuses
the credentials, has no such bucket or does not answer for as long as the client waits; the next
call tries again. Credentials come from the environment and the places that the provider's own tools
look at, never from the URL. No text of ours repeats one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from kvass.errors import ConfigError, TierDown
from kvass.tiers.base import MAX_NOTE_BYTES, Shards
from kvass.tiers.buffers import size_of
from kvass.tiers.codec import pack, unpack
from kvass.tiers.options import AzureOptions, ObjectStoreOptions, S3Options
from kvass.tiers.record_tier import Outcome, RecordTier
from kvass.tiers.worker_pool import WorkerPool

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config

Store: TypeAlias = S3Store | GCSStore | AzureStore

_MOST_BYTES: Final = 4 << 30
"""Of one record; S3 takes 5 GiB in one request, the others at least as much."""
_ROOM_BYTES: Final = 64 << 20
"""What all calls together have in memory."""
_GIVE_UP: Final = 3
"""Failures in a row after which a batch is given up."""
_CHUNK_BYTES: Final = 1 << 20
"""What a load reads at a time. The client holds the next while we copy the last."""
_BULK: Final = 1000
"""Objects that S3 deletes in one request, or lists."""
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound")
_READ_TIMEOUTS: Final = 10
"""A request that goes on, but never for ``timeout_s`` without a byte, may take as many of them."""
_BUCKET: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{1,221}")
_PREFIX: Final = re.compile(r"(?!.*(^|/)\.{1,2}(/|$))[0-9A-Za-z._-]+(/[0-9A-Za-z._-]+)*")
_MOST_PREFIX: Final = 400
"""Of the 1024 bytes of an object's name a record needs 520."""
_ENVIRONMENT: Final = {"s3": "AWS_", "gcs": "GOOGLE_BEARER", "azure": "AZURE_"}
"""Variables whose values go into headers, where the client panics at a control character."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_REQUEST: Final = re.compile(r"(Error performing \w+ \w+://[^/?\s]+)\S* in .*? - ", re.DOTALL)
"""How the client begins: method, server, what was asked for, how long and how often it tried."""
_CAUSES: Final = (r'message: "([^"]*)"', r"kind: (Timeout)", r'ConnectError\(\s*"([^"]*)"')
"""Where it says why it got no answer."""
_TROUBLE: Final = (BaseError, OSError)


class ObjectTier(RecordTier):
    """A ``Tier`` in an object store, through the library obstore.

    ``deletes_many``: the store can delete many objects in one request, and ignores absent ones.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        prefix: str,
        options: ObjectStoreOptions,
        *,
        deletes_many: bool,
    ) -> None:
        super().__init__(name)
        self._store = store
        self._records = f"{prefix}/records"
        self._notes = f"{prefix}/notes"
        self._delete_at_once = _BULK if deletes_many else 1
        limits = {"give_up": _GIVE_UP, "long_s": options.timeout_s}
        self._pool = WorkerPool(name, options.connections, room=_ROOM_BYTES, **limits)

    def _exists(self, keys: Sequence[bytes]) -> list[Outcome]:
        return self._pool.each(lambda i: self._head(keys[i]), [0] * len(keys))

    def _get(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[Outcome]:
        needs = [min(size_of(shards), 2 * _CHUNK_BYTES) for shards in into]
        return self._pool.each(lambda i: self._load(keys[i], into[i]), needs)

    def _put(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[Outcome]:
        return self._pool.each(lambda i: self._store_one(keys[i], data[i]), [*map(size_of, data)])

    def _delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        return self._delete_all([self._path(key) for key in keys])

    def _clear(self) -> None:
        """All records under our prefix, whoever stored them."""
        with self._errors():
            for found in obstore.list(self._store, self._records, chunk_size=_BULK):
                for outcome in self._delete_all([entry["path"] for entry in found]):
                    if isinstance(outcome, TierDown):
                        raise outcome

    def _get_note(self, name: str) -> bytes | None:
        value = None
        with self._errors(absent_is_fine=True):
            got = obstore.get(self._store, f"{self._notes}/{name}")
            if got.meta["size"] <= MAX_NOTE_BYTES:
                value = bytes(got.bytes())
        return value

    def _put_note(self, name: str, value: bytes) -> None:
        """What the store acknowledges is durable."""
        with self._errors():
            obstore.put(self._store, f"{self._notes}/{name}", value, use_multipart=False)

    def _close(self) -> None:
        self._pool.close()

    # ------------------------------------------------------------ one record

    def _path(self, key: bytes) -> str:
        return f"{self._records}/{key.hex()}"

    def _head(self, key: bytes) -> bool:
        with self._errors(), suppress(FileNotFoundError):
            obstore.head(self._store, self._path(key))
            return True
        return False  # or there is no bucket: all other requests tell

    def _load(self, key: bytes, into: Shards) -> bool:
        right: bool | None = False
        with self._errors(absent_is_fine=True):
            got = obstore.get(self._store, self._path(key))
            right = unpack(key, got.meta["size"], got.stream(_CHUNK_BYTES), into)
        if right is None:
            with suppress(TierDown):  # a miss all the same; the next load finds it damaged again
                self._delete_some([self._path(key)])
        return right is True

    def _store_one(self, key: bytes, shards: Shards) -> bool:
        if size_of(shards) > _MOST_BYTES:
            return False
        with self._errors():
            # In one request: parts of an upload that was broken off would stay and cost money.
            obstore.put(self._store, self._path(key), pack(key, shards), use_multipart=False)
        return True

    def _delete_all(self, paths: Sequence[str]) -> list[Outcome]:
        n = self._delete_at_once
        parts = [paths[i : i + n] for i in range(0, len(paths), n)]
        return self._pool.each(lambda i: self._delete_some(parts[i]), [0] * len(parts))

    def _delete_some(self, paths: Sequence[str]) -> bool:
        with self._errors(absent_is_fine=True):
            obstore.delete(self._store, paths)
        return True

    # ------------------------------------------------------------ trouble

    @contextmanager
    def _errors(self, *, absent_is_fine: bool = False) -> Iterator[None]:
        """What obstore raises is ``TierDown``; ``absent_is_fine``: but not that an object of a
        bucket that exists is not there."""
        try:
            yield
        except _TROUBLE as error:
            absent = isinstance(error, FileNotFoundError)
            if not (absent and absent_is_fine) or any(code in str(error) for code in _NO_BUCKET):
                raise self._down(_error_line(error)) from None


def _error_line(error: Exception) -> str:
    """What went wrong, in one line that a status has room for, and nothing of a request but the
    server: a query or a longer answer may repeat a signature, and a key is long."""
    text, _, debug = str(error).partition("\n\nDebug source")
    text = text[max(text.rfind("Error performing"), 0) :]  # before it: what was asked for
    code, message = (re.search(f"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
    if code:
        text = f"{code[1]}: {message[1]}" if message else code[1]
    elif cause := next(filter(None, (re.search(one, debug) for one in _CAUSES)), None):
        text = f"{text} ({cause[1]})"
    text = _REQUEST.sub(r"\1: ", text, count=1)
    return re.sub(r"\?\S*", "", " ".join(text.split()))[:300]


def open_s3(where: str, options: S3Options) -> ObjectTier:
    """``s3:BUCKET[/PREFIX]?...``. Raises ``ConfigError``."""
    config: S3Config = {}
    if options.endpoint:  # both, or the environment's wins
        config["endpoint"] = config["aws_endpoint_url_s3"] = options.endpoint
    if options.region:
        config["region"] = options.region
    return _open("s3", where, options, partial(S3Store, config=config), deletes_many=True)


def open_gcs(where: str, options: ObjectStoreOptions) -> ObjectTier:
    """``gcs:BUCKET[/PREFIX]?...``. Raises ``ConfigError``."""
    config: GCSConfig = {"base_url": options.endpoint} if options.endpoint else {}
    return _open("gcs", where, options, partial(GCSStore, config=config))


def open_azure(where: str, options: AzureOptions) -> ObjectTier:
    """``azure:CONTAINER[/PREFIX]?...``. Raises ``ConfigError``."""
    config: AzureConfig = {}
    if options.account:
        config["account_name"] = options.account
    if options.endpoint:
        config["endpoint"] = options.endpoint
    return _open("azure", where, options, partial(AzureStore, config=config))


def _open(
    scheme: str,
    where: str,
    options: ObjectStoreOptions,
    connect: Callable[..., Store],
    *,
    deletes_many: bool = False,
) -> ObjectTier:
    """``connect`` makes obstore's object of a bucket, and connects nowhere."""
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
    for variable, value in os.environ.items():
        if variable.startswith(_ENVIRONMENT[scheme]) and _CONTROL.search(value):
            raise ConfigError(f"{name}: {variable} has a line break or another control character")
    try:
        client, retry = _limits(options)
        store = connect(bucket, client_options=client, retry_config=retry)
    except (*_TROUBLE, ValueError) as error:
        raise ConfigError(f"{name}: {_error_line(error)}") from None
    return ObjectTier(name, store, prefix, options, deletes_many=deletes_many)


def _limits(options: ObjectStoreOptions) -> tuple[ClientConfig, RetryConfig]:
    """Client options that detect a dead or silent server within ``timeout_s``. The defaults take
    minutes."""
    timeout = timedelta(seconds=options.timeout_s)
    client: ClientConfig = {
        "connect_timeout": timeout,
        "read_timeout": timeout,
        "timeout": _READ_TIMEOUTS * timeout,
    }
    if options.allow_http == "yes":  # else what the environment says
        client["allow_http"] = True
    retry: RetryConfig = {
        "max_retries": 2,
        "retry_timeout": timeout,  # so what timed out is not tried again
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(seconds=1),
            "base": 2,
        },
    }
    return client, retry
