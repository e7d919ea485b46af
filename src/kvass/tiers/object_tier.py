"""Records in an object store, which other machines may share.

Law of this file: one record is one object, header and shards in one piece, so that replacing it is
one request and a reader never sees half of it. Under the prefix, ``records/`` holds an object per
record, named by its key in hexadecimal, and ``notes/`` the notes. Nothing is listed but by
``clear``. The bucket keeps the capacity: its lifecycle rule for ``records/`` lets old ones go.

A server that cannot be reached, refuses the credentials, has no such bucket or says nothing for the
time that the client waits makes a call raise ``TierDown``; the next call tries again. No text of
ours repeats a credential.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, TypeAlias

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from kvass.errors import TierDown
from kvass.tiers.base import MAX_NOTE_BYTES, Shards, check_batch, check_note
from kvass.tiers.gate import Gate
from kvass.tiers.piece import pack, size_of, unpack
from kvass.tiers.worker_pool import Answer, WorkerPool

Store: TypeAlias = S3Store | GCSStore | AzureStore

_MOST_BYTES: Final = 4 << 30
"""Of one record; S3 takes 5 GiB in one request, the others at least as much."""
_ROOM_BYTES: Final = 64 << 20
"""What all calls together have in memory of ours."""
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


class ObjectTier:
    """``Tier`` over a store of obstore. ``deletes_many``: it deletes many in one
    request, and does not mind absent ones."""

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
        self._name = name
        self._store = store
        self._records = f"{prefix}/records"
        self._notes = f"{prefix}/notes"
        self._at_once = _BULK if deletes_many else 1
        self._pool = WorkerPool(name, connections, _ROOM_BYTES, timeout_s)
        self._gate = Gate(name)
        self._bucket_seen = False

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are there: a HEAD for each, many at once."""
        check_batch(keys)
        with self._gate.call():
            held = self._judged(self._pool.each(lambda i: self._holds(keys[i]), [0] * len(keys)))
            if keys and not any(held):
                self._need_bucket(self._record(keys[0]))
            return held

    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        """See ``Tier.load``."""
        check_batch(keys, into)
        needs = [min(size_of(shards), 2 * _CHUNK_BYTES) for shards in into]
        with self._gate.call():
            return self._judged(self._pool.each(lambda i: self._get(keys[i], into[i]), needs))

    def store(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """See ``Tier.store``."""
        check_batch(keys, data)
        last = dict(zip(keys, data, strict=True))  # of duplicates the last
        names = list(last)
        needs = [size_of(shards) for shards in last.values()]
        with self._gate.call():
            put = self._pool.each(lambda i: self._put(names[i], last[names[i]]), needs)
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
            except TROUBLE as error:
                raise self._down(error) from None

    def note(self, name: str) -> bytes | None:
        """See ``Tier.note``."""
        check_note(name)
        with self._gate.call():
            try:
                got = obstore.get(self._store, f"{self._notes}/{name}")
                return bytes(got.bytes()) if got.meta["size"] <= MAX_NOTE_BYTES else None
            except TROUBLE as error:
                self._need_absent(error)
                return None

    def set_note(self, name: str, value: bytes) -> None:
        """See ``Tier.set_note``; what the store acknowledges is durable."""
        check_note(name, value)
        with self._gate.call():
            try:
                obstore.put(self._store, f"{self._notes}/{name}", value, use_multipart=False)
            except TROUBLE as error:
                raise self._down(error) from None

    def close(self) -> None:
        """See ``Tier.close``."""
        if self._gate.shut():
            self._pool.close()

    # ------------------------------------------------------------ one record

    def _record(self, key: bytes) -> str:
        return f"{self._records}/{key.hex()}"

    def _holds(self, key: bytes) -> bool:
        try:
            obstore.head(self._store, self._record(key))
        except FileNotFoundError:
            return False  # or no bucket, or no object store at all: see _need_bucket
        except TROUBLE as error:
            raise self._down(error) from None
        return True

    def _get(self, key: bytes, into: Shards) -> bool:
        path = self._record(key)
        try:
            got = obstore.get(self._store, path)
            whole = unpack(key, got.meta["size"], got.stream(_CHUNK_BYTES), into)
        except TROUBLE as error:
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
        except TROUBLE as error:
            raise self._down(error) from None
        return True

    def _remove(self, paths: Sequence[str]) -> list[Answer]:
        some = [paths[i : i + self._at_once] for i in range(0, len(paths), self._at_once)]
        return self._pool.each(lambda i: self._remove_some(some[i]), [0] * len(some))

    def _remove_some(self, paths: Sequence[str]) -> bool:
        try:
            obstore.delete(self._store, paths)
        except TROUBLE as error:
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
        """Raise ``TierDown`` unless an object store says that there is no such object, and no more
        than that. Any other server at that address would say 404, too."""
        text = str(error)
        absent = isinstance(error, FileNotFoundError) and any(word in text for word in _ABSENT)
        if not absent or any(code in text for code in _NO_BUCKET):
            raise self._down(error) from None

    def _need_bucket(self, path: str) -> None:
        """Raise ``TierDown`` if there is no bucket: a HEAD cannot tell that from an absent object,
        because its answer has no body. Asked until it was told once that only the object is."""
        if not self._bucket_seen:
            try:
                obstore.get(self._store, path)
            except TROUBLE as error:
                self._need_absent(error)
            self._bucket_seen = True

    def _down(self, error: Exception) -> TierDown:
        self._bucket_seen = False
        return TierDown(f"{self._name}: {error_line(error)}")


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
