"""The tier of a Mooncake Store: memory of many machines, and one master that knows where each
object is.

A record is one object: the header, then the shards. It is used only if the header's checksums
match. An object cannot be changed: to replace one, it is removed and another one is put. Between
the two it is a miss. A reader that still reads the memory of a removed object may get a mixture of
bytes, whose checksum does not match.

A record is lost when the master ends, or the client that contributed its memory. The master evicts
records by its own rules. No connection is made at start. ``client.py`` says how long a call can
take.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from kvass.errors import ItemRefused, ItemUnreadable, TierDown
from kvass.tiers.base import MAX_NOTE_BYTES, Buffer, Shards, Varying
from kvass.tiers.buffers import batches_by_size
from kvass.tiers.codec import Header, header_bytes
from kvass.tiers.mooncake.client import (
    ABSENT,
    LEASE_OVER,
    LOST,
    NO_MASTER,
    NO_ROOM,
    OTHER_SIZE,
    MooncakeClient,
    lasting,
    meaning,
    plain,
)
from kvass.tiers.mooncake.transfer import ObjectTransfer
from kvass.tiers.options import MooncakeOptions, host_and_port
from kvass.tiers.record_tier import Outcome, RecordTier, answers
from kvass.tiers.worker_pool import WorkerPool

_log = logging.getLogger("kvass.tiers")

_GROUP_BYTES: Final = 32 << 20
"""The most bytes of one request. The library gives up on a request after a minute."""
_GROUP_RECORDS: Final = 16
"""The most records of one request. The library requests four at a time from a client, and a client
that hangs delays each by ``timeout_s``. All must be over within that minute."""
_GROUPS_AT_ONCE: Final = 2
"""Requests of one call at a time: while one is transferred, the other's checksums are computed."""
_ROOM_TRIES: Final = 5
_ROOM_S: Final = 0.02
"""Seconds before a store is tried again. The master evicts a while after it refused a store."""
_PORT: Final = 50051
"""The default port of the master."""
_NOTE: Final = 2 + MAX_NOTE_BYTES
"""Bytes of a note's record: two for its length, then the longest note."""
_NOTE_COPIES: Final = 3

Transfers: TypeAlias = list[ObjectTransfer]


class MooncakeTier(RecordTier):
    """``Tier`` with a Mooncake Store as the backend.

    It has one more method than the protocol, ``register_memory``: RDMA devices transfer buffers in
    registered memory without a copy.
    """

    def __init__(self, name: str, master: tuple[str, int], options: MooncakeOptions) -> None:
        super().__init__(name)
        self._prefix = options.prefix
        self._mooncake = MooncakeClient(name, master, options)
        self._pool = WorkerPool(
            name, _GROUPS_AT_ONCE, max_failures=1, slow_failure_s=options.timeout_s
        )
        self._warned = False

    def register_memory(self, buffer: Buffer) -> None:
        """Register the memory in which most buffers will be, so that they are transferred without a
        copy. It must stay mapped until ``close`` has returned."""
        with self._call():
            self._mooncake.announce(buffer)

    def _exists(self, keys: Sequence[bytes]) -> list[Outcome]:
        codes = self._mooncake.client().batch_is_exist([self._record(key) for key in keys])
        return [self._failure(code) if code < 0 else code == 1 for code in codes]

    def _get(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[Outcome]:
        outcomes: list[Outcome] = [False] * len(keys)
        left: Sequence[int] = range(len(keys))
        while left:
            now = {keys[i]: i for i in left}  # a request may contain each name only once
            some = self._transfers(list(now), [self._there(k, into[i]) for k, i in now.items()])
            for i, outcome in zip(now.values(), self._in_groups(some, self._fetch), strict=True):
                outcomes[i] = outcome
            left = [i for i in left if now[keys[i]] != i]
        return outcomes

    def _put(self, keys: Sequence[bytes], data: Sequence[Shards], tenant: str) -> list[Outcome]:
        return self._in_groups(self._transfers(keys, data), partial(self._replace, how=plain()))

    def _delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        return self._remove([self._record(key) for key in keys])

    def _clear(self) -> None:
        """Delete all records with our prefix, also those that other daemons stored."""
        pattern = "^" + re.sub(r"([./-])", r"\\\1", self._prefix) + "r:"
        code = self._mooncake.client().remove_by_regex(pattern, True)
        if code < 0:
            raise self._failure(code)

    def _get_note(self, name: str) -> bytes | None:
        """Return a note; None if it is absent or damaged."""
        shard = np.zeros(_NOTE, np.uint8)
        [held] = answers(self._in_groups([self._note(name, shard)], self._fetch))
        length = int.from_bytes(shard[:2].tobytes(), "little")
        return shard[2 : 2 + length].tobytes() if held else None

    def _put_note(self, name: str, value: bytes) -> None:
        """Set a note. It is kept in the memory of several machines, if there are several."""
        shard = np.zeros(_NOTE, np.uint8)
        shard[: 2 + len(value)] = memoryview(len(value).to_bytes(2, "little") + value)
        put = partial(self._replace, how=lasting(_NOTE_COPIES))
        if answers(self._in_groups([self._note(name, shard)], put)) == [False]:
            raise ItemRefused(f"{self.name}: {meaning(NO_ROOM)}")

    def _close(self) -> None:
        """Close the client. The memory that it contributed is lost, with the records in it."""
        self._pool.close()
        self._mooncake.close()

    def _record(self, key: bytes) -> str:
        return f"{self._prefix}r:{key.hex()}"

    def _note(self, name: str, shard: Buffer) -> ObjectTransfer:
        name = f"{self._prefix}n:{name}"
        return ObjectTransfer(name, name.encode(), [shard], self._mooncake.direct)

    def _transfers(self, keys: Sequence[bytes], data: Sequence[Shards]) -> Transfers:
        direct = self._mooncake.direct
        pairs = zip(keys, data, strict=True)
        return [ObjectTransfer(self._record(key), key, shards, direct) for key, shards in pairs]

    def _there(self, key: bytes, into: Shards) -> Shards:
        """Return the part of ``into`` that the object takes. The library loads no object into a
        larger buffer, so it is asked for the size of one that varies."""
        if not isinstance(into, Varying):
            return into
        head = header_bytes(Header(key, (0,), 0, 0))
        size = self._mooncake.client().get_size(self._record(key)) - head
        return [into[0][:size]] if 0 <= size <= len(into[0]) else into

    def _in_groups(
        self, transfers: Transfers, move: Callable[[Transfers], list[Outcome]]
    ) -> list[Outcome]:
        """Call ``move`` with groups of consecutive transfers, which are bounded in bytes and in
        number, and return all outcomes."""
        sizes = [max(item.size, _GROUP_BYTES // _GROUP_RECORDS) for item in transfers]
        some = [transfers[i.start : i.stop] for i in batches_by_size(sizes, _GROUP_BYTES)]

        def work(i: int) -> list[Outcome]:
            with self._mooncake.registered([item.staging for item in some[i]]):
                outcomes = move(some[i])
            trouble = [outcome for outcome in outcomes if isinstance(outcome, TierDown)]
            if len(trouble) == len(outcomes):
                raise trouble[0]
            return outcomes

        outcomes: list[Outcome] = []
        for group, result in zip(some, self._pool.each(work, [0] * len(some)), strict=True):
            outcomes += [result] * len(group) if isinstance(result, TierDown) else result
        return outcomes

    # ------------------------------------------------------------ objects

    def _fetch(self, transfers: Transfers) -> list[Outcome]:
        """Load records. A damaged one is removed, so that it can be stored again."""
        names, addresses, sizes = _requests(transfers)
        client = self._mooncake.client()
        codes = client.batch_get_into_multi_buffers(names, addresses, sizes)
        outcomes: list[Outcome] = []
        damaged = []
        for i, (item, code) in enumerate(zip(transfers, codes, strict=True)):
            found = item.loaded_header() if code in (item.size, LEASE_OVER) else None
            if found is not None and found.lengths != item.lengths:
                outcomes.append(False)
            elif found is not None and item.finish(found):
                outcomes.append(True)
            elif code == item.size:
                outcomes.append(False)
                damaged.append(i)
            else:
                outcomes.append(self._why_not(item, code))
        removed = self._remove([transfers[i].name for i in damaged]) if damaged else []
        for i, outcome in zip(damaged, removed, strict=True):
            if isinstance(outcome, TierDown):
                outcomes[i] = self._undeletable(outcome)
        return outcomes

    def _why_not(self, item: ObjectTransfer, code: int) -> Outcome:
        """Return the outcome for an error code of a load. An object of another size is a miss, but
        the library has no code for that alone."""
        if code in ABSENT or code >= 0:
            return False
        if code in OTHER_SIZE and self._mooncake.client().get_size(item.name) != item.size:
            return ItemUnreadable(f"{self.name}: an object of another size than its record")
        return self._failure(code)

    def _failure(self, code: int) -> TierDown:
        """Return what a code is, unless it is that of a put: no answer of the master, or what it
        or an owner of memory says of one record."""
        kind = TierDown if code in NO_MASTER else ItemUnreadable if code in LOST else ItemRefused
        return kind(f"{self.name}: {meaning(code)}")

    def _replace(self, transfers: Transfers, how: Any) -> list[Outcome]:
        """Store records: remove the objects of the same names, then put the new ones."""
        client = self._mooncake.client()
        for item in transfers:
            item.fill_staging()
        outcomes = self._remove([item.name for item in transfers])
        left = [i for i, removed in enumerate(outcomes) if removed is True]
        for _ in range(_ROOM_TRIES):
            if not left:
                return outcomes
            names, addresses, sizes = _requests([transfers[i] for i in left])
            codes = client.batch_put_from_multi_buffers(names, addresses, sizes, how)
            for i, code in zip(left, codes, strict=True):
                refused = code not in (0, NO_ROOM)
                outcomes[i] = self._down(meaning(code)) if refused else code == 0
            left = [i for i, code in zip(left, codes, strict=True) if code == NO_ROOM]
            if left:
                time.sleep(_ROOM_S)
        if left and not self._warned:
            self._warned = True
            _log.warning("%s: %s", self.name, meaning(NO_ROOM))
        return outcomes

    def _remove(self, names: list[str]) -> list[Outcome]:
        """Remove objects, also those that readers have leased."""
        codes = self._mooncake.client().batch_remove(names, True)
        return [code == 0 or code in ABSENT or self._failure(code) for code in codes]


def _requests(some: Transfers) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """Return the names of the objects, and the addresses and sizes of their pieces of memory."""
    return [p.name for p in some], [p.addresses for p in some], [p.sizes for p in some]


def open_mooncake(where: str, options: MooncakeOptions) -> MooncakeTier:
    """Open the tier of a URL ``mooncake:HOST[:PORT]?...``. HOST and PORT are those of the master.
    Raises ``ConfigError``."""
    return MooncakeTier(f"mooncake:{where}", host_and_port("mooncake", where, _PORT), options)
