"""Records in a Mooncake Store: the memory of many machines, and one master that knows who has what.

A record is one object: header, then shards. Nothing is believed that the header's checksums do not
cover. An object cannot be changed: to replace it is to remove it and put another, and meanwhile it
is a miss. A reader may still be reading the memory of an object that was removed, and then gets a
mixture: that fails the checksum, is read once more, and is damaged if it fails again. An object
that has our header already is left as it is.

Records live as long as the clients that contributed their memory, and as the master; it evicts them
as it sees fit. Nothing is connected at start. See ``client.py`` for what bounds a call.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from kvass.errors import ConfigError, TierDown
from kvass.tiers.base import MAX_NOTE_BYTES, Buffer, Shards
from kvass.tiers.buffers import groups
from kvass.tiers.codec import Header
from kvass.tiers.mooncake.bounce import BounceBuffer
from kvass.tiers.mooncake.client import (
    ABSENT,
    LEASE_OVER,
    NO_ROOM,
    OTHER_SIZE,
    MooncakeClient,
    lasting,
    meaning,
    plain,
)
from kvass.tiers.mooncake.transfer import ObjectTransfer
from kvass.tiers.options import MooncakeOptions
from kvass.tiers.record_tier import Outcome, RecordTier
from kvass.tiers.worker_pool import WorkerPool

_log = logging.getLogger("kvass.tiers")

_GROUP_BYTES: Final = 32 << 20
"""What is asked for at a time; the library gives up on a request after a minute."""
_GROUP_RECORDS: Final = 16
"""Four go to an owner at a time, and one that stands still keeps each for ``timeout_s``: together
they must be over within that minute."""
_GROUPS_AT_ONCE: Final = 2
"""Of one call: while one is on the wire, the checksums of the other are computed."""
_THREADS: Final = 4
_ROOM_TRIES: Final = 5
_ROOM_S: Final = 0.02
"""The master evicts some time after it refused."""
_PORT: Final = "50051"
"""The master's, by default."""
_NOTE: Final = 2 + MAX_NOTE_BYTES
"""Bytes of a note's record: its length, and room for the longest."""
_NOTE_COPIES: Final = 3
_NO_ANSWER: Final = "the master does not tell"

Transfers: TypeAlias = list[ObjectTransfer]


class MooncakeTier(RecordTier):
    """``Tier`` over a Mooncake Store.

    Beyond the protocol there is ``register_memory``, to be called once, with all of the memory that
    most buffers will lie in: those are transferred without a copy. Others, small ones, and all if
    the memory cannot be registered, are copied by way of a bounce buffer that all calls share; a
    record that needs more of it than there is, is refused. ``bounced_bytes`` counts what is copied.
    """

    def __init__(self, name: str, master: tuple[str, int], options: MooncakeOptions) -> None:
        super().__init__(name)
        self._prefix = options.prefix
        self._bounce = BounceBuffer(options.bounce)
        self._mooncake = MooncakeClient(name, master, options, self._bounce.memory)
        self._pool = WorkerPool("kvass-mooncake", _THREADS, give_up=1)
        self._storing: set[str] = set()
        self._stored = threading.Condition()
        self._noting = threading.Lock()
        self._counting = threading.Lock()
        self._warned: set[str] = set()
        self.bounced_bytes = 0

    def register_memory(self, buffer: Buffer) -> None:
        """Transfer buffers inside it without a copy. The memory must stay until ``close`` is
        over."""
        with self._call():
            self._mooncake.announce(buffer)

    def _exists(self, keys: Sequence[bytes]) -> list[Outcome]:
        """Which the master knows of; one round trip."""
        codes = self._mooncake.client().batch_is_exist([self._record(key) for key in keys])
        return [self._down(_NO_ANSWER) if code < 0 else code == 1 for code in codes]

    def _get(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[Outcome]:
        pairs = zip(keys, into, strict=True)
        wanted = [self._transfer(self._record(key), key, shards) for key, shards in pairs]
        return self._in_groups(wanted, self._fetch)

    def _put(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[Outcome]:
        pairs = zip(keys, data, strict=True)
        given = [self._transfer(self._record(key), key, shards, 1) for key, shards in pairs]
        return self._in_groups(given, partial(self._replace, how=plain()))

    def _delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        return self._remove([self._record(key) for key in keys])

    def _clear(self) -> None:
        """All under our prefix, whoever stored it."""
        pattern = "^" + re.sub(r"([./-])", r"\\\1", self._prefix) + "r:"
        code = self._mooncake.client().remove_by_regex(pattern, True)
        if code < 0:
            raise self._down(meaning(code))

    def _get_note(self, name: str) -> bytes | None:
        """A damaged one is none."""
        return self._newest_note(name)[1]

    def _put_note(self, name: str, value: bytes) -> None:
        """As durable as the memory of several machines, if there are several."""
        shard = np.zeros(_NOTE, np.uint8)
        shard[: 2 + len(value)] = memoryview(len(value).to_bytes(2, "little") + value)
        with self._noting:
            number = self._newest_note(name)[0] + 1
            transfer = self._transfer(self._note(name, number % 2), name.encode(), [shard], number)
            [held] = self._in_groups([transfer], partial(self._replace, how=lasting(_NOTE_COPIES)))
        if isinstance(held, TierDown):
            raise held
        if not held:
            raise self._down(meaning(NO_ROOM))

    def _close(self) -> None:
        """With the client goes the memory that we contributed, and what lay in it."""
        self._pool.close()
        self._mooncake.close()

    # ------------------------------------------------------------ names

    def _record(self, key: bytes) -> str:
        return f"{self._prefix}r:{key.hex()}"

    def _note(self, name: str, place: int) -> str:
        """A note has two places by turns, so that the one before stays while the next is put."""
        return f"{self._prefix}n{place}:{name}"

    def _newest_note(self, name: str) -> tuple[int, bytes | None]:
        """The number and the value of a note; 0 and ``None`` if there is none."""
        values = np.zeros((2, _NOTE), np.uint8)
        places = [self._transfer(self._note(name, i), name.encode(), [values[i]]) for i in range(2)]
        outcomes = self._in_groups(places, self._fetch)
        for outcome in outcomes:
            if isinstance(outcome, TierDown):  # it may be the newer one
                raise outcome
        found = [(places[i].header.sequence, i) for i in range(2) if outcomes[i] is True]
        if not found:
            return 0, None
        number, i = max(found)
        length = int.from_bytes(values[i, :2].tobytes(), "little")
        return number, values[i, 2 : 2 + length].tobytes()

    # ------------------------------------------------------------ in groups

    def _transfer(self, name: str, key: bytes, shards: Shards, sequence: int = 0) -> ObjectTransfer:
        header = Header(key, tuple(map(len, shards)), sequence, 0)
        return ObjectTransfer(name, header, shards, self._mooncake.direct)

    def _in_groups(
        self, transfers: Transfers, move: Callable[[Transfers], list[Outcome]]
    ) -> list[Outcome]:
        """``move`` of neighbours that are not too much at a time: in bytes, in number, and for half
        of the bounce buffer."""
        room_weight = 2 * _GROUP_BYTES / len(self._bounce.memory)
        sizes = [
            max(item.size, int(item.room_bytes * room_weight), _GROUP_BYTES // _GROUP_RECORDS)
            for item in transfers
        ]
        some = [transfers[i.start : i.stop] for i in groups(sizes, _GROUP_BYTES)]
        moved = self._pool.each(
            lambda i: self._with_room(some[i], move), [0] * len(some), _GROUPS_AT_ONCE
        )
        outcomes: list[Outcome] = []
        for group, result in zip(some, moved, strict=True):
            outcomes += [result] * len(group) if isinstance(result, TierDown) else result
        return outcomes

    def _with_room(
        self, group: Transfers, move: Callable[[Transfers], list[Outcome]]
    ) -> list[Outcome]:
        """``move`` with room in the bounce buffer. Raises ``TierDown`` if all of it is trouble."""
        need = sum(item.room_bytes for item in group)
        if need > len(self._bounce.memory):  # then it is one
            self._warn_once("a record needs more than the bounce buffer: give bounce=SIZE")
            return [False]
        with self._bounce.piece(need) as room:
            at = 0
            for item in group:
                item.use_room(room[at : at + item.room_bytes])
                at += item.room_bytes
            outcomes = move(group)
        with self._counting:
            self.bounced_bytes += sum(item.bounced for item in group)
        trouble = [outcome for outcome in outcomes if isinstance(outcome, TierDown)]
        if len(trouble) == len(group):
            raise trouble[0]
        return outcomes

    # ------------------------------------------------------------ objects

    def _fetch(self, transfers: Transfers) -> list[Outcome]:
        """Load them. One that is damaged twice is removed, so that it can be stored again."""
        client = self._mooncake.client()
        outcomes: list[Outcome] = [False] * len(transfers)
        left = list(range(len(transfers)))
        for _ in range(2):
            asked = [transfers[i] for i in left]
            codes = client.batch_get_into_multi_buffers(*_requests(asked))
            damaged = []
            for i, item, code in zip(left, asked, codes, strict=True):
                found = item.header_in_room() if code in (item.size, LEASE_OVER) else None
                if found is not None and found.lengths != item.header.lengths:
                    outcomes[i] = False
                elif found is not None and item.finish(found):
                    outcomes[i] = True
                elif code == item.size:
                    damaged.append(i)
                else:
                    outcomes[i] = self._why_not(item, code)
            if not (left := damaged):
                return outcomes
        self._remove([transfers[i].name for i in left])
        return outcomes

    def _why_not(self, item: ObjectTransfer, code: int) -> Outcome:
        """An object of another size is a miss; the library does not say that it is."""
        if code in ABSENT or code >= 0:
            return False
        if code in OTHER_SIZE and self._mooncake.client().get_size(item.name) != item.size:
            return False
        return self._down(meaning(code))

    def _replace(self, transfers: Transfers, how: Any) -> list[Outcome]:
        """Put those that are not there already; waits for other threads that put the same."""
        client = self._mooncake.client()
        for item in transfers:
            item.add_checksum()
        names = [item.name for item in transfers]
        with self._alone(names):
            there = client.batch_is_exist(names)
            if all(code < 0 for code in there):
                raise self._down(_NO_ANSWER)
            existing = [item for item, code in zip(transfers, there, strict=True) if code]
            outcomes = self._remove_others(existing)
            left = [item for item in transfers if item.name not in outcomes]
            for item in left:
                item.fill_room()
            for _ in range(_ROOM_TRIES):
                if not left:
                    break
                codes = client.batch_put_from_multi_buffers(*_requests(left), how)
                for item, code in zip(left, codes, strict=True):
                    refused = code not in (0, NO_ROOM)
                    outcomes[item.name] = self._down(meaning(code)) if refused else code == 0
                left = [item for item, code in zip(left, codes, strict=True) if code == NO_ROOM]
                if left:
                    time.sleep(_ROOM_S)
        if left:
            self._warn_once(meaning(NO_ROOM))
        return [outcomes[name] for name in names]

    def _remove_others(self, existing: Transfers) -> dict[str, Outcome]:
        """Of objects that exist: ``True`` for those that have our size and header. The others are
        removed; trouble, if they cannot be."""
        sizes = self._mooncake.sizes([item.name for item in existing])
        alike = [item for item in existing if sizes.get(item.name) == item.size]
        heads = [(item.name, item.addresses[0], item.head_bytes) for item in alike]
        outcomes: dict[str, Outcome] = {
            item.name: True
            for item, read in zip(alike, self._mooncake.read_beginnings(heads), strict=True)
            if read and item.room_has_header()
        }
        others = [item.name for item in existing if item.name not in outcomes]
        removed = zip(others, self._remove(others), strict=True)
        return outcomes | {name: trouble for name, trouble in removed if trouble is not True}

    def _remove(self, names: list[str]) -> list[Outcome]:
        """Remove objects. A lease, which each reader takes, does not keep one from going."""
        codes = self._mooncake.client().batch_remove(names, True) if names else []
        return [code == 0 or code in ABSENT or self._down(meaning(code)) for code in codes]

    @contextmanager
    def _alone(self, names: list[str]) -> Iterator[None]:
        """Nobody else in this process replaces one of these meanwhile."""
        with self._stored:
            self._stored.wait_for(lambda: self._storing.isdisjoint(names))
            self._storing.update(names)
        try:
            yield
        finally:
            with self._stored:
                self._storing.difference_update(names)
                self._stored.notify_all()

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s: %s", self.name, text)


def _requests(some: Transfers) -> tuple[list[str], list[list[int]], list[list[int]]]:
    return [p.name for p in some], [p.addresses for p in some], [p.sizes for p in some]


def open_mooncake(where: str, options: MooncakeOptions) -> MooncakeTier:
    """``mooncake:HOST[:PORT]?...``, the master's. Raises ``ConfigError``."""
    name = f"mooncake:{where}"
    host, _, port = where.rpartition(":") if ":" in where else (where, "", _PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{name}: {port!r} is no port; write mooncake:HOST:PORT")
    master = host.removeprefix("[").removesuffix("]"), int(port)
    return MooncakeTier(name, master, options)
