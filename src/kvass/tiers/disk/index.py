"""The disk tier's index: which slot holds which record, and which record is evicted next.

Law of this file: it does no I/O and takes no lock. The tier holds its lock during every call.

There is no object per record. A segment has columns (arrays over its slots), and one dict maps a
fingerprint to a place, which is a segment number and a slot number in one integer.

A slot is in one of three states. It is free. Or it holds a record that can be found; then its
fingerprint is not 0. Or it holds no such record but is *pinned*: it is being written or erased, or
its record was deleted while a thread reads it. A slot without a record is free when its last pin
goes. A segment that is *gone* holds no records. It is *dead* when its last pin goes.

Each segment belongs to an *owner*: a tenant that has a quota in this tier, or the default tenant,
which stands for all others. Free bytes that are reserved for an owner are not given to others. An
owner does not lose a segment to another owner if it would then have less than its reservation. All
other segments form one pool, and the least recently used of them is evicted first. A lookup finds
the records of all owners.

A record is found by a 60-bit fingerprint of its key. Two keys with the same fingerprint replace
each other. A load compares the whole key, which the record's header has: a collision is a miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvass.tiers.disk.notes import NOTES_BYTES
from kvass.tiers.disk.segment import SegmentFile, disk_bytes, most_slots
from kvass.types import DEFAULT_TENANT, I64Array, Quota, U64Array

_FOLDER_BYTES: Final = (16 << 10) + 2 * NOTES_BYTES
"""An upper bound for all but the segments: folder, lock file, notes and a copy of the notes."""
_FEWEST_VICTIMS: Final = 64
_MOST_VICTIMS: Final = 4096
_NEVER: Final = 1 << 62
_PARTS: Final = 16
"""A segment takes at most one such part of its owner's quota. So an owner can have segments of
several slot sizes."""


def fingerprint(key: bytes) -> int:
    """A 60-bit hash of the key, never 0."""
    return xxhash.xxh3_64_intdigest(key) >> 4 or 1


class SegmentSlots:
    """The slots of one segment, as columns."""

    def __init__(self, file: SegmentFile, owner: Owner) -> None:
        self.file = file
        self.owner = owner
        self.gone = False
        self.used = 0
        """Slots that are not free."""
        self.users = 0
        """Pins of all slots: while there are any, the file stays open."""
        self.pins: npt.NDArray[np.uint16] = np.zeros(file.slots, np.uint16)
        self.fingerprint: U64Array = np.zeros(file.slots, np.uint64)
        self.stamp: I64Array = np.zeros(file.slots, np.int64)
        """When each slot's record was used last."""

    def place(self, slot: int) -> int:
        return self.file.number << 32 | slot

    def last_use(self) -> int:
        """The newest stamp of its records; ``_NEVER`` while a slot is pinned."""
        return _NEVER if self.users else int(self.stamp[self.fingerprint != 0].max(initial=0))


class DiskSlot(NamedTuple):
    """A slot of a segment."""

    segment: SegmentSlots
    slot: int


class _SizeClass:
    """The segments of one owner whose slots have the same size."""

    def __init__(self) -> None:
        self.segments: list[SegmentSlots] = []
        self.free: list[int] = []
        """``SegmentSlots.place`` of all free slots."""
        self.victims: Iterator[tuple[SegmentSlots, int, int]] = iter(())
        """Records to evict: (segment, slot, the stamp that it had)."""

    def list_victims(self) -> int:
        """Make a new list of the least recently used records. Returns the oldest of their stamps,
        or ``_NEVER`` if there are none."""
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
    """A tenant to whom segments belong, with its quota.

    ``spent`` counts the bytes of its segments, without those that are gone.
    """

    def __init__(self, quota: Quota) -> None:
        self.name = quota.tenant
        self.cap, self.reserved = quota.cap_bytes, quota.reserved_bytes
        self.spent = 0
        self.classes: dict[int, _SizeClass] = {}

    def class_of(self, slot_bytes: int) -> _SizeClass:
        return self.classes.setdefault(slot_bytes, _SizeClass())

    def lacks(self, size: int) -> bool:
        """Whether ``size`` more bytes still fit its reservation."""
        return self.spent + size <= self.reserved

    def spares(self, segment: SegmentSlots) -> bool:
        """Whether it would keep its whole reservation without this segment."""
        return self.spent - segment.file.bytes >= self.reserved


class DiskIndex:
    """The index of all segments of one tier."""

    def __init__(self, capacity: int, clock: int, quotas: Iterable[Quota] = ()) -> None:
        """``capacity`` is in bytes on disk. ``clock`` is above every sequence number used
        before."""
        self.capacity = capacity - _FOLDER_BYTES
        self.spent = 0
        """Bytes of all segments, with those that are being created or removed. The tier subtracts
        the bytes of a segment once its files are removed."""
        self.segments: dict[int, SegmentSlots] = {}
        self.dead: list[SegmentSlots] = []
        """Segments that are gone and have no pins. The tier removes their files."""
        self._target = max(min(1 << 30, self.capacity // 16), self.capacity // 1024)
        every = [Quota(DEFAULT_TENANT), *quotas]
        self.owners = {quota.tenant: Owner(quota) for quota in every}
        self._places: dict[int, int] = {}
        """Fingerprint -> ``SegmentSlots.place``."""
        self._clock = clock

    def __len__(self) -> int:
        return len(self._places)

    def tick(self) -> int:
        """The next stamp. It is above all earlier ones, and is also used as a sequence number."""
        self._clock += 1
        return self._clock

    # ------------------------------------------------------------ records

    def holds(self, key: int) -> bool:
        return key in self._places

    def pin(self, key: int) -> DiskSlot | None:
        """The slot of a record, now pinned; its bytes stay unchanged until ``unpin``. None if there
        is no record."""
        place = self._find(key)
        if place is not None:
            place.segment.stamp[place.slot] = self.tick()
            self._pin(place)
        return place

    def unpin(self, place: DiskSlot) -> None:
        """Remove one pin. A slot without a record and pins becomes free; a segment without used
        slots is dropped."""
        segment, slot = place
        segment.pins[slot] -= 1
        segment.users -= 1
        if segment.gone:
            if not segment.users:
                self.dead.append(segment)
        elif not segment.pins[slot] and not segment.fingerprint[slot]:
            segment.owner.class_of(segment.file.slot_bytes).free.append(segment.place(slot))
            segment.used -= 1
            if not segment.used:
                self.drop(segment)

    def forget(self, key: int, at: DiskSlot | None = None) -> DiskSlot | None:
        """Remove a record from the index, if it is at the place ``at`` (None: anywhere).

        The slot that is returned is pinned. The caller erases the slot's table entry, then unpins
        it.
        """
        place = self._find(key)
        if place is None or at not in (None, place):
            return None
        del self._places[key]
        return self._empty(place)

    def owner(self, tenant: str) -> Owner:
        """The owner of the segments that hold a tenant's records."""
        return self.owners.get(tenant) or self.owners[DEFAULT_TENANT]

    def take(self, slot_bytes: int, owner: Owner) -> DiskSlot | None:
        """A free slot of that size, now pinned; None if there is none."""
        free = owner.class_of(slot_bytes).free
        if not free:
            return None
        place = self._place(free.pop())
        place.segment.used += 1
        return self._pin(place)

    def evict(self, slot_bytes: int, owner: Owner) -> DiskSlot | SegmentSlots | None:
        """Evict a record or a segment, so that there is room for a slot of ``slot_bytes``.

        Returns the slot of the owner's least recently used record of that size, now pinned. Or it
        returns a segment of another size or another owner, which is gone now, if all its records
        were used less recently. None if nothing can be evicted.
        """
        size_class, size = owner.class_of(slot_bytes), disk_bytes(slot_bytes, 1)
        if owner.lacks(size) and (other := _oldest(self._of_others(owner, size), _NEVER)):
            self.drop(other)
            return other
        if place := self._next_victim(size_class):
            return place
        oldest = size_class.list_victims()
        own = [s for c in owner.classes.values() if c is not size_class for s in c.segments]
        if other := _oldest(own + self._of_others(owner, size), oldest):
            size_class.victims = iter(())  # to be asked again, before one of its own leaves
            self.drop(other)
            return other
        return self._next_victim(size_class)

    def publish(self, place: DiskSlot, key: int, stamp: int) -> DiskSlot | None:
        """Enter the record that was written to a pinned slot, and unpin the slot.

        Returns the slot of the record that it replaces, as ``forget`` does.
        """
        segment, slot = place
        old = None
        if not segment.gone:
            old = self.forget(key)
            self._places[key] = segment.place(slot)
            segment.fingerprint[slot], segment.stamp[slot] = key, stamp
        self.unpin(place)
        return old

    def _place(self, at: int) -> DiskSlot:
        return DiskSlot(self.segments[at >> 32], at & 0xFFFF_FFFF)

    def _find(self, key: int) -> DiskSlot | None:
        at = self._places.get(key)
        return None if at is None else self._place(at)

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
            key = int(segment.fingerprint[slot])
            if key and segment.stamp[slot] == stamp and not segment.pins[slot]:
                del self._places[key]
                return self._empty(DiskSlot(segment, slot))
        return None

    # ------------------------------------------------------------ segments

    def reserve(self, slot_bytes: int, owner: Owner) -> int:
        """Set bytes aside for a new segment. Returns its number of slots; 0 if there is no room for
        one."""
        others = [o for o in self.owners.values() if o is not owner]
        room = self.capacity - self.spent - sum(max(0, o.reserved - o.spent) for o in others)
        quota = owner.reserved if owner.spent < owner.reserved else owner.cap
        most = most_slots(slot_bytes, min(room, owner.cap - owner.spent))
        slots = min(max(1, min(self._target, quota // _PARTS) // slot_bytes), most)
        self.account(owner, disk_bytes(slot_bytes, slots) if slots else 0)
        return slots

    def account(self, owner: Owner, size: int) -> None:
        """Add the bytes of a segment to what the tier and the owner use. ``size`` is negative for a
        segment that was set aside but not created."""
        self.spent += size
        owner.spent += size

    def fits(self, slot_bytes: int, owner: Owner) -> bool:
        """Whether one record of that size fits an empty tier."""
        return most_slots(slot_bytes, min(self.capacity, owner.cap)) > 0

    def excess(self) -> SegmentSlots | None:
        """The segment to drop next because the capacity or a cap was lowered; None if all is within
        bounds. It is the least recently used segment that may be dropped."""
        every, owners = self.segments.values(), self.owners.values()
        over = [s for s in every if s.owner.spent > s.owner.cap]
        if not over and sum(owner.spent for owner in owners) > self.capacity:
            over = [s for s in every if s.owner.spent > s.owner.reserved]
        return min(over, key=SegmentSlots.last_use, default=None)

    def add(self, segment: SegmentSlots) -> None:
        """Use a segment whose bytes are set aside. Its slots without a fingerprint are free."""
        self.segments[segment.file.number] = segment
        free = np.flatnonzero(segment.fingerprint == 0)
        segment.used = segment.file.slots - len(free)
        size_class = segment.owner.class_of(segment.file.slot_bytes)
        size_class.segments.append(segment)
        size_class.free += (free[::-1] + segment.place(0)).tolist()

    def restore(self, file: SegmentFile) -> None:
        """Use a segment that an earlier process wrote, with the records in its table.

        If two slots hold a record of one key, the newer record is kept. Raises ``OSError``.
        """
        segment = SegmentSlots(file, self.owner(file.tenant))
        segment.fingerprint[:], segment.stamp[:] = file.entries()
        self.account(segment.owner, file.bytes)
        self.add(segment)
        self._clock = max(self._clock, int(segment.stamp.max()))
        slots = np.flatnonzero(segment.fingerprint)
        for key, slot in zip(segment.fingerprint[slots].tolist(), slots.tolist(), strict=True):
            other = self._find(key)
            older: DiskSlot | None = DiskSlot(segment, slot)
            if other is None or segment.stamp[slot] > other.segment.stamp[other.slot]:
                self._places[key] = segment.place(slot)
                older = other
            if older is not None:
                older.segment.file.set_entry(older.slot, 0, 0)
                self.unpin(self._empty(older))
        if not segment.used and not segment.gone:
            self.drop(segment)

    def drop(self, segment: SegmentSlots) -> None:
        """Remove a segment and its records from the index. It is dead as soon as it has no pins."""
        assert not segment.gone, "a segment went twice"
        segment.gone = True
        for key in segment.fingerprint[segment.fingerprint != 0].tolist():
            del self._places[key]
        segment.fingerprint[:] = 0
        number = segment.file.number
        del self.segments[number]
        segment.owner.spent -= segment.file.bytes
        size_class = segment.owner.class_of(segment.file.slot_bytes)
        size_class.segments.remove(segment)
        size_class.free = [at for at in size_class.free if at >> 32 != number]
        if not segment.users:
            self.dead.append(segment)

    def _of_others(self, owner: Owner, size: int) -> list[SegmentSlots]:
        """Segments of other owners that may be dropped so that ``owner`` gets ``size`` more
        bytes."""
        if owner.spent + size > owner.cap:
            return []
        others = [o for o in self.owners.values() if o is not owner]
        each = [s for o in others for c in o.classes.values() for s in c.segments]
        return [s for s in each if s.owner.spares(s)]


def _oldest(segments: list[SegmentSlots], stamp: int) -> SegmentSlots | None:
    """The least recently used segment without pins, if it was last used before ``stamp``."""
    found = min(segments, key=SegmentSlots.last_use, default=None)
    return found if found is not None and found.last_use() < stamp else None
