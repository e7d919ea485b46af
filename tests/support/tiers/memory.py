"""The simplest right tier: two dicts and a lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvass.errors import UsageError
from kvass.tiers.base import Shards, check_batch, check_note


@dataclass
class Kept:
    """What outlives a tier. A shard is bytes, or anything that has them."""

    records: dict[bytes, list[Any]] = field(default_factory=dict)
    notes: dict[str, bytes] = field(default_factory=dict)


class MemoryTier:
    """See above. ``hook(method)`` runs at the beginning of each call, without the lock."""

    def __init__(
        self, hook: Callable[[str], None] = lambda _: None, kept: Kept | None = None
    ) -> None:
        kept = kept or Kept()
        self.records, self.notes = kept.records, kept.notes
        self.hook = hook
        self.lock = threading.Lock()
        self.closed = False

    @contextmanager
    def call(self, method: str) -> Iterator[None]:
        self.hook(method)
        with self.lock:
            if self.closed:
                raise UsageError("closed")
            yield

    def check(self, keys: Sequence[bytes], data: Sequence[Shards] | None = None) -> None:
        check_batch(keys, data)

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        self.check(keys)
        with self.call("probe"):
            return [key in self.records for key in keys]

    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        self.check(keys, into)
        with self.call("load"):
            return [self.load_one(key, shards) for key, shards in zip(keys, into, strict=True)]

    def load_one(self, key: bytes, into: Shards) -> bool:
        held = self.records.get(key)
        if held is None or [*map(len, held)] != [*map(len, into)]:
            return False
        for shard, raw in zip(into, held, strict=True):
            shard[:] = np.frombuffer(raw, np.uint8)
        return True

    def store(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        self.check(keys, data)
        with self.call("store"):
            for key, shards in zip(keys, data, strict=True):
                self.store_one(key, shards)
            return [True] * len(keys)

    def store_one(self, key: bytes, shards: Shards) -> None:
        self.records[key] = [shard.tobytes() for shard in shards]

    def delete(self, keys: Sequence[bytes]) -> None:
        self.check(keys)
        with self.call("delete"):
            for key in keys:
                self.records.pop(key, None)

    def clear(self) -> None:
        with self.call("clear"):
            self.records.clear()

    def note(self, name: str) -> bytes | None:
        check_note(name)
        with self.call("note"):
            return self.notes.get(name)

    def set_note(self, name: str, value: bytes) -> None:
        check_note(name, value)
        with self.call("set_note"):
            self.notes[name] = value

    def close(self) -> None:
        with self.lock:
            self.closed = True
