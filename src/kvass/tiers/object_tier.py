"""Records in an object store, which other machines may share.

A record is one object, so that replacing it is one request and a reader never sees half of it.
Under the prefix, ``records/`` holds an object per record, named by its key in hexadecimal, and
``notes/`` the notes. Only ``clear`` lists objects. The bucket keeps the capacity: a lifecycle rule
for ``records/`` deletes old ones.

A call raises ``TierDown`` if the server cannot be reached, refuses the credentials, has no such
bucket or does not answer for as long as the client waits; the next call tries again. No text of
ours repeats a credential.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeAlias

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from kvass.errors import TierDown
from kvass.tiers.base import MAX_NOTE_BYTES, Shards
from kvass.tiers.buffers import size_of
from kvass.tiers.codec import pack, unpack
from kvass.tiers.record_tier import Outcome, RecordTier
from kvass.tiers.worker_pool import WorkerPool

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
_ABSENT: Final = ("<Code>", "Bulk delete request failed for key")
"""One of these is in what an object store says of an object that is not there: a word of its own
answer, or the client's of one in a batch, which is how it deletes from Azure."""
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound")

_REQUEST: Final = re.compile(r"(Error performing \w+ \w+://[^/?\s]+)\S* in .*? - ", re.DOTALL)
"""How the client begins: method, server, what was asked for, how long and how often it tried."""
_CAUSES: Final = (r'message: "([^"]*)"', r"kind: (Timeout)", r'ConnectError\(\s*"([^"]*)"')
"""Where it says why it got no answer."""

TROUBLE: Final = (BaseError, OSError)
"""What obstore raises; ``FileNotFoundError`` for what is not there."""


class ObjectTier(RecordTier):
    """``Tier`` over a store of obstore.

    ``deletes_many``: the store deletes many objects in one request, and does not mind absent ones.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        *,
        prefix: str,
        connections: int,
        timeout_s: int,
        deletes_many: bool,
    ) -> None:
        super().__init__(name)
        self._store = store
        self._records = f"{prefix}/records"
        self._notes = f"{prefix}/notes"
        self._delete_at_once = _BULK if deletes_many else 1
        self._pool = WorkerPool(
            name, connections, room=_ROOM_BYTES, give_up=_GIVE_UP, long_s=timeout_s
        )
        self._bucket_seen = False

    def _exists(self, keys: Sequence[bytes]) -> list[Outcome]:
        """A HEAD for each, many at once."""
        held = self._pool.each(lambda i: self._head(keys[i]), [0] * len(keys))
        if not any(outcome is True for outcome in held):
            self._need_bucket(self._path(keys[0]))
        return held

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
        return False  # or there is no bucket, or no object store at all: see _need_bucket

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
        """What obstore raises is ``TierDown``.

        ``absent_is_fine``: but not if an object store says that there is no such object, and no
        more than that. Any other server at that address would answer 404, too.
        """
        try:
            yield
        except TROUBLE as error:
            text = str(error)
            absent = isinstance(error, FileNotFoundError) and any(word in text for word in _ABSENT)
            if absent_is_fine and absent and not any(code in text for code in _NO_BUCKET):
                return
            self._bucket_seen = False
            raise self._down(error_line(error)) from None

    def _need_bucket(self, path: str) -> None:
        """Raise ``TierDown`` if there is no bucket. A HEAD cannot tell that from an absent object,
        because its answer has no body. Asked until the store said once that only the object is
        absent."""
        if not self._bucket_seen:
            with self._errors(absent_is_fine=True):
                obstore.get(self._store, path)
            self._bucket_seen = True


def error_line(error: Exception) -> str:
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
