"""The disk tier: stores records in segment files of one folder, within a capacity in bytes.

Laws of this file:

- The folder never takes more disk space than the capacity. ``segment.disk_bytes`` is an upper bound
  of what a segment takes. That much is reserved in the index before a segment is created.
- A lock guards the index, and is not held during I/O. A slot is taken while the lock is held,
  written without it, and published while it is held.

Opening the tier reads the tables of the segments, but no record.

Left out on purpose: fsync (a power loss may lose records, but makes none wrong), compaction (slots
of equal size leave no gaps) and io_uring (measured: threads are as fast).
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
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvass.errors import ConfigError, ItemRefused
from kvass.folder import Folder
from kvass.tiers.base import Shards
from kvass.tiers.codec import Header, Seal, encode_header, payload_checksum
from kvass.tiers.disk.index import DiskIndex, DiskSlot, Owner, SegmentSlots, fingerprint
from kvass.tiers.disk.notes import read_notes, write_note
from kvass.tiers.disk.reading import SlotReader, ThreadMemory
from kvass.tiers.disk.sealing import SealedWriter
from kvass.tiers.disk.segment import (
    SEGMENT,
    TABLE,
    Copies,
    SegmentFile,
    body_of,
    disk_bytes,
    slot_bytes_of,
)
from kvass.tiers.disk.write_budget import WriteBudget
from kvass.tiers.options import DiskOptions
from kvass.tiers.proof import Depth
from kvass.tiers.record_tier import Outcome, RecordTier
from kvass.tiers.worker_pool import WorkerPool, as_down
from kvass.types import DEFAULT_TENANT, NO_CAP, PAGE, Quota, Size

_MOST_BYTES: Final = (1 << 31) - PAGE
"""The largest record, including its header."""
_COUNTS: Final = (
    "evicted",  # records or whole segments that were evicted to make room
    "damaged",  # records that did not match their header, key or checksum; entries of tables
    "mismatched",  # loads whose record had shards of other lengths than the buffers
    "full",  # stores for which no slot could be freed
    "too_large",  # stores of records that do not fit even into an empty tier
    "read_errors",
    "write_errors",
)
_TO_PROVE: Final = 3
"""Segments of which one must be readable, or the disk has failed."""
_CHECK_S: Final = 1.0
"""Seconds between two checks that this process still owns the folder."""
_GROW_AGAIN_S: Final = 10.0
"""Seconds without new segments after one could not be created."""
_FILE: Final = re.compile(f"([0-9a-f]{{8}})({re.escape(SEGMENT)}|{re.escape(TABLE)})")
_log = logging.getLogger("kvass.tiers")


class DiskTier(RecordTier):
    """``Tier`` with a folder as the backend. ``quotas`` divides its capacity among tenants.
    ``day_bytes``: the bytes a day that it is to write; 0: no limit. The tier only counts and
    reports them; the core leaves out rows (``core/tiers/flush.py``).

    Raises ``ConfigError`` if the folder cannot be used with this capacity and these quotas.
    """

    def __init__(
        self,
        folder: str | Path,
        capacity: int,
        *,
        threads: int = 4,
        quotas: Sequence[Quota] = (),
        day_bytes: int = 0,
    ) -> None:
        super().__init__(str(folder))
        self._index = DiskIndex(capacity, time.time_ns(), quotas)
        self._divided = bool(quotas)
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._noting = threading.Lock()
        self._grow_after = 0.0
        self._memory = ThreadMemory()
        self._reader, self._sealed = SlotReader(self._memory), SealedWriter(self._memory)
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
            self._budget = WriteBudget(self._folder, day_bytes) if day_bytes else None
            undo.pop_all()
        self._lacking = 0
        self._look_at_room()
        if self._lacking:
            line = "%s: its disk has room for %s of its capacity of %s"
            there = self._index.capacity - self._lacking
            _log.warning(line, self.name, Size(there).rounded(), Size(capacity))
        self._checked = time.monotonic()
        self._pool = WorkerPool(self.name, threads)
        self._remove_dead()

    def _look_at_room(self) -> None:
        """See how many bytes the disk lacks for the segments that the capacity still allows."""
        disk = os.statvfs(self._folder.fd)
        wanted = self._index.capacity - self._index.spent
        self._lacking = max(0, wanted - disk.f_bavail * disk.f_frsize)

    def _reopen(self) -> int:
        """Open the segments that earlier processes left. Returns the highest number of one.

        Damaged segments are removed, and those that exceed the capacity or a quota. Raises
        ``ConfigError`` if a segment has a newer format (then nothing is removed) or on an I/O
        error.
        """
        opened: list[SegmentFile] = []
        try:
            names = map(_FILE.fullmatch, os.listdir(self._folder.fd))
            numbers = {int(match[1], 16) for match in names if match}
            for number in sorted(numbers, reverse=True):
                with suppress(FileNotFoundError):  # only the table is left of this segment
                    if (file := SegmentFile.reopen(self._folder, number)) is not None:
                        opened.append(file)
            for number in numbers - {file.number for file in opened}:
                for suffix in (SEGMENT, TABLE):
                    self._folder.unlink(f"{number:08x}{suffix}")
            damaged = sum(map(self._index.restore, opened))
            while (segment := self._index.excess()) is not None:
                self._index.drop(segment)
        except (OSError, ConfigError) as error:
            for file in opened:
                file.close()
            if isinstance(error, ConfigError):
                raise
            where = f"{error.filename}: " if error.filename else ""
            raise ConfigError(f"{self.name}: {where}{error.strerror}") from error
        if damaged:
            line = "%s: its tables have damaged entries: %d; the records of these are not found"
            _log.warning(line, self.name, damaged)
            self._counts["damaged"] += damaged
        return max((file.number for file in opened), default=0)

    # ------------------------------------------------------------ batches

    def _exists(self, keys: Sequence[bytes]) -> list[Outcome]:
        with self._lock:
            return [self._index.holds(fingerprint(key)) for key in keys]

    def _get(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[Outcome]:
        return self._pool.each(lambda i: self._load(keys[i], into[i]), [0] * len(keys))

    def _put(self, keys: Sequence[bytes], data: Sequence[Shards], tenant: str) -> list[Outcome]:
        owner, seal = self._index.owner(tenant), self._seal(tenant)
        try:
            return self._pool.each(
                lambda i: self._store(keys[i], data[i], owner, seal), [0] * len(keys)
            )
        finally:
            if self._budget:
                self._budget.save_if_due()

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
        for segment in gone:  # a segment that is still read has no name then, but stays open
            segment.file.unlink()

    def _get_note(self, name: str) -> bytes | None:
        """Return a note; None if it is absent, or if the file of the notes is damaged."""
        self._check_folder()
        return read_notes(self._folder).get(name)

    def _put_note(self, name: str, value: bytes) -> None:
        """Set a note. Unlike records, notes are synced to the disk."""
        self._check_folder()
        with self._noting:
            write_note(self._folder, name, value)

    def _close(self) -> None:
        self._pool.close()
        self._remove_dead()
        for segment in self._index.segments.values():
            segment.file.close()
        if self._budget:
            self._budget.save()
        self._folder.close()

    @contextmanager
    def _call(self) -> Iterator[float]:
        with super()._call() as since:
            try:
                if self._folder.lost_because or time.monotonic() - self._checked > _CHECK_S:
                    self._check_folder()
                yield since
            except OSError as error:
                raise as_down(self.name, error) from error
            finally:
                self._remove_dead()

    def _prove(self, depth: Depth, since: float) -> bool:
        """The folder is ours as long as nobody replaces it, so nothing is written: a disk that has
        become read-only still serves loads. But it must be readable."""
        self._check_folder()
        with self._lock:
            files = [segment.file for segment in islice(self._index.segments.values(), _TO_PROVE)]
        for left, file in enumerate(files, 1 - len(files)):
            try:
                file.read_description(self._memory.page)
                break
            except OSError:  # or it was removed meanwhile
                if not left:
                    raise
        return False

    def _check_folder(self) -> None:
        """Raise ``OSError`` if this process does not own the folder any more."""
        self._folder.check()
        self._look_at_room()
        self._checked = time.monotonic()

    def report(self) -> dict[str, Any]:
        """Return the tier's fields of ``kvass status``: numbers of records, segments and bytes,
        bytes of the capacity for which the disk had no room at the last call, counts of evictions
        and errors since the tier was opened, and with quotas the bytes of each tenant."""
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
                "lacking_bytes": self._lacking,
                **(self._budget.report() if self._budget else {}),
                **self._counts,
                **super().report(),
            }

    # ------------------------------------------------------------ one record

    def _load(self, key: bytes, into: Shards) -> bool:
        self._memory.get()  # first: a lack of memory is no fault of the record
        number = fingerprint(key)
        with self._lock:
            place = self._index.pin(number)
        if place is None:
            return False
        fault = "read_errors"
        try:
            fault = self._reader.load(place.segment.file, place.slot, key, into, self._open)
        except OSError as error:
            raise ItemRefused(f"{self.name}: {error.strerror}") from None
        finally:
            bad = None
            with self._lock:
                if fault:
                    self._counts[fault] += 1
                if fault in ("damaged", "read_errors"):  # a record that replaced this one stays
                    bad = self._index.forget(number, place)
                self._index.unpin(place)
            self._erase(bad)
        return not fault

    def _store(self, key: bytes, shards: Shards, owner: Owner, seal: Seal | None) -> bool:
        place = self._room(slot_bytes_of(shards), owner)
        if place is None:
            return False
        segment, slot = place
        number = fingerprint(key)
        with self._lock:
            stamp = self._index.next_stamp()
        try:
            if self._budget:
                self._budget.spend(segment.file.slot_bytes)
            segment.file.set_entry(slot, 0, 0)
            if seal is None:
                self._write(place, key, shards, stamp)
            else:
                self._sealed.write(segment.file, slot, key, shards, stamp, seal)
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

    def _write(self, place: DiskSlot, key: bytes, shards: Shards, stamp: int) -> None:
        """Write a record that is not encrypted to a pinned slot. Raises ``OSError``."""
        page = self._memory.page
        body, copies = body_of(shards)
        for shard, part in copies:
            part[:] = shard

        def write_header(parts: Iterator[memoryview]) -> None:
            next(parts)
            check = _payload_checksum(parts, copies)
            raw = encode_header(Header(key, tuple(map(len, shards)), stamp, check))
            page[: len(raw)] = memoryview(raw)
            page[len(raw) :] = 0

        place.segment.file.write(place.slot, [page, *body], write_header)

    def _erase(self, place: DiskSlot | None) -> None:
        """Erase the table entry of a slot that ``DiskIndex.forget`` returned, and unpin the slot.
        Does nothing for None."""
        if place is None:
            return
        failed = 0
        try:
            place.segment.file.set_entry(place.slot, 0, 0)
        except OSError:  # the record may be back after a restart; a load then checks it
            failed = 1
        with self._lock:
            self._counts["write_errors"] += failed
            self._index.unpin(place)

    # ------------------------------------------------------------ room

    def _room(self, size: int, owner: Owner) -> DiskSlot | None:
        """Return a pinned slot for ``size`` bytes: a free one, else one of a new segment, else one
        whose record was evicted. None if there is none."""
        if size > _MOST_BYTES or not self._index.fits(size, owner):
            with self._lock:
                self._counts["too_large"] += 1
                first = self._counts["too_large"] == 1
            if first:  # warn once: the size of rows was not known when the capacity was chosen
                line = (
                    "%s: rows that take %s are not kept: one is more than the capacity, its "
                    "tenant's cap or %s"
                )
                _log.warning(line, self.name, Size(size), Size(_MOST_BYTES))
            return None
        with self._lock:
            if place := self._index.take(size, owner):
                return place
        with self._growing:  # one thread at a time makes room; the others then try again
            self._remove_dead()
            while True:
                with self._lock:
                    if place := self._index.take(size, owner):
                        return place
                    may_grow = time.monotonic() >= self._grow_after
                    slots = self._index.reserve(size, owner) if may_grow else 0
                    evicted = None if slots else self._index.evict(size, owner)
                    self._counts["evicted"] += evicted is not None
                    self._counts["full"] += evicted is None and not slots
                if slots:
                    self._grow(size, slots, owner)
                elif not isinstance(evicted, SegmentSlots) or not self._remove_dead():
                    return evicted if isinstance(evicted, DiskSlot) else None
                else:
                    self._grow_after = 0.0  # a segment was removed, so the disk has room again

    def _grow(self, size: int, slots: int, owner: Owner) -> None:
        """Create a segment for which ``DiskIndex.reserve`` has reserved the bytes. If that fails,
        the bytes are released, and no segment is created for ``_GROW_AGAIN_S``."""
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
        """Remove the files of dead segments, and release their bytes. Returns False if a file could
        not be removed; the rest is tried again later."""
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


def _payload_checksum(parts: Iterator[memoryview], copies: Copies) -> int:
    """Consume ``parts``, which writes them, and return the checksum of the shards.

    ``copies`` is what ``body_of`` returned. If there are none, ``parts`` are the shards themselves,
    and each few MiB are checksummed while other threads do their I/O.
    """
    if copies:
        deque(parts, 0)
        return payload_checksum(part for _, part in copies)
    return payload_checksum(np.frombuffer(part, np.uint8) for part in parts)


def open_disk(path: str, options: DiskOptions) -> DiskTier:
    """Open the tier of a URL ``disk:PATH?...``. Raises ``ConfigError``."""
    return DiskTier(
        path,
        options.capacity,
        threads=options.threads,
        quotas=options.quotas,
        day_bytes=options.day_bytes,
    )
