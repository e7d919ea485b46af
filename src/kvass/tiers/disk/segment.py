"""A segment of the disk tier: a preallocated file of slots of equal size, and a table in a second
file. (It has nothing to do with the segments of a prompt.)

``NNNNNNNN.seg``: a page that describes the file, then the slots. A slot is a page with the record's
header (``codec``), then the shards, each padded to ``PAGE``. It is transferred by ``pwritev`` or
``preadv``, a few MiB per call, without the page cache (O_DIRECT) if the file system supports that.
The part with the header is read first, and written last.

The description also contains the tenant that owns the segment, with its own checksum.

``NNNNNNNN.idx``, the table: the same page, then 24 bytes per slot (little-endian): fingerprint of
the record's key (0: the slot is free), sequence number, checksum of both and of the place. An
earlier kvass wrote 0 in place of the checksum.

A slot's entry is 0 while the slot is written, so an interrupted write leaves a free slot. The table
is only used to find records: a load trusts the record's own header and checksums alone. A sequence
number is believed within bounds only, because all later ones are above it.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from typing import Final, TypeAlias

import numpy as np
import xxhash

from kvass.errors import ConfigError
from kvass.folder import Folder
from kvass.tiers.base import Buffer, Shards, Varying
from kvass.tiers.buffers import page_buffer, split
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
"""Offset of the tenant in the page. An older kvass does not read it, and uses every segment for all
tenants."""
_ENTRY: Final = struct.Struct("<QQQ")
_WORDS: Final = struct.Struct("<QQ")
MOST_FIRST: Final = 1 << 61
"""The most that the first sequence number of a process may be. It is a clock's time in nanoseconds,
until 2043."""
_MOST: Final = 1 << 62
"""No process comes so far, wherever it began: a higher sequence number is damage."""

# Upper bound of a file system's metadata: two extents of 16 bytes per slot (a write in the middle
# of an unwritten extent splits it), in half-filled tree nodes, and the inodes.
_EXTENT_BYTES: Final = 64
_FILE_BYTES: Final = 16 << 10


def disk_bytes(slot_bytes: int, slots: int) -> int:
    """Return the most that a segment takes on disk, in bytes, including its table and the file
    system's metadata."""
    table = align_up(PAGE + _ENTRY.size * slots)
    return PAGE + slot_bytes * slots + table + _EXTENT_BYTES * slots + _FILE_BYTES


def most_slots(slot_bytes: int, room: int) -> int:
    """Return the number of slots of the largest segment that takes at most ``room`` bytes on disk.
    May be 0."""
    fixed = disk_bytes(0, 0) + PAGE  # the table's rounding
    return max(0, (room - fixed) // (slot_bytes + _ENTRY.size + _EXTENT_BYTES))


def slot_bytes_of(shards: Shards) -> int:
    """Return the size in bytes of a slot for a record with these shards. Of ``Varying`` ones there
    are few sizes: they have six bits."""
    size = sum(align_up(len(shard)) for shard in shards)
    if isinstance(shards, Varying):
        size = align_up(size, PAGE << max(0, (size // PAGE).bit_length() - 6))
    return PAGE + size


def page_aligned(shards: Shards) -> bool:
    """Whether O_DIRECT can access all shards, and they have no padding in a slot."""
    return all(len(s) % PAGE == 0 and s.ctypes.data % PAGE == 0 for s in shards)


Copies: TypeAlias = Sequence[tuple[Buffer, Buffer]]
"""Pairs of a shard and its part of a bounce buffer."""


def body_of(shards: Shards) -> tuple[list[Buffer], Copies]:
    """Return the page-aligned buffers to write the shards from, and the copies that are needed.

    If all shards are page-aligned, they are the buffers, and there are no copies. Otherwise there
    is one bounce buffer, and a pair for each shard.
    """
    if page_aligned(shards):
        return list(shards), []
    bounce = page_buffer(slot_bytes_of(shards) - PAGE)
    begins = accumulate((align_up(len(s)) for s in shards), initial=0)
    return [bounce], [(s, bounce[at : at + len(s)]) for s, at in zip(shards, begins, strict=False)]


class SegmentFile:
    """An open segment. Methods raise ``OSError``. Each slot may be used by one thread at a time."""

    def __init__(
        self, folder: Folder, number: int, slot_bytes: int, slots: int, tenant: str = DEFAULT_TENANT
    ) -> None:
        """Opens no files. Use ``create`` or ``reopen`` to get a segment."""
        self.number = number
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.bytes = disk_bytes(slot_bytes, slots)
        self.direct = False
        """Whether reads and writes bypass the page cache."""
        self._folder = folder
        self._name = f"{number:08x}{SEGMENT}"
        self._table_name = f"{number:08x}{TABLE}"
        self._fd = -1
        self._table_fd = -1

    @classmethod
    def create(
        cls, folder: Folder, number: int, slot_bytes: int, slots: int, tenant: str = DEFAULT_TENANT
    ) -> SegmentFile:
        """Create a segment whose slots are all free. If it raises ``OSError``, no file is left."""
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
            _write(new._fd, page, 0)  # last: a file without this page is not a segment
            new._go_direct()
        except OSError:
            with suppress(OSError):
                new.unlink()
            new.close()
            raise
        return new

    @classmethod
    def reopen(cls, folder: Folder, number: int) -> SegmentFile | None:
        """Open the segment of that number. Returns ``None`` if the file is not a segment, or has an
        older format.

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
            if os.pread(old._table_fd, PAGE, 0) != page:  # the table is lost, or another segment's
                os.ftruncate(old._table_fd, 0)
                os.posix_fallocate(old._table_fd, 0, PAGE + _ENTRY.size * old.slots)
                _write(old._table_fd, page, 0)
            old._go_direct()
        except (OSError, ConfigError):
            old.close()
            raise
        return old

    def read_description(self, page: Buffer) -> None:
        """Read the segment's first page from the disk. Raises ``OSError`` if that fails."""
        os.preadv(self._fd, [page.data], 0)

    def unlink(self) -> None:
        """Remove the files. Their space is freed at ``close``, because they stay open until
        then."""
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
        """Write page-aligned ``parts`` one after another to ``slot``. Raises ``OSError`` if not all
        was written.

        ``seal`` is called once, with an iterator over all bytes in order. The first few MiB are
        written after ``seal`` has returned, so ``seal`` may change the first page until then. The
        iterator writes all further pieces as it is consumed.
        """
        assert sum(map(len, parts)) <= self.slot_bytes, "a record is larger than its slot"
        first, *others = split(parts, IO_BYTES)
        seal(chain(first, self._written(slot, others)))
        self.put(slot, 0, first)

    def _written(self, slot: int, pieces: Sequence[list[memoryview]]) -> Iterator[memoryview]:
        for number, piece in enumerate(pieces, 1):
            self.put(slot, number, piece)
            yield from piece

    def put(self, slot: int, number: int, piece: list[memoryview]) -> None:
        """Write one page-aligned piece of a record, of ``IO_BYTES`` unless it is the last one. It
        begins ``number * IO_BYTES`` after the slot's beginning. Yields the processor before each
        piece but the first. Raises ``OSError`` if not all was written."""
        if number:
            yield_cpu()
        at = PAGE + slot * self.slot_bytes + number * IO_BYTES
        wanted = sum(map(len, piece))
        if (done := os.pwritev(self._fd, piece, at)) != wanted:  # the disk may be full
            raise OSError(errno.ENOSPC, f"wrote {done} of {wanted} bytes")

    def get(self, slot: int, number: int, piece: Sequence[memoryview]) -> bool:
        """Read one page-aligned piece, as ``put`` wrote it. Yields the processor before each piece
        but the first. Returns False if the file is too short."""
        if number:
            yield_cpu()
        at = PAGE + slot * self.slot_bytes + number * IO_BYTES
        return os.preadv(self._fd, piece, at) == sum(map(len, piece))

    def set_entry(self, slot: int, fingerprint: int, sequence: int) -> None:
        """Write the table's entry of ``slot``. Fingerprint 0 and sequence 0: the slot is free."""
        raw = _WORDS.pack(fingerprint, sequence)
        raw += _CHECK.pack(self._entry_check(slot, raw) if fingerprint else 0)
        _write(self._table_fd, raw, PAGE + slot * _ENTRY.size)

    def entries(self) -> tuple[U64Array, I64Array, int]:
        """Read the fingerprint and the sequence number of each slot, and count the entries that are
        damaged. These are returned as free slots."""
        size = self.slots * _ENTRY.size
        raw = os.pread(self._table_fd, size, PAGE).ljust(size, b"\0")
        fingerprints, sequences, checks = np.frombuffer(raw, "<u8").reshape(self.slots, 3).T
        right = np.zeros(self.slots, np.uint64)
        for slot in np.flatnonzero(checks).tolist():
            at = slot * _ENTRY.size
            right[slot] = self._entry_check(slot, raw[at : at + _WORDS.size])
        whole = checks == right
        whole &= sequences < np.where(checks == 0, MOST_FIRST, _MOST)
        whole &= fingerprints >> 60 == 0
        damaged = int(np.count_nonzero(~whole))
        sound = np.where(whole, sequences, 0).astype(np.int64)
        return np.where(whole, fingerprints, 0), sound, damaged

    def _entry_check(self, slot: int, words: bytes) -> int:
        """The checksum of an entry, never 0."""
        return xxhash.xxh3_64_intdigest(words, self.number << 32 | slot) | 1

    def _go_direct(self) -> None:
        """Reopen the file with O_DIRECT, if the file system can read single pages with it."""
        fd = -1
        try:
            fd = self._folder.open(self._name, os.O_RDWR | os.O_DIRECT)
            if os.preadv(fd, [page_buffer().data], 0) != PAGE:
                raise OSError(errno.EINVAL, "a direct read was short")
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno != errno.EINVAL:
                raise
        else:
            os.close(self._fd)
            self._fd, self.direct = fd, True


def _describe(path: str, page: bytes) -> tuple[int, int, int, str] | None:
    """Decode a segment's first page: (number, slot bytes, slots, tenant). None if it is invalid.
    Raises ``ConfigError`` if its format is newer than ours."""
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
