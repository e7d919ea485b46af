"""The disk tier's index: which slot holds what, and which record leaves when room is needed.

No I/O and no lock: the tier holds one around every call. There is no object per record, but columns
per segment, and a dict from fingerprint to place.

States of a slot: FREE; BUSY, being written or erased by the thread that took it; READY, readable
while pinned; FORGOTTEN, deleted while it is being read; UNKNOWN, of an earlier life and not looked
at yet. A segment that is *gone* holds no record any more, and is dead when its last user left.

A record is found by a 60-bit fingerprint of its key. Two keys with the same fingerprint replace
each other. A load compares the whole key, which the record's header has: a collision is a miss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvass.tiers.disk.notes import NOTES_BYTES
from kvass.tiers.disk.segment import UNKNOWN as UNKNOWN_ENTRY
from kvass.tiers.disk.segment import SegmentFile, disk_bytes, most_slots
from kvass.types import I64Array, U32Array, U64Array

FREE: Final = 0
BUSY: Final = 1
READY: Final = 2
FORGOTTEN: Final = 3
UNKNOWN: Final = 4

_FOLDER_BYTES: Final = (16 << 10) + 2 * NOTES_BYTES
"""What the folder, its lock, the notes and a newer copy of them take at most, without segments."""
_FEWEST_VICTIMS: Final = 64
_MOST_VICTIMS: Final = 4096
_NEVER: Final = 1 << 62


def fingerprint(key: bytes) -> int:
    """60 bits of a hash, never 0 and never ``UNKNOWN``: what the index log has of a key."""
    return xxhash.xxh3_64_intdigest(key) >> 4 or 1


class Segment:
    """Columns over the slots of one file."""

    def __init__(self, file: SegmentFile, fresh: bool) -> None:
        """``fresh``: every slot is free; else nothing is known of them yet."""
        n = file.slots
        self.file = file
        self.users = 0
        """Pins, BUSY slots and recovery: while there are any, the file stays open."""
        self.gone = False
        self.state: npt.NDArray[np.uint8] = np.full(n, FREE if fresh else UNKNOWN, np.uint8)
        self.pins: npt.NDArray[np.uint16] = np.zeros(n, np.uint16)
        self.proven: npt.NDArray[np.bool_] = np.zeros(n, np.bool_)
        self.fingerprint: U64Array = np.zeros(n, np.uint64)
        self.stamp: I64Array = np.zeros(n, np.int64)
        self._free: U32Array = np.arange(n, 0, -1, dtype=np.uint32) - np.uint32(1)
        self.free_slots = n if fresh else 0

    def pop(self) -> int:
        """Take the slot that was freed last; of a fresh segment the lowest."""
        self.free_slots -= 1
        return int(self._free[self.free_slots])

    def push(self, slots: I64Array | list[int]) -> None:
        self._free[self.free_slots : self.free_slots + len(slots)] = slots
        self.free_slots += len(slots)

    def last_use(self) -> int:
        """The newest stamp; ``_NEVER`` while it is used, or has slots that are UNKNOWN."""
        if self.users or (self.state == UNKNOWN).any():
            return _NEVER
        return int(self.stamp[self.state == READY].max(initial=0))


class Place(NamedTuple):
    """One slot."""

    segment: Segment
    slot: int


class _SizeClass:
    """The segments with slots of one size."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.spare: list[Segment] = []
        """Those with a free slot."""
        self.victims: Iterator[tuple[Segment, int, int]] = iter(())

    def list_victims(self) -> int:
        """Make a list of the least recently used records; returns the oldest one's stamp."""
        ready = [(s, np.flatnonzero((s.state == READY) & (s.pins == 0))) for s in self.segments]
        count = sum(len(slots) for _, slots in ready)
        count = min(count, max(count // 32, _FEWEST_VICTIMS), _MOST_VICTIMS)
        if not count:
            self.victims = iter(())
            return _NEVER
        parts = []
        for i, (segment, slots) in enumerate(ready):
            stamps = segment.stamp[slots]
            if len(slots) > count:
                slots = slots[np.argpartition(stamps, count)[:count]]
                stamps = segment.stamp[slots]
            parts.append(np.stack([stamps, np.full(len(slots), i), slots]))
        oldest = np.concatenate(parts, axis=1)  # arrays, so that few objects are left behind
        oldest = oldest[:, np.argsort(oldest[0], kind="stable")[:count]]
        self.victims = iter([(ready[i][0], slot, stamp) for stamp, i, slot in oldest.T.tolist()])
        return int(oldest[0, 0])


class DiskIndex:
    """All segments of one tier."""

    def __init__(self, capacity: int, clock: int) -> None:
        """``capacity``: bytes on disk; ``clock``: above every sequence number given before."""
        self.capacity = capacity - _FOLDER_BYTES
        self.spent = 0
        self.segments: dict[int, Segment] = {}
        self.dead: list[Segment] = []
        """Gone, without users: to be unlinked and closed, then passed to ``removed``."""
        self._target = max(min(1 << 30, self.capacity // 16), self.capacity // 1024)
        self._classes: dict[int, _SizeClass] = {}
        self._places: dict[int, int] = {}
        """Fingerprint -> number of the segment << 32 | slot."""
        self._clock = clock
        self._changed: set[int] | None = None

    def __len__(self) -> int:
        return len(self._places)

    def tick(self) -> int:
        """A stamp, and a sequence number, above all before."""
        self._clock += 1
        return self._clock

    # ------------------------------------------------------------ records

    def holds(self, key: int) -> bool:
        return key in self._places

    def pin(self, key: int) -> Place | None:
        """Where the record is; it stays there until ``unpin``."""
        place = self._find(key)
        if place is not None:
            segment, slot = place
            segment.pins[slot] += 1
            segment.users += 1
            segment.stamp[slot] = self.tick()
        return place

    def unpin(self, place: Place) -> bool:
        """Whether the slot is FORGOTTEN and this was its last reader. Then it is BUSY, and the
        caller erases it."""
        segment, slot = place
        segment.pins[slot] -= 1
        if segment.pins[slot] or segment.state[slot] != FORGOTTEN or segment.gone:
            self._left(segment)
            return False
        segment.state[slot] = BUSY
        return True

    def forget(self, key: int, at: Place | None = None) -> Place | None:
        """Drop a record, if it is still ``at`` that place. The caller erases the slot returned."""
        place = self._find(key)
        if self._changed is not None and at is None:
            self._changed.add(key)
        if place is None or at not in (None, place):
            return None
        del self._places[key]
        return self._retire(place)

    def take(self, slot_bytes: int) -> Place | None:
        """A free slot of that size, now BUSY."""
        spare = self._class_of(slot_bytes).spare
        if not spare:
            return None
        place = Place(spare[-1], spare[-1].pop())
        if not spare[-1].free_slots:
            spare.pop()
        return self._busy(place)

    def evict(self, slot_bytes: int) -> Place | Segment | None:
        """Make room: the slot of the least recently used record of that size, now BUSY; or a
        segment of another size, used less recently as a whole, now gone; or nothing."""
        size_class = self._class_of(slot_bytes)
        for attempt in (1, 2):
            for segment, slot, stamp in size_class.victims:
                unused = segment.state[slot] == READY and not segment.pins[slot]
                if unused and segment.stamp[slot] == stamp and not segment.gone:
                    key = int(segment.fingerprint[slot])
                    del self._places[key]
                    return self._busy(Place(segment, slot))
            oldest = size_class.list_victims() if attempt == 1 else 0
            if attempt == 1 and (other := self._older_segment(size_class, oldest)):
                size_class.victims = iter(())  # to be asked again, before one of its own leaves
                self.drop(other)
                return other
        return None

    def publish(self, place: Place, key: int, stamp: int) -> Place | None:
        """A BUSY slot holds this record now. The caller erases the slot returned."""
        segment, slot = place
        if segment.gone:
            self._left(segment)
            return None
        if self._changed is not None:
            self._changed.add(key)
        old = self._find(key)
        self._places[key] = segment.file.number << 32 | slot
        segment.fingerprint[slot], segment.stamp[slot] = key, stamp
        segment.state[slot], segment.proven[slot] = READY, False
        segment.users -= 1
        return self._retire(old) if old else None

    def release(self, place: Place) -> None:
        """A BUSY slot holds nothing now."""
        segment, slot = place
        segment.state[slot] = FREE
        self._give_back(segment, [slot])
        self._left(segment)

    def _class_of(self, slot_bytes: int) -> _SizeClass:
        return self._classes.setdefault(slot_bytes, _SizeClass())

    def _give_back(self, segment: Segment, slots: I64Array | list[int]) -> None:
        if not segment.free_slots and len(slots) and not segment.gone:
            self._class_of(segment.file.slot_bytes).spare.append(segment)
        segment.push(slots)

    def _find(self, key: int) -> Place | None:
        at = self._places.get(key)
        return None if at is None else Place(self.segments[at >> 32], at & 0xFFFF_FFFF)

    def _busy(self, place: Place) -> Place:
        place.segment.state[place.slot] = BUSY
        place.segment.users += 1
        return place

    def _retire(self, place: Place) -> Place | None:
        """A record that cannot be found any more: erased now (then it is BUSY), or when its last
        reader leaves."""
        if place.segment.pins[place.slot]:
            place.segment.state[place.slot] = FORGOTTEN
            return None
        return self._busy(place)

    def _left(self, segment: Segment) -> None:
        """A user left. A segment that is gone, or holds nothing, is dead with its last user."""
        segment.users -= 1
        if not segment.users and (segment.gone or segment.free_slots == segment.file.slots):
            if segment.gone:
                self.dead.append(segment)
            else:
                self.drop(segment)

    # ------------------------------------------------------------ segments

    def reserve(self, slot_bytes: int) -> int:
        """Set bytes aside for a new segment; returns how many slots it may have, 0 for none."""
        room = self.capacity - self.spent
        slots = min(max(1, self._target // slot_bytes), most_slots(slot_bytes, room))
        if slots:
            self.spent += disk_bytes(slot_bytes, slots)
        return slots

    def unreserve(self, slot_bytes: int, slots: int) -> None:
        """The segment that bytes were set aside for was not made."""
        self.spent -= disk_bytes(slot_bytes, slots)

    def fits(self, slot_bytes: int) -> bool:
        """Whether one record of that size fits an empty tier."""
        return most_slots(slot_bytes, self.capacity) > 0

    def add(self, segment: Segment, reserved: bool = True) -> None:
        """Use a segment. Its bytes are set aside already, unless it is of an earlier life."""
        self.spent += 0 if reserved else segment.file.bytes
        self.segments[segment.file.number] = segment
        size_class = self._class_of(segment.file.slot_bytes)
        size_class.segments.append(segment)
        if segment.free_slots:
            size_class.spare.append(segment)

    def drop(self, segment: Segment) -> None:
        """Forget a segment's records. It is dead as soon as it has no users."""
        assert not segment.gone, "a segment went twice"
        segment.gone = True
        for key in segment.fingerprint[segment.state == READY].tolist():
            del self._places[key]
        del self.segments[segment.file.number]
        size_class = self._class_of(segment.file.slot_bytes)
        size_class.segments.remove(segment)
        if segment.free_slots:
            size_class.spare.remove(segment)
        if not segment.users:
            self.dead.append(segment)

    def removed(self, segment: Segment) -> None:
        """A dead segment's files are gone."""
        self.spent -= segment.file.bytes

    def _older_segment(self, size_class: _SizeClass, stamp: int) -> Segment | None:
        """The segment of another size, without users, that was used least recently; ``None`` if
        that was not before ``stamp``."""
        others = (s for c in self._classes.values() if c is not size_class for s in c.segments)
        last_use, _, found = min(
            ((s.last_use(), s.file.number, s) for s in others), default=(_NEVER, 0, None)
        )
        return found if last_use < stamp else None

    # ------------------------------------------------------------ an earlier life

    def begin_recovery(self) -> None:
        """From here on, note which keys this life stores or deletes: older records of them must not
        come back."""
        self._changed = set()
        for segment in self.segments.values():
            segment.users += 1

    def recover(
        self, segment: Segment, first: int, keys: U64Array, sequences: U64Array
    ) -> list[Place]:
        """Slots from ``first`` on hold these records (0: none). The caller erases those
        returned."""
        if segment.gone:
            return []
        assert self._changed is not None, "recovery was not begun"
        assert not (keys == UNKNOWN_ENTRY).any(), "a slot that is still unknown"
        span = slice(first, first + len(keys))
        live = keys != 0
        segment.fingerprint[span], segment.stamp[span] = keys, sequences.astype(np.int64)
        segment.state[span] = np.where(live, READY, FREE)
        self._give_back(segment, (np.flatnonzero(~live) + first)[::-1])
        self._clock = max(self._clock, int(segment.stamp[span].max(initial=0)))
        superseded: list[Place | None] = []
        base = segment.file.number << 32
        slots = (np.flatnonzero(live) + first).tolist()
        for key, slot in zip(keys[live].tolist(), slots, strict=True):
            at = self._places.setdefault(key, base | slot)
            if at != base | slot or key in self._changed:
                superseded.append(self._drop_older(key, Place(segment, slot)))
        return [place for place in superseded if place is not None]

    def _drop_older(self, key: int, found: Place) -> Place | None:
        """Of two records of one key the older one leaves; so does one that this life replaced or
        deleted."""
        assert self._changed is not None
        other = self._find(key)
        assert other is not None
        replaced = key in self._changed
        if other == found:  # deleted in this life
            del self._places[key]
        elif not replaced and found.segment.stamp[found.slot] > other.segment.stamp[other.slot]:
            self._places[key] = found.segment.file.number << 32 | found.slot
            found = other
        return self._retire(found)

    def recovered(self, segment: Segment) -> None:
        """All slots of a segment are known."""
        self._left(segment)

    def end_recovery(self) -> None:
        self._changed = None
