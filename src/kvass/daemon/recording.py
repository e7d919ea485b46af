"""The recorder of ``kvass serve --record``: writes what engines look up and store to a file. The
file has no content of prompts.

Laws of this file: the loop never waits for the disk. A thread hashes and writes; messages that do
not fit into its queue are dropped and counted. A full disk or a full file ends the recording, not
the daemon.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from kvass.core.rows.row_classes import Namespace
from kvass.daemon.notices import Notices
from kvass.errors import ConfigError
from kvass.messages import FromClient, HandedOver, Lookup, Reserve
from kvass.recording import KEY_BYTES, AnyLine, EngineLine, Group, LookupLine, LostLine, StoreLine

WAITING_BYTES: Final = 16 << 20
"""Limit of the bytes of messages that are queued for the thread."""
_EACH_BYTES: Final = 1 << 10
"""Estimated bytes of a message, or of an item of it, without its hashes."""
_AT_ONCE: Final = 128
"""Number of hashes that the thread computes before it releases the GIL."""
_END_S: Final = 2.0
"""Seconds that ``close`` waits for the thread."""


class Recorder:
    """Writes a recording to ``path``, of at most ``limit_bytes``. Raises ``FileExistsError``, or
    ``ConfigError`` if the file cannot be created."""

    def __init__(self, path: str, limit_bytes: int, notices: Notices) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)
        except FileExistsError:
            raise
        except OSError as error:
            raise ConfigError(f"record {path}: {error.strerror}") from error
        self._path, self._left, self._notices = path, limit_bytes, notices
        self._key, self._began = os.urandom(16), time.monotonic()
        self._engines: set[int] = set()
        self._queue = queue.SimpleQueue[tuple[float, Namespace, Lookup | Reserve] | None]()
        self._waiting = self._lost = self._kept_bytes = 0
        self._kept: dict[tuple[int, str], Lookup] = {}
        """By namespace and request, its last lookup, whose result is reported."""
        self._lock = threading.Lock()
        """Guards ``_waiting``."""
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def take(self, now: float, namespace: Namespace | None, message: FromClient) -> None:
        """Queue a scheduler's message, which the core handled at ``now``. Pass only messages that
        the core accepted: the fields of a refused one may have any value."""
        if namespace is None or not self._left:
            return
        if isinstance(message, Lookup) and not message.again:
            if message.reported:
                self._keep(namespace, message)
            else:
                self._put(now, namespace, message)
        elif isinstance(message, HandedOver):
            for result in message.results:
                self._put_kept(now, namespace, result.request)
        elif isinstance(message, Reserve):
            for item in message.items:
                self._put_kept(now, namespace, item.request)
            self._put(now, namespace, message)

    def _keep(self, namespace: Namespace, message: Lookup) -> None:
        """Keep the last lookup of a request. It is written when the request has got blocks: by its
        first store, or its result."""
        name = namespace.id, message.request
        if (before := self._kept.pop(name, None)) is not None:
            self._kept_bytes -= _size(before)
        self._kept[name] = message
        self._kept_bytes += _size(message)
        while self._kept_bytes > WAITING_BYTES:
            self._kept_bytes -= _size(self._kept.pop(next(iter(self._kept))))
            self._lost += 1

    def _put_kept(self, now: float, namespace: Namespace, request: str) -> None:
        if (message := self._kept.pop((namespace.id, request), None)) is not None:
            self._kept_bytes -= _size(message)
            self._put(now, namespace, message)

    def _put(self, now: float, namespace: Namespace, message: Lookup | Reserve) -> None:
        if self._waiting > WAITING_BYTES:
            self._lost += 1
            return
        with self._lock:
            self._waiting += _size(message)
        self._queue.put((now, namespace, message))

    def close(self) -> None:
        """Write the queued messages, for at most two seconds, and end the thread."""
        self._queue.put(None)
        self._thread.join(_END_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            now, namespace, message = entry
            with self._lock:
                self._waiting -= _size(message)
            if self._left:
                self._write(self._lines(now, namespace, message))
        os.close(self._fd)

    def _write(self, lines: Iterator[AnyLine]) -> None:
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        why = "it has reached --record-size"
        if len(text) <= self._left:
            try:
                while text:
                    written = os.write(self._fd, text)
                    text, self._left = text[written:], self._left - written
                return
            except OSError as error:
                why = str(error.strerror)
        self._left = 0
        self._notices.note("record", f"the recording {self._path} has ended: {why}")

    def _lines(self, now: float, ns: Namespace, message: Lookup | Reserve) -> Iterator[AnyLine]:
        if self._lost:
            lost, self._lost = self._lost, 0
            yield LostLine(ns.id, lost)
        if ns.id not in self._engines:
            self._engines.add(ns.id)
            yield EngineLine(ns.id, ns.chunk_tokens, tuple(_groups(ns)))
        t, width = round(now - self._began, 6), message.width
        if isinstance(message, Lookup):
            keys, blocks = self._keys(message.digests, width), self._keys(message.blocks, width)
            yield LookupLine(ns.id, t, self._request(message.request), keys, blocks)
            return
        for item in message.items:
            keys = self._keys(item.digests[item.first * width :], width)
            request, blocks = self._request(item.request), self._keys(item.blocks, width)
            yield StoreLine(ns.id, t, request, item.first, keys, item.groups, blocks)

    def _keys(self, digests: bytes, width: int) -> bytes:
        keys = []
        for i in range(0, len(digests), width):
            if i % (_AT_ONCE * width) == 0:
                time.sleep(0)  # releases the GIL for the loop's thread
            keys.append(self._hash(digests[i : i + width]))
        return b"".join(keys)

    def _request(self, name: str) -> int:
        return int.from_bytes(self._hash(name.encode()), "little") >> 1

    def _hash(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, digest_size=KEY_BYTES, key=self._key).digest()


def _size(message: Lookup | Reserve) -> int:
    if isinstance(message, Lookup):
        return _EACH_BYTES + len(message.digests) + len(message.blocks)
    return _EACH_BYTES + sum(
        _EACH_BYTES + len(item.digests) + len(item.blocks) for item in message.items
    )


def _groups(ns: Namespace) -> Iterator[Group]:
    for row_class in ns.classes:
        group, row_bytes = row_class.spec.layout, row_class.spec.row_bytes
        yield Group(group.kind, group.block_tokens, row_bytes, group.window_tokens)
