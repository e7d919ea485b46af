"""The index of the disk tier: which slot has which record, and which record is evicted next.

There are no locks in it: the tier holds one during every call. There is no object per record: each
segment has arrays with one entry per slot, and a dict maps fingerprints to slots.

A slot is in one of three states. It is free. Or it has a record that can be found (its fingerprint
is not 0). Or it has none and is *pinned*, because it is being written or erased, or because its
record was deleted while it was being read. Such a slot becomes free when its last pin is removed. A
segment that is *gone* has no records any more. It is dead once it has no pins.

Each *owner* has its own segments. An owner is a tenant with a quota in this tier, or the default
tenant, which stands for all tenants without one. Free bytes that are reserved for an owner are used
for no other one. A segment is evicted for another owner only if its own owner keeps at least its
reserved bytes. Among the segments that may be evicted, the least recently used one goes first. All
tenants find the records of all owners.

A record is found by a 60-bit fingerprint of its key. Two keys with the same fingerprint replace
each other. A load compares the whole key, which is in the record's header: a collision is a miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvass.tiers.disk.notes import NOTES_BYTES
from kvass.tiers.disk.segment import MOST_FIRST, SegmentFile, disk_bytes, most_slots
from kvass.types import DEFAULT_TENANT, I64Array, Quota, U64Array

_FOLDER_BYTES: Final = (16 << 10) + 2 * NOTES_BYTES
"""The most bytes that the folder takes without segments: itself, its lock file, the notes, and a
new copy of the notes."""
_FEWEST_VICTIMS: Final = 64
_MOST_VICTIMS: Final = 4096
_NEVER: Final = 1 << 62
_PARTS: Final = 16
"""A segment takes at most 1/16 of its owner's quota, so that an owner can have several slot
sizes."""


def fingerprint(key: bytes) -> int:
    """Return 60 bits of a hash of ``key``, never 0."""
    return xxhash.xxh3_64_intdigest(key) >> 4 or 1


class SegmentSlots:
    """The state of all slots of one segment file, as one array per property."""

    def __init__(self, file: SegmentFile, owner: Owner) -> None:
        self.file = file
        self.owner = owner
        self.gone = False
        self.used = 0
        """Slots that are not free."""
        self.users = 0
        """The number of pins of all slots. The file stays open while there are any."""
        self.pins: npt.NDArray[np.uint16] = np.zeros(file.slots, np.uint16)
        self.fingerprint: U64Array = np.zeros(file.slots, np.uint64)
        self.stamp: I64Array = np.zeros(file.slots, np.int64)
        """For each slot the sequence number of its record's last use."""

    def slot_id(self, slot: int) -> int:
        """Return a number that identifies the slot among all segments."""
        return self.file.number << 32 | slot

    def last_use(self) -> int:
        """Return the newest stamp, or ``_NEVER`` while a slot is pinned."""
        return _NEVER if self.users else int(self.stamp[self.fingerprint != 0].max(initial=0))


class DiskSlot(NamedTuple):
    segment: SegmentSlots
    slot: int


class _SizeClass:
    """The segments of one owner whose slots have the same size."""

    def __init__(self) -> None:
        self.segments: list[SegmentSlots] = []
        self.free: list[int] = []
        """``SegmentSlots.slot_id`` of all free slots."""
        self.victims: Iterator[tuple[SegmentSlots, int, int]] = iter(())
        """Records to evict: (segment, slot, the stamp that it had)."""

    def list_victims(self) -> int:
        """Set ``victims`` to the least recently used records. Returns the oldest one's stamp, or
        ``_NEVER`` if there is none."""
        slots = [np.flatnonzero((s.fingerprint != 0) & (s.pins == 0)) for s in self.segments]
        count = sum(map(len, slots))
        count = min(count, max(count // 32, _FEWEST_VICTIMS), _MOST_VICTIMS)
        if not count:
            return _NEVER
        stamps = [s.stamp[some] for s, some in zip(self.segments, slots, strict=True)]
        owners = np.repeat(np.arange(len(slots)), [len(some) for some in slots])
        columns = np.stack([np.concatenate(stamps), owners, np.concatenate(slots)])
        oldest = columns[:, np.argpartition(columns[0], count - 1)[:count]]
        oldest = oldest[:, np.argsort(oldest[0], kind="stable")]
        self.victims = iter(
            [(self.segments[i], slot, stamp) for stamp, i, slot in oldest.T.tolist()]
        )
        return int(oldest[0, 0])


class Owner:
    """A tenant with a quota in this tier, or the default tenant for all others.

    ``spent``: bytes of its segments, without those that are gone.
    """

    def __init__(self, quota: Quota) -> None:
        self.name = quota.tenant
        self.cap, self.reserved = quota.cap_bytes, quota.reserved_bytes
        self.spent = 0
        self.classes: dict[int, _SizeClass] = {}

    def class_of(self, slot_bytes: int) -> _SizeClass:
        return self.classes.setdefault(slot_bytes, _SizeClass())


class DiskIndex:
    def __init__(self, capacity: int, first_stamp: int, quotas: Iterable[Quota] = ()) -> None:
        """``capacity``: bytes on disk. ``first_stamp``: larger than all sequence numbers that were
        used before. A clock may say anything, so it has a bound."""
        self.capacity = capacity - _FOLDER_BYTES
        self.spent = 0
        """Bytes of all segments, including those that are being created or removed. ``DiskTier``
        subtracts a segment's bytes once its file is removed."""
        self.segments: dict[int, SegmentSlots] = {}
        self.dead: list[SegmentSlots] = []
        """Segments that are gone and have no pins. ``DiskTier`` removes their files."""
        self._target = max(min(1 << 30, self.capacity // 16), self.capacity // 1024)
        every = [Quota(DEFAULT_TENANT), *quotas]
        self.owners = {quota.tenant: Owner(quota) for quota in every}
        self._slot_ids: dict[int, int] = {}
        """Fingerprint -> ``SegmentSlots.slot_id``."""
        self._last_stamp = min(first_stamp, MOST_FIRST)

    def __len__(self) -> int:
        return len(self._slot_ids)

    def next_stamp(self) -> int:
        """Return a number that is larger than all before. It is used as a stamp and as the sequence
        number of a record."""
        self._last_stamp += 1
        return self._last_stamp

    # ------------------------------------------------------------ records

    def holds(self, fingerprint: int) -> bool:
        return fingerprint in self._slot_ids

    def pin(self, fingerprint: int) -> DiskSlot | None:
        """Find a record, and pin its slot: it is not reused until ``unpin``. Returns None if there
        is no such record."""
        place = self._find(fingerprint)
        if place is not None:
            place.segment.stamp[place.slot] = self.next_stamp()
            self._pin(place)
        return place

    def unpin(self, place: DiskSlot) -> None:
        """Remove a pin. A slot without a record becomes free when its last pin is removed. A
        segment without used slots is dropped."""
        segment, slot = place
        segment.pins[slot] -= 1
        segment.users -= 1
        if segment.gone:
            if not segment.users:
                self.dead.append(segment)
        elif not segment.pins[slot] and not segment.fingerprint[slot]:
            segment.owner.class_of(segment.file.slot_bytes).free.append(segment.slot_id(slot))
            segment.used -= 1
            if not segment.used:
                self.drop(segment)

    def forget(self, fingerprint: int, at: DiskSlot | None = None) -> DiskSlot | None:
        """Remove a record from the index; with ``at``, only if it is still in that slot. Returns
        its slot, now pinned, or None. The caller must erase the slot's table entry and then unpin
        the slot."""
        place = self._find(fingerprint)
        if place is None or at not in (None, place):
            return None
        del self._slot_ids[fingerprint]
        return self._empty(place)

    def owner(self, tenant: str) -> Owner:
        """Return the owner of the segments that a tenant's records are stored in."""
        return self.owners.get(tenant) or self.owners[DEFAULT_TENANT]

    def take(self, slot_bytes: int, owner: Owner) -> DiskSlot | None:
        """Take a free slot of that size, and pin it. Returns None if there is none."""
        free = owner.class_of(slot_bytes).free
        if not free:
            return None
        place = self._place(free.pop())
        place.segment.used += 1
        return self._pin(place)

    def evict(self, slot_bytes: int, owner: Owner) -> DiskSlot | SegmentSlots | None:
        """Make room for a slot of ``slot_bytes``. Returns one of:

        - a pinned slot, whose record was this owner's least recently used one of that size;
        - a segment of another size or owner, which was dropped because all of it was used less
          recently, or because the owner has fewer bytes than are reserved for it;
        - None.
        """
        size_class, size = owner.class_of(slot_bytes), disk_bytes(slot_bytes, 1)
        reserved = owner.spent + size <= owner.reserved
        if reserved and (other := _oldest(self._of_others(owner, size), _NEVER)):
            self.drop(other)
            return other
        if place := self._next_victim(size_class):
            return place
        oldest = size_class.list_victims()
        own = [s for c in owner.classes.values() if c is not size_class for s in c.segments]
        if other := _oldest(own + self._of_others(owner, size), oldest):
            size_class.victims = iter(())  # listed again before a record of this size is evicted
            self.drop(other)
            return other
        return self._next_victim(size_class)

    def publish(self, place: DiskSlot, fingerprint: int, stamp: int) -> DiskSlot | None:
        """Add the record that was written to a pinned slot, and unpin the slot. Returns the slot of
        the record that it replaces, as ``forget`` does."""
        segment, slot = place
        old = None
        if not segment.gone:
            old = self.forget(fingerprint)
            self._slot_ids[fingerprint] = segment.slot_id(slot)
            segment.fingerprint[slot], segment.stamp[slot] = fingerprint, stamp
        self.unpin(place)
        return old

    def _place(self, slot_id: int) -> DiskSlot:
        return DiskSlot(self.segments[slot_id >> 32], slot_id & 0xFFFF_FFFF)

    def _find(self, fingerprint: int) -> DiskSlot | None:
        slot_id = self._slot_ids.get(fingerprint)
        return None if slot_id is None else self._place(slot_id)

    def _pin(self, place: DiskSlot) -> DiskSlot:
        place.segment.pins[place.slot] += 1
        place.segment.users += 1
        return place

    def _empty(self, place: DiskSlot) -> DiskSlot:
        """Mark a slot as one without a record, and pin it."""
        place.segment.fingerprint[place.slot] = 0
        return self._pin(place)

    def _next_victim(self, size_class: _SizeClass) -> DiskSlot | None:
        for segment, slot, stamp in size_class.victims:
            fingerprint = int(segment.fingerprint[slot])
            if fingerprint and segment.stamp[slot] == stamp and not segment.pins[slot]:
                del self._slot_ids[fingerprint]
                return self._empty(DiskSlot(segment, slot))
        return None

    # ------------------------------------------------------------ segments

    def reserve(self, slot_bytes: int, owner: Owner) -> int:
        """Reserve the bytes of a new segment. Returns its number of slots; 0 if none fits."""
        others = [o for o in self.owners.values() if o is not owner]
        room = self.capacity - self.spent - sum(max(0, o.reserved - o.spent) for o in others)
        quota = owner.reserved if owner.spent < owner.reserved else owner.cap
        most = most_slots(slot_bytes, min(room, owner.cap - owner.spent))
        slots = min(max(1, min(self._target, quota // _PARTS) // slot_bytes), most)
        self.account(owner, disk_bytes(slot_bytes, slots) if slots else 0)
        return slots

    def account(self, owner: Owner, size: int) -> None:
        """Add ``size`` to the bytes of ``owner`` and of the tier. ``size`` is negative to release
        the bytes of a segment that could not be created."""
        self.spent += size
        owner.spent += size

    def fits(self, slot_bytes: int, owner: Owner) -> bool:
        """Whether one slot of that size fits into an empty tier, and into the owner's cap."""
        return most_slots(slot_bytes, min(self.capacity, owner.cap)) > 0

    def excess(self) -> SegmentSlots | None:
        """Return a segment to drop because the capacity or its owner's cap was lowered: the least
        recently used of those that may be dropped. None if nothing exceeds a limit."""
        every, owners = self.segments.values(), self.owners.values()
        over = [s for s in every if s.owner.spent > s.owner.cap]
        if not over and sum(owner.spent for owner in owners) > self.capacity:
            over = [s for s in every if s.owner.spent > s.owner.reserved]
        return min(over, key=SegmentSlots.last_use, default=None)

    def add(self, segment: SegmentSlots) -> None:
        """Add a segment whose bytes are reserved. Slots without a fingerprint are free."""
        self.segments[segment.file.number] = segment
        free = np.flatnonzero(segment.fingerprint == 0)
        segment.used = segment.file.slots - len(free)
        size_class = segment.owner.class_of(segment.file.slot_bytes)
        size_class.segments.append(segment)
        size_class.free += (free[::-1] + segment.slot_id(0)).tolist()

    def restore(self, file: SegmentFile) -> int:
        """Add a segment that an earlier process left, with the records in its table. Of two records
        with one fingerprint, only the newer one is kept. Returns the number of damaged entries.
        Raises ``OSError``."""
        segment = SegmentSlots(file, self.owner(file.tenant))
        segment.fingerprint[:], segment.stamp[:], damaged = file.entries()
        self.account(segment.owner, file.bytes)
        self.add(segment)
        self._last_stamp = max(self._last_stamp, int(segment.stamp.max()))
        slots = np.flatnonzero(segment.fingerprint)
        found = segment.fingerprint[slots].tolist()
        for fingerprint, slot in zip(found, slots.tolist(), strict=True):
            other = self._find(fingerprint)
            older: DiskSlot | None = DiskSlot(segment, slot)
            if other is None or segment.stamp[slot] > other.segment.stamp[other.slot]:
                self._slot_ids[fingerprint] = segment.slot_id(slot)
                older = other
            if older is not None:
                older.segment.file.set_entry(older.slot, 0, 0)
                self.unpin(self._empty(older))
        if not segment.used and not segment.gone:
            self.drop(segment)
        return damaged

    def drop(self, segment: SegmentSlots) -> None:
        """Remove a segment and its records from the index. It is dead as soon as it has no pins."""
        assert not segment.gone, "a segment was dropped twice"
        segment.gone = True
        for fingerprint in segment.fingerprint[segment.fingerprint != 0].tolist():
            del self._slot_ids[fingerprint]
        segment.fingerprint[:] = 0
        number = segment.file.number
        del self.segments[number]
        segment.owner.spent -= segment.file.bytes
        size_class = segment.owner.class_of(segment.file.slot_bytes)
        size_class.segments.remove(segment)
        size_class.free = [slot_id for slot_id in size_class.free if slot_id >> 32 != number]
        if not segment.users:
            self.dead.append(segment)

    def _of_others(self, owner: Owner, size: int) -> list[SegmentSlots]:
        """Return the segments of other owners that may be dropped so that ``owner`` gets ``size``
        more bytes. Each keeps what is reserved for it."""
        if owner.spent + size > owner.cap:
            return []
        others = [o for o in self.owners.values() if o is not owner]
        each = [s for o in others for c in o.classes.values() for s in c.segments]
        return [s for s in each if s.owner.spent - s.file.bytes >= s.owner.reserved]


def _oldest(segments: list[SegmentSlots], stamp: int) -> SegmentSlots | None:
    """Return the least recently used segment without pins, if it was last used before ``stamp``."""
    found = min(segments, key=SegmentSlots.last_use, default=None)
    return found if found is not None and found.last_use() < stamp else None
