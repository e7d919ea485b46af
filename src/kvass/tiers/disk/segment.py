"""One segment of the disk tier: a preallocated file of equal slots, and a table beside it.

``NNNNNNNN.seg``: a page that describes the file, then the slots. A slot holds one record (see
``slot.py``). It is moved by ``pwritev`` or ``preadv``, a few MiB a call, past the page cache
(O_DIRECT) where the file system can.

``NNNNNNNN.idx``, the table: the same page, then an entry of 24 bytes per slot (little-endian):
fingerprint of the record's key, sequence number (both 0: the slot is free), and a check of the two
with segment and slot. It says in one read what would take a read of every slot's header.

An entry is marked unknown before its slot is written, and set afterwards. So a write that failed
or was torn leaves an unknown slot. For an unknown slot the header is read. The table is a hint: a
load believes only the record's own header and checksums.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import numpy as np
import xxhash

from kvass.errors import ConfigError
from kvass.tiers.base import Buffer
from kvass.tiers.buffers import page_buffer, split
from kvass.tiers.disk.folder import Folder
from kvass.tiers.pacing import IO_BYTES, yield_cpu
from kvass.types import PAGE, U64Array, align_up

FORMAT: Final = 1

SEGMENT: Final = ".seg"
TABLE: Final = ".idx"
_MAGIC: Final = b"kvassseg"
_DESCRIPTION: Final = struct.Struct("<8sHHIQQ")  # magic, version, 0, number, slot bytes, slots
_CHECK: Final = struct.Struct("<Q")
_ENTRY: Final = struct.Struct("<QQQ")
_ENTRY_BYTES: Final = _ENTRY.size
_NO_ENTRY: Final = bytes(_ENTRY_BYTES)

# What a file system may take beside the bytes: two extents per slot (a write in the middle of
# what was only allocated splits it) of 16 bytes, half-filled tree nodes, and the inodes' own.
_EXTENT_BYTES: Final = 64
_FILE_BYTES: Final = 16 << 10


def disk_bytes(slot_bytes: int, slots: int) -> int:
    """What a segment takes on disk at most, with its table and the file system's metadata."""
    table = align_up(PAGE + _ENTRY_BYTES * slots)
    return PAGE + slot_bytes * slots + table + _EXTENT_BYTES * slots + _FILE_BYTES


def most_slots(slot_bytes: int, room: int) -> int:
    """How many slots a segment of at most ``room`` bytes on disk has; may be 0."""
    fixed = disk_bytes(0, 0) + PAGE  # the table's rounding
    return max(0, (room - fixed) // (slot_bytes + _ENTRY_BYTES + _EXTENT_BYTES))


class SegmentFile:
    """An open segment. Methods raise ``OSError``; a slot is used by one thread at a time."""

    def __init__(
        self, folder: Folder, number: int, slot_bytes: int, slots: int, direct: bool
    ) -> None:
        """``create`` and ``reopen`` make one."""
        self.number = number
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.bytes = disk_bytes(slot_bytes, slots)
        self._folder = folder
        self._name = f"{number:08x}{SEGMENT}"
        self._table_name = f"{number:08x}{TABLE}"
        self._direct = direct
        self._fd = -1
        self._table_fd = -1

    @classmethod
    def create(
        cls, folder: Folder, number: int, slot_bytes: int, slots: int, direct: bool
    ) -> SegmentFile:
        """A new segment, every slot free. Raises ``OSError`` and leaves nothing behind."""
        new = cls(folder, number, slot_bytes, slots, direct)
        try:
            folder.check()
            new._table_fd = folder.open(new._table_name, _FLAGS | os.O_CREAT | os.O_EXCL)
            new._fd = folder.open(new._name, _FLAGS | os.O_CREAT | os.O_EXCL)
            os.posix_fallocate(new._fd, 0, PAGE + slot_bytes * slots)
            os.posix_fallocate(new._table_fd, 0, PAGE + _ENTRY_BYTES * slots)
            free = np.zeros((slots, 3), np.uint64)
            places = np.arange(slots, dtype=np.uint64) + np.uint64(new._place(0))
            free[:, 2] = _entry_check(free[:, 0], free[:, 1], places)
            _write(new._table_fd, free.astype("<u8").tobytes(), PAGE)
            page = new._described()
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
    def reopen(cls, folder: Folder, number: int, direct: bool) -> SegmentFile | None:
        """The segment of that number, or ``None`` if the file is not ours or of an older format.

        Raises:
            ConfigError: its format is newer than ours.
            OSError: it cannot be read.
        """
        name = f"{number:08x}{SEGMENT}"
        fd = folder.open(name, _FLAGS)
        try:
            page = os.pread(fd, PAGE, 0)
            described = _describe(str(folder.path / name), page)
            if described is None or described[0] != number:
                os.close(fd)
                return None
            old = cls(folder, *described, direct)
            if os.fstat(fd).st_size != PAGE + old.slot_bytes * old.slots:
                os.ftruncate(fd, PAGE + old.slot_bytes * old.slots)
        except BaseException:
            os.close(fd)
            raise
        old._fd = fd
        try:
            old._reopen_table(page)
            old._go_direct()
        except OSError:
            old.close()
            raise
        return old

    def unlink(self) -> None:
        """Remove its files; open descriptors, and so the space, stay until ``close``."""
        for name in (self._name, self._table_name):
            self._folder.unlink(name)

    def close(self) -> None:
        """Close its files. Idempotent."""
        for fd in (self._fd, self._table_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._table_fd = -1

    # ------------------------------------------------------------ slots

    def write(self, slot: int, parts: Sequence[Buffer]) -> None:
        """Write page-aligned ``parts`` one behind another to ``slot``: all of it or ``OSError``."""
        wanted = sum(map(len, parts))
        assert wanted <= self.slot_bytes, "a record is larger than its slot"
        done = _move(os.pwritev, self._fd, parts, self._at(slot))
        if done != wanted:  # a full disk ends a write early; what is there fails its checksum
            raise OSError(errno.ENOSPC, f"wrote {done} of {wanted} bytes")

    def read(self, slot: int, parts: Sequence[Buffer]) -> bool:
        """Read ``slot`` into page-aligned ``parts``; whether they were filled."""
        return _move(os.preadv, self._fd, parts, self._at(slot)) == sum(map(len, parts))

    def erase(self, slot: int) -> None:
        """Overwrite the slot's header, so that no later boot finds a record there."""
        self.mark_unknown(slot)
        _write_page(self._fd, page_buffer(), self._at(slot))
        self.set_entry(slot, 0, 0)

    def _at(self, slot: int) -> int:
        return PAGE + slot * self.slot_bytes

    # ------------------------------------------------------------ table

    def mark_unknown(self, slot: int) -> None:
        """Have the slot's header decide what it holds."""
        _write(self._table_fd, _NO_ENTRY, self._entry_at(slot))

    def set_entry(self, slot: int, fingerprint: int, sequence: int) -> None:
        """Say in the table what ``slot`` holds now."""
        check = _entry_check(fingerprint, sequence, self._place(slot))
        _write(self._table_fd, _ENTRY.pack(fingerprint, sequence, check), self._entry_at(slot))

    def table(self) -> Iterator[tuple[int, U64Array, U64Array]]:
        """What the table says, in parts: (first slot, fingerprints, sequence numbers).

        A free slot has 0 and 0, an unknown one the fingerprint ``UNKNOWN``.
        """
        for first in range(0, self.slots, _ENTRIES):
            count = min(_ENTRIES, self.slots - first)
            raw = os.pread(self._table_fd, count * _ENTRY_BYTES, self._entry_at(first))
            raw = raw.ljust(count * _ENTRY_BYTES, b"\0")
            words = np.frombuffer(raw, "<u8").reshape(count, 3)
            fingerprints, sequences = words[:, 0], words[:, 1]
            places = np.arange(count, dtype=np.uint64) + np.uint64(self._place(first))
            known = words[:, 2] == _entry_check(fingerprints, sequences, places)
            yield first, np.where(known, fingerprints, UNKNOWN), np.where(known, sequences, 0)

    def _place(self, slot: int) -> int:
        return self.number << 32 | slot

    def _entry_at(self, slot: int) -> int:
        return PAGE + slot * _ENTRY_BYTES

    def _reopen_table(self, page: bytes) -> None:
        """Open the table; one that is lost or another segment's is made anew, all unknown."""
        self._table_fd = self._folder.open(self._table_name, _FLAGS | os.O_CREAT)
        if os.pread(self._table_fd, PAGE, 0) != page:
            os.ftruncate(self._table_fd, 0)
            os.posix_fallocate(self._table_fd, 0, PAGE + _ENTRY_BYTES * self.slots)
            _write(self._table_fd, page, 0)

    # ------------------------------------------------------------ opening

    def _described(self) -> bytes:
        body = _DESCRIPTION.pack(_MAGIC, FORMAT, 0, self.number, self.slot_bytes, self.slots)
        return (body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))).ljust(PAGE, b"\0")

    def _go_direct(self) -> None:
        """Use O_DIRECT from here on, if the file system reads and writes pages with it."""
        if not self._direct:
            return
        page = page_buffer()
        try:
            fd = self._folder.open(self._name, _FLAGS | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return
        try:
            if os.preadv(fd, [page.data], 0) != PAGE:
                raise OSError(errno.EINVAL, "a direct read that is none")
            _write_page(fd, page, 0)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EINVAL:
                raise
            return
        os.close(self._fd)
        self._fd = fd


UNKNOWN: Final = (1 << 64) - 1
"""The fingerprint of an unknown slot in ``SegmentFile.table``."""

_ENTRIES: Final = 4096
_FLAGS: Final = os.O_RDWR


def _move(
    call: Callable[[int, list[memoryview], int], int], fd: int, parts: Sequence[Buffer], at: int
) -> int:
    """Bytes moved by ``pwritev`` or ``preadv``; fewer than there are: a call ended early.

    Parts that begin and end at pages are cut at pages.
    """
    done = 0
    for some in split(parts, IO_BYTES):
        if done:
            yield_cpu()
        moved = call(fd, some, at + done)
        done += moved
        if moved != sum(map(len, some)):
            break
    return done


def _describe(path: str, page: bytes) -> tuple[int, int, int] | None:
    """(number, slot bytes, slots) from a segment's first page."""
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
    return number, slot_bytes, slots


_Words = TypeVar("_Words", int, U64Array)


def _entry_check(fingerprint: _Words, sequence: _Words, place: _Words) -> _Words:
    """The check of an entry, or of many; never 0 for a free one, since places are not. It detects
    torn writes, not malice: multiplicative hashing (Knuth, TAOCP vol. 3, 6.4)."""
    mixed: Any = (fingerprint * _ODD[0] ^ sequence * _ODD[1] ^ place * _ODD[2]) & _MASK
    mixed = (mixed ^ mixed >> 29) * _ODD[0] & _MASK
    check: _Words = mixed ^ mixed >> 32
    return check


_ODD: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_MASK: Final = (1 << 64) - 1


def _write(fd: int, data: bytes, at: int) -> None:
    if os.pwrite(fd, data, at) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write_page(fd: int, page: Buffer, at: int) -> None:
    if os.pwritev(fd, [page.data], at) != len(page):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
