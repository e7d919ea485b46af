"""The directory of a saved index: a log of namespaces, row classes and extent sets.

Law of this file: what the log says at any instant is whole. A record counts when the end of the log
is written behind it. When a half of the memory is full, what still holds is written to the other
half, and one word in the header makes that half the current one.

What the log says was true between two writes of the core. A set that it does not name has no rows,
and nobody writes to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvass.core.clients.registry import RowClassSpec
from kvass.messages import Register
from kvass.types import I64Array, U64Array, align_up

LEAST_FREE: Final = 64 << 10
"""The bytes of each half that only records of removals may use, so that a removal always fits."""
MOST_COUNT: Final = 1 << 62
"""No count of what happened comes so far; a higher one is damage."""
_STEP: Final = 1 << 20
"""Memory is allocated in steps of this many bytes."""
_HEAD: Final = 16
"""Before each record: its length, and its checksum."""
_MOST_IDENTITY: Final = 8 << 10
"""A larger identity of a namespace is left out: it is for display only."""

Bytes = npt.NDArray[np.uint8]
Allocate = Callable[[int, int], bool]
"""Gives bytes ``[lo, hi)`` of the file memory; False: there is none."""


Kind = Literal["namespace", "class", "set"]


class SavedNamespace(msgspec.Struct, frozen=True, tag="namespace", array_like=True):
    """The fields of a ``Namespace`` that its first engine determined."""

    id: int
    digest: bytes
    chunk_tokens: int
    terms: Register
    model: str
    private: bool


class SavedClass(msgspec.Struct, frozen=True, tag="class", array_like=True):
    """A row class: its namespace and group, and who pays for it."""

    id: int
    namespace: int
    tenant: str
    spec: RowClassSpec


class SavedSet(msgspec.Struct, frozen=True, tag="set", array_like=True):
    id: int
    row_class: int
    slots: int
    first_row: int
    bases: tuple[int, ...]
    extent_bytes: tuple[int, ...]


class Gone(msgspec.Struct, frozen=True, tag="gone", array_like=True):
    """Entries of one ``kind`` that do not hold any more. ``ids``: packed int64."""

    kind: Kind
    ids: bytes


Entry = SavedNamespace | SavedClass | SavedSet
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry | Gone).decode


class Directory:
    """The log in ``memory``, which has two halves of ``half`` bytes.

    ``words``: in the header, the number of times that the log has changed halves, and the end of
    each half. ``allocate``: as in ``SavedIndex``, of bytes of ``memory``.
    """

    def __init__(self, memory: Bytes, words: U64Array, allocate: Allocate) -> None:
        self._memory, self._words, self._allocate = memory, words, allocate
        self._half = len(memory) // 2
        self._allocated = 0
        """How many first bytes of each half have memory."""
        self._held: dict[tuple[str, int], bytes] = {}
        """The record of each entry that holds."""
        self._size = 0
        """The bytes of all entries that hold, with their heads."""

    @property
    def _now(self) -> int:
        return int(self._words[0]) & 1

    def read(self) -> list[Entry] | None:
        """The entries that hold; ``None`` if the log is damaged. The directory then has them."""
        begin, end = self._now * self._half, int(self._words[1 + self._now])
        if end > self._half or int(self._words[0]) >= MOST_COUNT:
            return None
        raw, at, entries = (
            self._memory[begin : begin + end].tobytes(),
            0,
            dict[tuple[str, int], Entry](),
        )
        while at < end:
            size = int.from_bytes(raw[at : at + 8], "little")
            record = raw[at + _HEAD : at + _HEAD + size]
            if len(record) != size or _check(record) != raw[at + 8 : at + _HEAD]:
                return None
            try:
                entry = _decode(record)
            except msgspec.DecodeError:
                return None
            at += _HEAD + align_up(size, 8)
            if isinstance(entry, Gone):
                for one in np.frombuffer(entry.ids, np.int64).tolist():
                    entries.pop((entry.kind, one), None)
                    self._forget(entry.kind, one)
            else:
                entries[_kind(entry), entry.id] = entry
                self._hold((_kind(entry), entry.id), record)
        self._allocated = min(self._half, align_up(end, _STEP))
        return list(entries.values())

    def replace(self, entries: list[Entry]) -> bool:
        """Make ``entries`` all that holds. False: there is no room, and nothing changed."""
        before = self._held, self._size
        self._held, self._size = {}, 0
        for entry in entries:
            self._hold((_kind(entry), entry.id), _record(entry))
        if self._fits(0):
            self._compact()
            return True
        self._held, self._size = before
        return False

    def put(self, entry: Entry) -> bool:
        """Add an entry, or replace the one of that kind and id. False: there is no room for it."""
        record = _record(entry)
        if not self._fits(_length(record)):
            return False
        self._hold((_kind(entry), entry.id), record)
        self._append(record)
        return True

    def remove(self, kind: Kind, ids: I64Array) -> None:
        """Remove the entries of ``kind`` that have these ids."""
        known = [one for one in ids.tolist() if (kind, one) in self._held]
        for one in known:
            self._forget(kind, one)
        if known:
            self._append(_encode(Gone(kind, np.array(known, np.int64).tobytes())))

    # ------------------------------------------------------------ memory

    def _hold(self, name: tuple[str, int], record: bytes) -> None:
        self._forget(*name)
        self._held[name] = record
        self._size += _length(record)

    def _forget(self, kind: str, one: int) -> None:
        if (old := self._held.pop((kind, one), None)) is not None:
            self._size -= _length(old)

    def _fits(self, more: int) -> bool:
        """Whether all that holds and ``more`` bytes fit into either half."""
        need = min(self._half, align_up(2 * (self._size + more + LEAST_FREE), _STEP))
        if self._size + more + LEAST_FREE > need:
            return False
        if need > self._allocated:
            low = self._allocated
            if not all(self._allocate(at + low, at + need) for at in (0, self._half)):
                return False
            self._allocated = need
        return True

    def _append(self, record: bytes) -> None:
        at = int(self._words[1 + self._now])
        if at + _length(record) > self._allocated:
            self._compact()
            return
        self._write(self._now, at, [record])

    def _compact(self) -> None:
        """Write all that holds to the other half, and make it the current one."""
        self._write(1 - self._now, 0, self._held.values())
        self._words[0] += 1

    def _write(self, half: int, at: int, records: Iterable[bytes]) -> None:
        raw = b"".join(map(_framed, records))
        begin = half * self._half + at
        self._memory[begin : begin + len(raw)] = np.frombuffer(raw, np.uint8)
        self._words[1 + half] = at + len(raw)


def _kind(entry: Entry) -> str:
    return str(type(entry).__struct_config__.tag)


def _record(entry: Entry) -> bytes:
    if isinstance(entry, SavedNamespace):
        texts = sum(len(k) + len(v) for k, v in entry.terms.identity.items())
        if texts > _MOST_IDENTITY:
            terms = msgspec.structs.replace(entry.terms, identity={})
            entry = msgspec.structs.replace(entry, terms=terms)
    return _encode(entry)


def _length(record: bytes) -> int:
    return _HEAD + align_up(len(record), 8)


def _framed(record: bytes) -> bytes:
    framed = len(record).to_bytes(8, "little") + _check(record) + record
    return framed.ljust(_length(record), b"\0")


def _check(record: bytes) -> bytes:
    return hashlib.blake2b(record, digest_size=8).digest()
