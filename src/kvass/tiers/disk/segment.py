"""One segment of the disk tier: a preallocated file of equal slots, and a table beside it.

``NNNNNNNN.seg``: a page that describes the file, then the slots. A slot is a page with the record's
header (``codec``), then the shards, each padded to ``PAGE``. A slot is read by ``preadv`` and
written by ``pwritev``, a few MiB per call. The calls bypass the page cache (O_DIRECT) where the
file system supports that. The part with the header is read first and written last.

The first page also names the tenant that owns the segment, under a checksum of its own.

``NNNNNNNN.idx``, the table: the same page, then 24 bytes per slot (little-endian): fingerprint of
the record's key (0: the slot is free), sequence number, 8 bytes that are not used.

The entry of a slot is 0 while the slot is written, so a torn write leaves a free slot. The table
only says where to look for a record. A load trusts nothing but the record's header and checksums.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from typing import Final

import numpy as np
import xxhash

from kvass.errors import ConfigError
from kvass.tiers.base import Buffer, Shards
from kvass.tiers.buffers import page_buffer, split
from kvass.tiers.disk.folder import Folder
from kvass.tiers.pacing import IO_BYTES, yield_cpu
from kvass.types import DEFAULT_TENANT, PAGE, I64Array, U64Array, align_up

FORMAT: Final = 1

SEGMENT: Final = ".seg"
TABLE: Final = ".idx"
_MAGIC: Final = b"kvassseg"
_DESCRIPTION: Final = struct.Struct("<8sHHIQQ")  # magic, version, 0, number, slot bytes, slots
_CHECK: Final = struct.Struct("<Q")
_TENANT: Final = struct.Struct("<64sQ")
_TENANT_AT: Final = 64
"""Offset of the tenant's name, behind the description. An older kvass does not read it: it treats
every segment as one of the default tenant."""
_ENTRY: Final = struct.Struct("<QQ8x")

# What a file system may take beside the bytes: two extents per slot (a write in the middle of
# what was only allocated splits it) of 16 bytes, half-filled tree nodes, and the inodes' own.
_EXTENT_BYTES: Final = 64
_FILE_BYTES: Final = 16 << 10


def disk_bytes(slot_bytes: int, slots: int) -> int:
    """An upper bound for the disk space of a segment, with its table and the file system's
    metadata."""
    table = align_up(PAGE + _ENTRY.size * slots)
    return PAGE + slot_bytes * slots + table + _EXTENT_BYTES * slots + _FILE_BYTES


def most_slots(slot_bytes: int, room: int) -> int:
    """The number of slots of a segment that takes at most ``room`` bytes on disk; may be 0."""
    fixed = disk_bytes(0, 0) + PAGE  # the table's rounding
    return max(0, (room - fixed) // (slot_bytes + _ENTRY.size + _EXTENT_BYTES))


def slot_bytes_of(shards: Shards) -> int:
    """The slot size for a record with these shards."""
    return PAGE + sum(align_up(len(shard)) for shard in shards)


def body_of(shards: Shards) -> tuple[list[Buffer], list[tuple[Buffer, Buffer]]]:
    """The buffers that are read or written behind the header, and the copies that this needs.

    A copy is a pair: a shard, and its place in the buffers. There are none if every shard begins
    and ends at a page boundary; then the shards are the buffers.
    """
    if all(len(s) % PAGE == 0 and s.ctypes.data % PAGE == 0 for s in shards):
        return list(shards), []
    bounce = page_buffer(slot_bytes_of(shards) - PAGE)
    begins = accumulate((align_up(len(s)) for s in shards), initial=0)
    return [bounce], [(s, bounce[at : at + len(s)]) for s, at in zip(shards, begins, strict=False)]


class SegmentFile:
    """An open segment. Methods raise ``OSError``. Only one thread at a time may use a slot."""

    def __init__(
        self, folder: Folder, number: int, slot_bytes: int, slots: int, tenant: str = DEFAULT_TENANT
    ) -> None:
        """For ``create`` and ``reopen`` only."""
        self.number = number
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.bytes = disk_bytes(slot_bytes, slots)
        self._folder = folder
        self._name = f"{number:08x}{SEGMENT}"
        self._table_name = f"{number:08x}{TABLE}"
        self._fd = -1
        self._table_fd = -1

    @classmethod
    def create(
        cls, folder: Folder, number: int, slot_bytes: int, slots: int, tenant: str = DEFAULT_TENANT
    ) -> SegmentFile:
        """A new segment whose slots are all free. Raises ``OSError``; then no file is left
        behind."""
        new = cls(folder, number, slot_bytes, slots, tenant)
        body = _DESCRIPTION.pack(_MAGIC, FORMAT, 0, number, slot_bytes, slots)
        head = (body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))).ljust(_TENANT_AT, b"\0")
        whose = tenant.encode()
        page = (head + _TENANT.pack(whose, _tenant_check(body, whose))).ljust(PAGE, b"\0")
        try:
            folder.check()
            new._table_fd = folder.open(new._table_name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            new._fd = folder.open(new._name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.posix_fallocate(new._fd, 0, PAGE + slot_bytes * slots)
            os.posix_fallocate(new._table_fd, 0, PAGE + _ENTRY.size * slots)
            _write(new._table_fd, page, 0)
            _write(new._fd, page, 0)  # last: a segment without it is none
            new._go_direct()
        except OSError:
            with suppress(OSError):
                new.unlink()
            new.close()
            raise
        return new

    @classmethod
    def reopen(cls, folder: Folder, number: int) -> SegmentFile | None:
        """The segment of that number; None if the file is no segment, or one of an older format.

        Raises: ``ConfigError`` if its format is newer than this kvass knows, ``OSError`` if it
        cannot be read.
        """
        old = cls(folder, number, 0, 0)
        try:
            old._fd = folder.open(old._name, os.O_RDWR)
            page = os.pread(old._fd, PAGE, 0)
            described = _describe(str(folder.path / old._name), page)
            if described is None or described[0] != number:
                old.close()
                return None
            _, old.slot_bytes, old.slots, old.tenant = described
            old.bytes = disk_bytes(old.slot_bytes, old.slots)
            if os.fstat(old._fd).st_size != (size := PAGE + old.slot_bytes * old.slots):
                os.ftruncate(old._fd, size)
            old._table_fd = folder.open(old._table_name, os.O_RDWR | os.O_CREAT)
            if os.pread(old._table_fd, PAGE, 0) != page:  # lost, or another segment's
                os.ftruncate(old._table_fd, 0)
                os.posix_fallocate(old._table_fd, 0, PAGE + _ENTRY.size * old.slots)
                _write(old._table_fd, page, 0)
            old._go_direct()
        except (OSError, ConfigError):
            old.close()
            raise
        return old

    def unlink(self) -> None:
        """Remove its files. Open descriptors keep the disk space until ``close``."""
        for name in (self._name, self._table_name):
            self._folder.unlink(name)

    def close(self) -> None:
        for fd in (self._fd, self._table_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._table_fd = -1

    def write(
        self, slot: int, parts: Sequence[Buffer], seal: Callable[[Iterator[memoryview]], object]
    ) -> None:
        """Write the page-aligned ``parts``, one behind another, to ``slot``. Raises ``OSError``
        unless all was written.

        ``seal`` is called with an iterator over the bytes, in order, which are written as it
        advances. The first few MiB are written after ``seal`` returns, so it may change the first
        page.
        """
        assert sum(map(len, parts)) <= self.slot_bytes, "a record is larger than its slot"
        at = PAGE + slot * self.slot_bytes
        first, *others = split(parts, IO_BYTES)
        seal(chain(first, self._written(others, at + IO_BYTES)))
        self._put(first, at)

    def _written(self, pieces: Sequence[list[memoryview]], at: int) -> Iterator[memoryview]:
        for number, piece in enumerate(pieces):
            yield_cpu()
            self._put(piece, at + number * IO_BYTES)
            yield from piece

    def _put(self, piece: list[memoryview], at: int) -> None:
        wanted = sum(map(len, piece))
        if (done := os.pwritev(self._fd, piece, at)) != wanted:  # a full disk ends a write early
            raise OSError(errno.ENOSPC, f"wrote {done} of {wanted} bytes")

    def read(self, slot: int, parts: Sequence[Buffer]) -> Iterator[memoryview]:
        """Read ``slot`` into the page-aligned ``parts``, a few MiB at a time. Yields what was read,
        in order, and stops early if the file ends."""
        at = PAGE + slot * self.slot_bytes
        for number, piece in enumerate(split(parts, IO_BYTES)):
            if number:
                yield_cpu()
            if os.preadv(self._fd, piece, at + number * IO_BYTES) != sum(map(len, piece)):
                return
            yield from piece

    def set_entry(self, slot: int, fingerprint: int, sequence: int) -> None:
        """Write the table entry of ``slot``. Two zeros mean that the slot is free."""
        _write(self._table_fd, _ENTRY.pack(fingerprint, sequence), PAGE + slot * _ENTRY.size)

    def entries(self) -> tuple[U64Array, I64Array]:
        """Fingerprint and sequence number of every slot. An impossible entry is read as a free
        slot."""
        size = self.slots * _ENTRY.size
        words = np.frombuffer(os.pread(self._table_fd, size, PAGE).ljust(size, b"\0"), "<u8")
        fingerprints, sequences, _ = words.reshape(self.slots, 3).T
        known = (fingerprints >> 60 == 0) & (sequences >> 62 == 0)
        return np.where(known, fingerprints, 0), np.where(known, sequences, 0).astype(np.int64)

    def _go_direct(self) -> None:
        """Use O_DIRECT from now on, if a direct read of a page works on this file system."""
        fd = -1
        try:
            fd = self._folder.open(self._name, os.O_RDWR | os.O_DIRECT)
            if os.preadv(fd, [page_buffer().data], 0) != PAGE:
                raise OSError(errno.EINVAL, "a direct read that is none")
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno != errno.EINVAL:
                raise
        else:
            os.close(self._fd)
            self._fd = fd


def _describe(path: str, page: bytes) -> tuple[int, int, int, str] | None:
    """(number, slot bytes, slots, tenant) from a segment's first page."""
    if len(page) < PAGE:
        return None
    magic, version, _, number, slot_bytes, slots = _DESCRIPTION.unpack_from(page)
    check = _CHECK.unpack_from(page, _DESCRIPTION.size)[0]
    if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(page[: _DESCRIPTION.size]):
        return None
    if version > FORMAT:
        raise ConfigError(
            f"{path}: written by a newer kvass (format {version}, this one knows {FORMAT}): "
            "use another folder, or remove the file"
        )
    if version < FORMAT or slot_bytes < PAGE or slot_bytes % PAGE or slots < 1:
        return None
    padded, whose_check = _TENANT.unpack_from(page, _TENANT_AT)
    whose = padded.rstrip(b"\0")
    sound = whose_check == _tenant_check(page[: _DESCRIPTION.size], whose)
    return number, slot_bytes, slots, whose.decode() if sound else DEFAULT_TENANT


def _tenant_check(description: bytes, tenant: bytes) -> int:
    return xxhash.xxh3_64_intdigest(description + tenant)


def _write(fd: int, data: bytes, at: int) -> None:
    if os.pwrite(fd, data, at) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
