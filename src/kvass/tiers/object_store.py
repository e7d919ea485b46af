"""The tiers of object stores: S3 and compatible stores, Google Cloud Storage, Azure Blob Storage.

A record is one object, so one request replaces it, and a reader never gets a part of it. Below the
prefix, ``records/`` has one object per record, named by its key in hexadecimal, and ``notes/`` has
the notes. Only ``clear`` lists objects. kvass does not limit the size of a bucket: use a lifecycle
rule that deletes old objects below ``records/``.

An answer counts only if it has what the store gives: an ETag for an object, a code of the store for
an absent one. Any web server says 200 and 404.

No connection is made at start. A call raises ``TierDown`` if the server cannot be reached, refuses
the credentials, has no such bucket, or does not answer within the client's timeouts. The next call
tries again. Credentials come from the environment and the files that the provider's own tools read,
never from the URL. Errors and log lines never contain credentials.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from kvass.errors import ConfigError, ItemRefused, ItemUnreadable, TierDown
from kvass.tiers.base import MAX_NOTE_BYTES, Shards
from kvass.tiers.buffers import size_of
from kvass.tiers.codec import MAX_HEADER_BYTES, Seal, pack, unpack
from kvass.tiers.object_environment import options_of_http
from kvass.tiers.options import AzureOptions, ObjectStoreOptions, S3Options
from kvass.tiers.proof import first_words
from kvass.tiers.record_tier import Outcome, RecordTier
from kvass.tiers.worker_pool import WorkerPool

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config

Store: TypeAlias = S3Store | GCSStore | AzureStore

_MOST_BYTES: Final = 4 << 30
"""The largest record. S3 takes 5 GiB in one request, the others at least as much."""
_BUFFER_BYTES: Final = 64 << 20
"""Memory that all calls together use for the bytes of records."""
_MAX_FAILURES: Final = 3
"""Failures in a row after which no more requests of a batch are sent."""
_PIECE_BYTES: Final = 1 << 20
"""Bytes that a load reads at a time. The client reads the next piece while we copy the last."""
_BULK: Final = 1000
"""Number of objects that one request to S3 deletes or lists."""
_ABSENT: Final = re.compile(
    "<Code>(NoSuchKey|BlobNotFound)</Code>|Bulk delete request failed for key"
)
"""What S3 and Google, Azure, and Azure's bulk deletes say of an object that does not exist. Any web
server says 404."""
_ANSWERED: Final = re.compile(
    r"Server returned non-2xx status code: (\d+)|request failed for key"
    r"|Got invalid |Header missing|from headers"
)
"""What the client's errors say if there was an answer, and its status if that is the reason."""
_LATER: Final = ("408", "429")
"""Statuses that ask to try later, beside those from 500 on."""
_READ_TIMEOUTS: Final = 10
"""Limit of the duration of a request, in multiples of ``timeout_s``. ``timeout_s`` itself is the
limit of the time without a byte."""
_BUCKET: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{1,221}")
_PREFIX: Final = re.compile(r"(?!.*(^|/)\.{1,2}(/|$))[0-9A-Za-z._-]+(/[0-9A-Za-z._-]+)*")
_MOST_PREFIX: Final = 400
"""The longest prefix in characters. An object's name has at most 1024 bytes, of which a record
needs 520."""
_REQUEST: Final = re.compile(r"(Error performing \w+ \w+://[^/?\s]+)\S* in .*? - ", re.DOTALL)
"""The start of the client's errors: method, server, object, duration and number of attempts."""
_CAUSES: Final = (r'message: "([^"]*)"', r"kind: (Timeout)", r'ConnectError\(\s*"([^"]*)"')
"""The parts of the client's errors that say why there was no answer."""
_TROUBLE: Final = (BaseError, OSError)


class ObjectTier(RecordTier):
    """``Tier`` with a store of obstore as the backend. ``connect`` makes obstore's object of it,
    with a pool of connections of its own, but no connection.

    ``deletes_many``: the store deletes many objects in one request, and ignores absent ones.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Store],
        prefix: str,
        options: ObjectStoreOptions,
        *,
        deletes_many: bool,
    ) -> None:
        super().__init__(name)
        self._connect = connect
        self._store = connect()
        self._records = f"{prefix}/records"
        self._notes = f"{prefix}/notes"
        self._delete_at_once = _BULK if deletes_many else 1
        self._pool = WorkerPool(
            name,
            options.connections,
            max_bytes=_BUFFER_BYTES,
            max_failures=_MAX_FAILURES,
            slow_failure_s=options.timeout_s,
        )

    def _exists(self, keys: Sequence[bytes]) -> list[Outcome]:
        return self._pool.each(lambda i: self._head(keys[i]), [0] * len(keys))

    def _get(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[Outcome]:
        needs = [min(size_of(shards), 2 * _PIECE_BYTES) for shards in into]
        return self._pool.each(lambda i: self._load(keys[i], into[i]), needs)

    def _put(self, keys: Sequence[bytes], data: Sequence[Shards], tenant: str) -> list[Outcome]:
        seal = self._seal(tenant)
        needs = [*map(size_of, data)]
        return self._pool.each(lambda i: self._store_one(keys[i], data[i], seal), needs)

    def _delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        return self._delete_all([self._path(key) for key in keys])

    def _clear(self) -> None:
        """Delete all records below the prefix, also those that other daemons stored."""
        with self._errors():
            for found in obstore.list(self._store, self._records, chunk_size=_BULK):
                for outcome in self._delete_all([entry["path"] for entry in found]):
                    if isinstance(outcome, TierDown):
                        raise outcome

    def _get_note(self, name: str) -> bytes | None:
        value = None
        with self._errors(absent_is_fine=True):
            got = obstore.get(self._store, f"{self._notes}/{name}")
            most = MAX_NOTE_BYTES + 1
            value = b"".join(map(bytes, islice(got.stream(most), 1)))[:most]
            self._known(got.meta, value)
        return value

    def _put_note(self, name: str, value: bytes) -> None:
        """Set a note. It is durable once the store has acknowledged it."""
        with self._errors():
            obstore.put(self._store, f"{self._notes}/{name}", value, use_multipart=False)

    def _renew(self) -> None:
        with suppress(*_TROUBLE, ValueError):  # a file with credentials may be gone
            self._store = self._connect()

    def _close(self) -> None:
        self._pool.close()

    # ------------------------------------------------------------ one record

    def _path(self, key: bytes) -> str:
        return f"{self._records}/{key.hex()}"

    def _head(self, key: bytes) -> bool:
        with self._errors(), suppress(FileNotFoundError):
            self._known(obstore.head(self._store, self._path(key)))
            return True
        return False  # an answer to HEAD has no code: the next check of the store has one

    def _load(self, key: bytes, into: Shards) -> bool:
        right: bool | None = False
        with self._errors(absent_is_fine=True):
            got = obstore.get(self._store, self._path(key))
            self._known(got.meta)
            right = unpack(key, got.meta["size"], got.stream(_PIECE_BYTES), into, self._open)
        if right is None:
            try:
                self._delete_some([self._path(key)])
            except TierDown as error:
                raise self._undeletable(error) from None
            if got.meta["size"] > MAX_HEADER_BYTES + size_of(into):
                raise self._too_long()
        return right is True

    def _store_one(self, key: bytes, shards: Shards, seal: Seal | None) -> bool:
        if size_of(shards) > _MOST_BYTES:
            return False
        with self._errors():
            # In one request, because the parts of an aborted multipart upload would stay and cost
            # money.
            piece = pack(key, shards, seal)
            obstore.put(self._store, self._path(key), piece, use_multipart=False)
        return True

    def _delete_all(self, paths: Sequence[str]) -> list[Outcome]:
        n = self._delete_at_once
        parts = [paths[i : i + n] for i in range(0, len(paths), n)]
        return self._pool.each(lambda i: self._delete_some(parts[i]), [0] * len(parts))

    def _delete_some(self, paths: Sequence[str]) -> bool:
        with self._errors(absent_is_fine=True):
            obstore.delete(self._store, paths)
        return True

    # ------------------------------------------------------------ errors

    @contextmanager
    def _errors(self, *, absent_is_fine: bool = False) -> Iterator[None]:
        """Convert the exceptions of obstore to ``TierDown``: to an ``ItemRefused`` if the server
        answered. ``absent_is_fine``: ignore that an object is absent, if the store says so."""
        try:
            yield
        except _TROUBLE as error:
            text = _text_of(error)
            absent = isinstance(error, FileNotFoundError) and _ABSENT.search(text)
            if not (absent and absent_is_fine):
                raise _kind_of(text)(f"{self.name}: {_error_line(error)}") from None

    def _known(self, meta: ObjectMeta, answer: bytes = b"") -> None:
        """Raise ``ItemRefused`` if the answer has no ETag, as the objects of all stores have."""
        if not meta["e_tag"]:
            words = f": {first_words(answer)!r}" if answer else ""
            text = f"an answer without an ETag, of {meta['size']} bytes{words}: is it the store?"
            raise ItemRefused(f"{self.name}: {text}")


def _text_of(error: Exception) -> str:
    """Return the client's error, with the body of the server's answer."""
    return str(error).partition("\n\nDebug source")[0]


def _code_of(text: str) -> str:
    """Return the code in the body of an answer of a store; empty if it has none."""
    code = re.search("<Code>([^<]*)</Code>", text)
    return code[1] if code else ""


def _kind_of(text: str) -> type[TierDown]:
    """Return what an error of the client is: no answer, a refusal, or one that stays until the
    object is replaced."""
    answered = _ANSWERED.search(text)
    if answered is None:
        return TierDown
    status = answered[1] or ""
    return ItemUnreadable if status.startswith("4") and status not in _LATER else ItemRefused


def _error_line(error: Exception) -> str:
    """Return the error as one line of at most 300 characters. Of the request it has only the
    server, because queries may contain signatures, and keys are long."""
    _, _, debug = str(error).partition("\n\nDebug source")
    text = _text_of(error)
    text = text[max(text.rfind("Error performing"), 0) :]  # the part before it names the object
    message = re.search("<Message>([^<]*)</Message>", text)
    if code := _code_of(text):
        text = f"{code}: {message[1]}" if message else code
    elif cause := next(filter(None, (re.search(one, debug) for one in _CAUSES)), None):
        text = f"{text} ({cause[1]})"
    text = _REQUEST.sub(r"\1: ", text, count=1)
    return re.sub(r"\?\S*", "", " ".join(text.split()))[:300]


def open_s3(where: str, options: S3Options) -> ObjectTier:
    """Open the tier of a URL ``s3:BUCKET[/PREFIX]?...``. ``where`` is the part between ``s3:`` and
    ``?``. Raises ``ConfigError``."""
    config: S3Config = {}
    if options.endpoint:  # both are set, or a variable of the environment would be used instead
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
    """Check a URL's parts and make the tier. ``connect`` makes obstore's object of a bucket; it
    makes no connection. Raises ``ConfigError``."""
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
    try:
        given = options_of_http(scheme, options, os.environ)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    client, retry = _limits(options)
    connect = partial(connect, bucket, client_options={**given, **client}, retry_config=retry)
    try:
        return ObjectTier(name, connect, prefix, options, deletes_many=deletes_many)
    except (*_TROUBLE, ValueError) as error:
        also = f" (the environment has {', '.join(given)})" if given else ""
        raise ConfigError(f"{name}: {_error_line(error)}{also}") from None


def _limits(options: ObjectStoreOptions) -> tuple[ClientConfig, RetryConfig]:
    """Return the client's timeouts and retries. A server that is gone or silent is noticed after
    ``timeout_s``; with the client's defaults it would take minutes."""
    timeout = timedelta(seconds=options.timeout_s)
    client: ClientConfig = {
        "connect_timeout": timeout,
        "read_timeout": timeout,
        "timeout": _READ_TIMEOUTS * timeout,
    }
    if options.allow_http == "yes":  # otherwise the environment decides
        client["allow_http"] = True
    retry: RetryConfig = {
        "max_retries": 2,
        "retry_timeout": timeout,  # so a request that timed out is not tried again
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(seconds=1),
            "base": 2,
        },
    }
    return client, retry
