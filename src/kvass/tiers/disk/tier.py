"""The disk tier: records in segment files of one folder, under a hard cap of bytes.

What a load returns was proven against the record's own header, key and checksum. What the folder
takes on disk never exceeds the capacity: ``segment.disk_bytes`` says in advance what a segment can
take, and none is made without its bytes set aside.

A lock guards the index and is never held over I/O: a slot is taken under it, written outside it and
published under it. Opening reads the segments' tables, and no record.

Absent on purpose: fsync (a power loss costs records, and no record becomes wrong), compaction
(slots of equal size leave no gaps) and io_uring (threads are as fast, measured).
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvass.errors import ConfigError
from kvass.tiers.base import Buffer, Shards
from kvass.tiers.buffers import page_buffer
from kvass.tiers.codec import Header, decode_header, encode_header, payload_checksum
from kvass.tiers.disk.folder import Folder
from kvass.tiers.disk.index import DiskIndex, DiskSlot, Owner, SegmentSlots, fingerprint
from kvass.tiers.disk.notes import read_note, write_note
from kvass.tiers.disk.segment import (
    SEGMENT,
    TABLE,
    SegmentFile,
    body_of,
    disk_bytes,
    slot_bytes_of,
)
from kvass.tiers.options import DiskOptions
from kvass.tiers.record_tier import Outcome, RecordTier
from kvass.tiers.worker_pool import WorkerPool, as_down
from kvass.types import DEFAULT_TENANT, NO_CAP, PAGE, Quota, Size

_MOST_BYTES: Final = (1 << 31) - PAGE
"""Of one record, its header included."""
_COUNTS: Final = (
    "evicted",  # records, or whole segments, that left for others
    "damaged",  # records found to be other bytes than were stored
    "mismatched",  # records of other shards than a load asked for
    "full",  # stores that found no room
    "too_large",  # stores of what no room could hold
    "read_errors",
    "write_errors",
)
_CHECK_S: Final = 1.0
"""How often it is checked that the folder is still ours."""
_GROW_AGAIN_S: Final = 10.0
"""After the disk had no room, how long until it is asked again."""
_FILE: Final = re.compile(f"([0-9a-f]{{8}})({re.escape(SEGMENT)}|{re.escape(TABLE)})")
_log = logging.getLogger("kvass.tiers")


class _Scratch(threading.local):
    """A page for the header of the record that this thread is busy with."""

    def __init__(self) -> None:
        self.page = page_buffer()


class DiskTier(RecordTier):
    """``Tier`` over a folder, divided among the tenants of ``quotas``. Raises ``ConfigError`` for
    one that cannot be used so."""

    def __init__(
        self,
        folder: str | Path,
        capacity: int,
        *,
        threads: int = 4,
        quotas: Sequence[Quota] = (),
    ) -> None:
        super().__init__(str(folder))
        self._index = DiskIndex(capacity, time.time_ns(), quotas)
        self._divided = bool(quotas)
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._noting = threading.Lock()
        self._grow_after = 0.0
        self._scratch = _Scratch()
        self._counts = Counter(dict.fromkeys(_COUNTS, 0))
        if not self._index.fits(2 * PAGE, self._index.owner(DEFAULT_TENANT)):
            raise ConfigError(f"{folder}: a capacity of {Size(capacity)} holds not one row")
        self._folder = Folder(Path(folder))
        with ExitStack() as undo:
            undo.callback(self._folder.close)
            self._folder.lock()
            disk = os.statvfs(self._folder.fd)
            if capacity > (size := disk.f_blocks * disk.f_frsize):
                raise ConfigError(
                    f"{folder}: a capacity of {Size(capacity)}, but the disk has {Size(size)}; "
                    "choose less"
                )
            self._number = self._reopen()
            undo.pop_all()
        self._checked = time.monotonic()
        self._pool = WorkerPool(self.name, threads)
        self._remove_dead()

    def _reopen(self) -> int:
        """Use the segments of earlier lives; returns the highest number ever used.

        Damaged ones are removed, and what is beyond the capacity or a quota. Raises
        ``ConfigError`` for a format newer than ours, having removed nothing, and for what the disk
        refuses.
        """
        opened: list[SegmentFile] = []
        try:
            names = map(_FILE.fullmatch, os.listdir(self._folder.fd))
            numbers = {int(match[1], 16) for match in names if match}
            for number in sorted(numbers, reverse=True):
                with suppress(FileNotFoundError):  # a table whose segment is gone
                    if (file := SegmentFile.reopen(self._folder, number)) is not None:
                        opened.append(file)
            for number in numbers - {file.number for file in opened}:
                for suffix in (SEGMENT, TABLE):
                    self._folder.unlink(f"{number:08x}{suffix}")
            for file in opened:
                self._index.restore(file)
            while (segment := self._index.excess()) is not None:
                self._index.drop(segment)
        except (OSError, ConfigError) as error:
            for file in opened:
                file.close()
            if isinstance(error, ConfigError):
                raise
            where = f"{error.filename}: " if error.filename else ""
            raise ConfigError(f"{self.name}: {where}{error.strerror}") from error
        return max(numbers, default=0)

    def store_for(self, tenant: str, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """See ``DividedTier``."""
        return self._store_all(keys, data, partial(self._put, tenant=tenant))

    # ------------------------------------------------------------ batches

    def _exists(self, keys: Sequence[bytes]) -> list[Outcome]:
        with self._lock:
            return [self._index.holds(fingerprint(key)) for key in keys]

    def _get(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[Outcome]:
        return self._pool.each(lambda i: self._load(keys[i], into[i]), [0] * len(keys))

    def _put(
        self, keys: Sequence[bytes], data: Sequence[Shards], tenant: str = DEFAULT_TENANT
    ) -> list[Outcome]:
        owner = self._index.owner(tenant)
        return self._pool.each(lambda i: self._store(keys[i], data[i], owner), [0] * len(keys))

    def _delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        for key in keys:
            with self._lock:
                place = self._index.forget(fingerprint(key))
            self._erase(place)
        return [True] * len(keys)

    def _clear(self) -> None:
        self._check_folder()
        with self._lock:
            gone = list(self._index.segments.values())
            for segment in gone:
                self._index.drop(segment)
        for segment in gone:  # even of those that are still read: their names go now
            segment.file.unlink()

    def _get_note(self, name: str) -> bytes | None:
        """A damaged one is none."""
        self._check_folder()
        return read_note(self._folder, name)

    def _put_note(self, name: str, value: bytes) -> None:
        """Synced, unlike records."""
        self._check_folder()
        with self._noting:
            write_note(self._folder, name, value)

    def _close(self) -> None:
        self._pool.close()
        self._remove_dead()
        for segment in self._index.segments.values():
            segment.file.close()
        self._folder.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        with super()._call():
            try:
                if self._folder.lost or time.monotonic() - self._checked > _CHECK_S:
                    self._check_folder()
                yield
            except OSError as error:
                raise as_down(self.name, error) from error
            finally:
                self._remove_dead()

    def _check_folder(self) -> None:
        """Raise ``OSError`` if the folder is not ours any more."""
        self._folder.check()
        self._checked = time.monotonic()

    def report(self) -> dict[str, Any]:
        """For ``kvass status``: records, segments, bytes, what went wrong since opening; and with
        quotas what each tenant has."""
        with self._lock:
            tenants = {
                o.name: {
                    "bytes": o.spent,
                    "reserved_bytes": o.reserved,
                    **({} if o.cap == NO_CAP else {"cap_bytes": o.cap}),
                }
                for o in self._index.owners.values()
            }
            return {
                **({"tenants": tenants} if self._divided else {}),
                "records": len(self._index),
                "segments": len(self._index.segments),
                "bytes": self._index.spent,
                "capacity_bytes": self._index.capacity,
                **self._counts,
            }

    # ------------------------------------------------------------ one record

    def _load(self, key: bytes, into: Shards) -> bool:
        number = fingerprint(key)
        with self._lock:
            place = self._index.pin(number)
        if place is None:
            return False
        fault = "read_errors"
        try:
            fault = self._read(place, key, into)
        finally:
            bad = None
            with self._lock:
                if fault:
                    self._counts[fault] += 1
                if fault in ("damaged", "read_errors"):  # unless another took its place
                    bad = self._index.forget(number, place)
                self._index.unpin(place)
            self._erase(bad)
        return not fault

    def _read(self, place: DiskSlot, key: bytes, into: Shards) -> str:
        """Fill ``into`` from a pinned slot; which of ``_COUNTS`` went wrong, or nothing."""
        segment, slot = place
        if slot_bytes_of(into) != segment.file.slot_bytes:
            return "mismatched"
        page = self._scratch.page
        body, copies = body_of(into)
        parts = segment.file.read(slot, [page, *body])
        header = decode_header(next(parts, b""))
        if header is None or header.key != key:
            return "damaged"
        if header.lengths != tuple(map(len, into)):
            return "mismatched"
        if _payload_checksum(parts, copies) != header.payload_checksum:
            return "damaged"
        for shard, part in copies:
            shard[:] = part
        return ""

    def _store(self, key: bytes, shards: Shards, owner: Owner) -> bool:
        place = self._room(slot_bytes_of(shards), owner)
        if place is None:
            return False
        segment, slot = place
        number = fingerprint(key)
        with self._lock:
            stamp = self._index.tick()
        try:
            page = self._scratch.page
            body, copies = body_of(shards)
            for shard, part in copies:
                part[:] = shard

            def seal(parts: Iterator[memoryview]) -> None:
                next(parts)
                check = _payload_checksum(parts, copies)
                header = encode_header(Header(key, tuple(map(len, shards)), stamp, check))
                page[: len(header)] = memoryview(header)
                page[len(header) :] = 0

            segment.file.set_entry(slot, 0, 0)
            segment.file.write(slot, [page, *body], seal)
            segment.file.set_entry(slot, number, stamp)
        except OSError:
            with self._lock:
                self._counts["write_errors"] += 1
                self._index.unpin(place)
            raise
        with self._lock:
            old = self._index.publish(place, number, stamp)
        self._erase(old)
        return not segment.gone

    def _erase(self, place: DiskSlot | None) -> None:
        """Erase the entry of a slot that ``DiskIndex.forget`` returned."""
        if place is None:
            return
        failed = 0
        try:
            place.segment.file.set_entry(place.slot, 0, 0)
        except OSError:  # it may come back after a restart; what is read then is checked
            failed = 1
        with self._lock:
            self._counts["write_errors"] += failed
            self._index.unpin(place)

    # ------------------------------------------------------------ room

    def _room(self, size: int, owner: Owner) -> DiskSlot | None:
        """A slot of that size, pinned: a free one, else of a new segment, else of an old record."""
        if size > _MOST_BYTES or not self._index.fits(size, owner):
            with self._lock:
                self._counts["too_large"] += 1
                first = self._counts["too_large"] == 1
            if first:  # how large rows are shows only now: whoever chose the capacity is told, once
                line = (
                    "%s: rows that take %s are not kept: one is more than the capacity, its "
                    "tenant's cap or %s"
                )
                _log.warning(line, self.name, Size(size), Size(_MOST_BYTES))
            return None
        with self._lock:
            if place := self._index.take(size, owner):
                return place
        with self._growing:  # one thread makes room, and none makes it twice
            self._remove_dead()
            while True:
                with self._lock:
                    if place := self._index.take(size, owner):
                        return place
                    may_grow = time.monotonic() >= self._grow_after
                    slots = self._index.reserve(size, owner) if may_grow else 0
                    made = None if slots else self._index.evict(size, owner)
                    self._counts["evicted"] += made is not None
                    self._counts["full"] += made is None and not slots
                if slots:
                    self._grow(size, slots, owner)
                elif not isinstance(made, SegmentSlots) or not self._remove_dead():
                    return made if isinstance(made, DiskSlot) else None
                else:
                    self._grow_after = 0.0  # the disk has room again

    def _grow(self, size: int, slots: int, owner: Owner) -> None:
        """Make a segment of bytes that are set aside; if the disk has them not, wait a while."""
        self._number += 1
        try:
            file = SegmentFile.create(self._folder, self._number, size, slots, owner.name)
        except OSError as error:
            _log.warning("%s: no new segment: %s", self.name, error.strerror)
            self._grow_after = time.monotonic() + _GROW_AGAIN_S
            with self._lock:
                self._index.account(owner, -disk_bytes(size, slots))
                self._counts["write_errors"] += 1
        else:
            with self._lock:
                self._index.add(SegmentSlots(file, owner))

    def _remove_dead(self) -> bool:
        """Remove dead segments, and give their bytes back; whether the disk let us."""
        if not self._index.dead:
            return True
        with self._lock:
            dead, self._index.dead = self._index.dead, []
        for i, segment in enumerate(dead):
            try:
                segment.file.unlink()
            except OSError as error:
                _log.warning("%s: cannot remove a segment: %s", self.name, error.strerror)
                with self._lock:
                    self._index.dead += dead[i:]
                return False
            segment.file.close()
            with self._lock:
                self._index.spent -= segment.file.bytes
        return True


def _payload_checksum(parts: Iterator[memoryview], copies: Sequence[tuple[Buffer, Buffer]]) -> int:
    """The checksum of what is read or written, as ``body_of`` made it: of each few MiB at once,
    while other threads read and write."""
    if copies:
        deque(parts, 0)
        return payload_checksum(part for _, part in copies)
    return payload_checksum(np.frombuffer(part, np.uint8) for part in parts)


def open_disk(path: str, options: DiskOptions) -> DiskTier:
    """``disk:PATH?...``. Raises ``ConfigError``."""
    return DiskTier(path, options.capacity, threads=options.threads, quotas=options.quotas)
