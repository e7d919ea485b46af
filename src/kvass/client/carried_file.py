"""The file of a session that is carried to another daemon: its format. It is read and written once,
from the beginning to the end, so it may be a pipe.

Laws of this file: a record is given out after all of it was checked, and after what is before it.
Memory is that of one record, and ``MOST_BEFORE`` at most for what is before them.

The first line is ``kvass carry 1``. After it are records (``tiers/codec.py``), each a header and
its shards without padding:

- One whose key is ``kvass carry: what``: a ``What`` in MessagePack. An unknown field is ignored.
- The rows. Their keys are those of a tier, of epoch 0 and with chunk hashes of 32 bytes.
- One whose key is ``kvass carry: end``: how many rows there were, 8 bytes, little-endian.

With a key file all of them are encrypted, and a record's key is the name that an encrypted tier
would give it. So an encrypted file says nothing but its lengths. The first line is followed by
nothing that could be read without the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec
import numpy as np

from kvass.errors import KvassError
from kvass.messages import EngineIs, Register
from kvass.tiers import codec
from kvass.tiers.base import Buffer, Shards
from kvass.types import DEFAULT_TENANT, MAX_RANKS, RankLayout

if TYPE_CHECKING:  # it is optional
    from kvass.tiers.encryption import Encryption, MasterKey

FIRST_LINE: Final = b"kvass carry 1\n"
WIDTH: Final = 32
"""Bytes of a chunk hash in the file."""
MOST_BEFORE: Final = 8 << 20
"""The most bytes of a ``What``; one has 2.2 MiB at most."""
_WHAT: Final = b"kvass carry: what"
_END: Final = b"kvass carry: end"
_CHANGED: Final = "its bytes were changed after they were written"


class CarryError(KvassError):
    """A session cannot be carried. The text says why, in one line."""


class BrokenFile(CarryError):
    """The file was cut or changed. Whatever was read before that is right."""


class What(msgspec.Struct, frozen=True):
    """What is in the file. ``terms``: the fields of the namespace, as ``kvass compare`` shows them.
    ``engine``: how its engines register. ``digests``: the chunks of the session's prompt."""

    session: str
    namespace: bytes
    terms: dict[str, str]
    engine: EngineIs
    digests: bytes

    @property
    def keys(self) -> list[bytes]:
        return [self.digests[at : at + WIDTH] for at in range(0, len(self.digests), WIDTH)]


def registers(engine: EngineIs, instance: str) -> tuple[Register, list[Register]]:
    """How the scheduler and the ranks of an engine register as ``instance``. Raises ``CarryError``
    if ``engine`` contradicts itself."""
    if not 1 <= engine.world_size <= len(engine.shards) <= MAX_RANKS:
        raise CarryError("what it says of its engine cannot be used: so many ranks and shards")
    scheduler = Register(
        instance=instance,
        identity=engine.identity,
        chunk_tokens=engine.chunk_tokens,
        ranks=len(engine.shards),
        world_size=engine.world_size,
        model=engine.model,
        counted=False,
    )
    try:
        layouts = [msgspec.msgpack.decode(raw, type=RankLayout) for raw in engine.layouts]
        ranks = [
            msgspec.structs.replace(
                scheduler,
                rank=rank,
                shard=shard,
                writer=rank in engine.writers,
                layout=layouts[engine.which[rank]],
            )
            for rank, shard in enumerate(engine.shards)
        ]
    except (msgspec.MsgspecError, IndexError) as error:
        raise CarryError(f"what it says of its engine cannot be used: {error}") from error
    return scheduler, ranks


def shard_bytes(engine: EngineIs, ranks: list[Register]) -> list[list[int]]:
    """The bytes of each shard of a row, by group. Raises ``CarryError`` for layouts that contradict
    each other."""
    by_shard = {rank.shard: rank.layout for rank in ranks if rank.layout is not None}
    layouts = [by_shard.get(shard) for shard in range(engine.world_size)]
    groups = {0 if layout is None else len(layout.groups) for layout in layouts}
    if len(groups) != 1 or groups == {0} or max(by_shard, default=0) >= engine.world_size:
        raise CarryError("what it says of its engine cannot be used: its ranks differ")
    return [
        [layout.groups[group].shard_bytes(engine.chunk_tokens) for layout in layouts if layout]
        for group in range(groups.pop())
    ]


class Writer:
    """Writes a file to ``out``. ``encryption``: with which keys; None: it is not encrypted. Raises
    ``CarryError`` if nothing more can be written."""

    def __init__(self, out: BinaryIO, what: What, encryption: Encryption | None) -> None:
        self._out, self._what, self._encryption = out, what, encryption
        self.rows = 0
        self._put(FIRST_LINE)
        self._record(_WHAT, [np.frombuffer(msgspec.msgpack.encode(what), np.uint8)])

    def row(self, group: int, chunk: bytes, shards: Shards) -> Buffer:
        """The record of a row, whose bytes are not needed any more. Then ``put`` it."""
        return self._packed(codec.record_key(self._what.namespace, 0, group, chunk), shards)

    def put(self, row: Buffer) -> None:
        self._put(row.data)
        self.rows += 1

    def end(self) -> None:
        """All rows were written."""
        self._record(_END, [np.frombuffer(self.rows.to_bytes(8, "little"), np.uint8)])
        try:
            self._out.flush()
        except OSError as error:
            raise CarryError(f"the file cannot be written: {error.strerror}") from error

    def _record(self, key: bytes, shards: Shards) -> None:
        self._put(self._packed(key, shards).data)

    def _packed(self, key: bytes, shards: Shards) -> Buffer:
        if (encryption := self._encryption) is None:
            return codec.pack(key, shards)

        def seal(name: bytes, lengths: tuple[int, ...]) -> codec.Closing:
            return encryption.seal(DEFAULT_TENANT, name, lengths)

        return codec.pack(encryption.ring()[0].name(key), shards, seal)

    def _put(self, data: bytes | memoryview) -> None:
        left = memoryview(data).cast("B")
        try:
            while left:  # a pipe takes a part
                left = left[self._out.write(left) :]
        except OSError as error:
            raise CarryError(f"the file cannot be written: {error.strerror}") from error


class Reader:
    """Reads a file from ``source``: ``what`` first, then ``rows``. ``encryption``: the keys; None:
    only a file that is not encrypted is read. Raises ``CarryError``, also from ``rows``."""

    def __init__(self, source: BinaryIO, encryption: Encryption | None) -> None:
        self._source, self._encryption = source, encryption
        self._master: MasterKey | None = None
        self._records = 0
        line = self._take(len(FIRST_LINE), may_end=True)
        if line != FIRST_LINE:
            other = line[:-2] == FIRST_LINE[:-2]
            raise CarryError(
                "the file is of another version of kvass: import it with that one"
                if other
                else "this is no file that `kvass export` wrote"
            )
        header = self._header()
        self._choose_key(header)
        if header.key != self._name(_WHAT) or sum(header.lengths) > MOST_BEFORE:
            raise self._damaged()
        raw = self._payload(header)
        try:
            self.what = msgspec.msgpack.decode(raw[0].tobytes(), type=What)
        except msgspec.MsgspecError as error:
            raise CarryError(f"what is in the file cannot be read: {error}") from error
        if len(self.what.namespace) != codec.NAMESPACE_BYTES or len(self.what.digests) % WIDTH:
            raise CarryError("what is in the file cannot be read: its hashes have no right length")

    def rows(self, shards: list[list[int]]) -> Iterator[tuple[int, int, Shards]]:
        """Each row: its group, the number of its chunk, and its shards, which have the lengths
        ``shards`` by group. Raises ``CarryError`` where a record is not whole or not right; all
        rows before it are."""
        rows, what = 0, self.what
        places = {
            self._name(codec.record_key(what.namespace, 0, group, chunk)): (group, number)
            for group in range(len(shards))
            for number, chunk in enumerate(what.keys)
        }
        end = self._name(_END)
        while (header := self._header()).key != end:
            group, number = places.get(header.key, (-1, -1))
            if group < 0 or [*header.lengths] != shards[group]:
                raise self._damaged()
            yield group, number, self._payload(header)
            rows += 1
        if header.lengths != (8,):
            raise self._damaged()
        said = int.from_bytes(self._payload(header)[0].tobytes(), "little")
        if said != rows:
            raise BrokenFile(f"the file has {rows} rows and says that it has {said}: {_CHANGED}")

    def _header(self) -> codec.Header:
        self._records += 1
        fixed = self._take(codec.FIXED_BYTES)
        size = codec.header_size(fixed)
        if size is None:
            raise self._damaged()
        header = codec.decode_header(fixed + self._take(size - len(fixed)))
        if header is None:
            raise self._damaged()
        return header

    def _choose_key(self, first: codec.Header) -> None:
        if not first.seal and self._encryption is not None:
            raise CarryError("the file is not encrypted: leave --key-file out")
        if first.seal and self._encryption is None:
            raise CarryError("the file is encrypted: give the --key-file that it was written with")
        if self._encryption is not None:
            ring = self._encryption.ring()
            self._master = next((key for key in ring if key.name(_WHAT) == first.key), None)
            if self._master is None:
                raise CarryError("the file was encrypted with a key that is not in --key-file")

    def _name(self, key: bytes) -> bytes:
        return key if self._master is None else self._master.name(key)

    def _payload(self, header: codec.Header) -> Shards:
        """The record's shards, checked. ``header``'s lengths were found right."""
        into: list[Buffer] = [np.empty(length, np.uint8) for length in header.lengths]
        raw = memoryview(self._take(sum(header.lengths)))
        open_ = None if self._encryption is None else self._encryption.open
        if not codec.unpack_body(header.key, header, len(raw), [raw], into, open_):
            raise self._damaged()
        return into

    def _take(self, size: int, may_end: bool = False) -> bytes:
        """The next ``size`` bytes."""
        parts, left = [], size
        try:
            while left and (part := self._source.read(left)):  # a pipe gives a part
                parts.append(part)
                left -= len(part)
        except OSError as error:
            raise BrokenFile(f"the file cannot be read: {error.strerror}") from error
        if left and not may_end:
            raise BrokenFile(f"the file ends inside of record {self._records}: it was cut")
        return b"".join(parts)

    def _damaged(self) -> BrokenFile:
        return BrokenFile(f"record {self._records} is damaged: {_CHANGED}")
