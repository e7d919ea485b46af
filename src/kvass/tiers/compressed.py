"""A tier whose records are compressed without loss, bit by bit (``planes``): around any other one.

Laws of this file: what is loaded is what was stored, or a miss. A compressed record has a name of
its own, for which nobody asks who does not know it: an older kvass would take it for damaged, and
delete it.

So a record may be in the store in one *form* or the other. Each key is asked for in that in which
it was seen last, and then in the other one. Below this tier both are ordinary records.

It is compressed before it is encrypted. Loads and stores go on in groups of a few MiB: one is
compressed while another one is transferred.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from kvass.errors import ItemRefused, ItemUnreadable, TierDown
from kvass.tiers import codings
from kvass.tiers.base import Buffer, Shards, Varying
from kvass.tiers.buffers import batches_by_size, huge_buffer, size_of
from kvass.tiers.codings import Codings
from kvass.tiers.planes import OTHER_LENGTHS, best_coding, decode, encode
from kvass.tiers.proof import Depth
from kvass.tiers.rates import Rate
from kvass.tiers.record_tier import Outcome, RecordTier
from kvass.tiers.worker_pool import WorkerPool
from kvass.types import align_up

if TYPE_CHECKING:
    from kvass.tiers.encrypted import EncryptedTier

Mode: TypeAlias = Literal["lossless", "auto"]

_PERSON: Final = b"kvass compress 1"
LEAST_BYTES: Final = 32 << 10
"""Smaller records are not compressed: it would cost more than it saves."""
_GROUP_BYTES: Final = 4 << 20
_THREADS: Final = 12
"""With the daemon's four loads, as many groups at a time as these loads have: a store that gives
little to each connection gives no less."""
_KEPT_BYTES: Final = 8 << 20
"""Memory that a thread keeps for compressed records. More is had anew each time."""
_PADDED_BYTES: Final = 256 << 10
"""From that size on, a record is padded to pages: a disk then needs no copy of it."""
_MOST_SEEN: Final = 65_536
_CLEARLY: Final = 0.8
"""``auto`` begins if the store takes less than this part of what a core compresses, and ends if it
takes more than all of it."""
_USUAL: Final = 0.7
"""The part of their size that records in bfloat16 take."""
_TRIED_BYTES: Final = 2 << 20
_TRY_AGAIN_S: Final = 60.0
"""Seconds until a core that was too slow is tried again: it may have been busy."""


class Form(Enum):
    """In which form a record is in the store."""

    PLAIN = "plain"
    COMPRESSED = "compressed"
    ABSENT = "absent"


class _Memory(threading.local):
    """Memory of each thread, in huge pages, at the beginning of one."""

    def __init__(self) -> None:
        self._kept = huge_buffer(_KEPT_BYTES)

    def rooms(self, data: Sequence[Shards]) -> list[Buffer]:
        """Return room for each of these records, compressed, at multiples of ``PAGE``."""
        sizes = [align_up(_most(shards)) for shards in data]
        total = sum(sizes)
        memory = self._kept if total <= len(self._kept) else huge_buffer(total)
        ends = np.cumsum(sizes).tolist()
        return [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]


class CompressedTier(RecordTier):
    """Compresses what ``tier`` keeps. ``mode``: see ``docs/tiers.md``; not ``off``.

    ``remote``: with ``auto``, records are compressed until the store was seen to be fast, and not
    until it was seen to be slow. ``never``: with ``auto`` they are not, but are loaded.
    """

    def __init__(
        self,
        tier: RecordTier | EncryptedTier,
        mode: Mode,
        *,
        remote: bool,
        never: bool = False,
    ) -> None:
        super().__init__(tier.name)
        self._tier, self._mode = tier, mode
        self._remote, self._never = remote, never
        self._on = mode == "lossless" or (remote and not never)
        self._codings = Codings()
        self._memory = _Memory()
        self._pool = WorkerPool(tier.name, _THREADS, max_failures=1)
        self._lock = threading.Lock()
        self._seen: dict[bytes, Form] = {}
        """The form in which a record was seen last; the oldest ones first."""
        self._writes, self._reads = Rate(), Rate()
        self._encodes, self._decodes = Rate(each=True), Rate(each=True)
        self._try_at = 0.0
        self._trying = threading.Lock()
        """One thread tries a core at a time: two would be in each other's way."""
        self._records = self._kept_plain = self._from_bytes = self._to_bytes = 0
        if hasattr(tier, "register_memory"):
            self.register_memory = tier.register_memory

    # ------------------------------------------------------------ what RecordTier asks for

    def _exists(self, keys: Sequence[bytes]) -> list[Outcome]:
        outcomes = self._in_turn(
            keys,
            lambda form, which: [*self._tier.probe(_names(form, [keys[i] for i in which]))],
        )
        absent = [key for key, one in zip(keys, outcomes, strict=True) if one is False]
        self._saw(absent, Form.ABSENT)
        return outcomes

    def _get(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[Outcome]:
        def ask(form: Form, which: Sequence[int]) -> list[Outcome]:
            some, rooms = [keys[i] for i in which], [into[i] for i in which]
            if form is Form.PLAIN:  # the tier below has its own groups
                return self._load_some(form, some, rooms)
            return self._in_groups(some, rooms, partial(self._load_some, form))

        return self._in_turn(keys, ask)

    def _put(self, keys: Sequence[bytes], data: Sequence[Shards], tenant: str) -> list[Outcome]:
        on = self._compressing()
        store = partial(self._store_some, tenant, on)
        return self._in_groups(keys, data, store) if on else store(keys, data)

    def _delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        self._tier.delete([name for form in _FORMS for name in _names(form, keys)])
        self._saw(keys, Form.ABSENT)
        return [True] * len(keys)

    def _clear(self) -> None:
        self._tier.clear()
        with self._lock:
            self._seen.clear()

    def _get_note(self, name: str) -> bytes | None:
        return self._tier.note(name)

    def _put_note(self, name: str, value: bytes) -> None:
        self._tier.set_note(name, value)

    def _prove(self, depth: Depth, since: float) -> bool:
        """The tier below has done so."""
        return False

    @contextmanager
    def _one(self, since: float, depth: Depth = "read") -> Iterator[None]:
        """The tier below has proven its store, and counted a refusal."""
        yield

    def note(self, name: str) -> bytes | None:
        with self._call():
            return self._tier.note(name)

    def set_note(self, name: str, value: bytes) -> None:
        with self._call():
            self._tier.set_note(name, value)

    def check_store(self, whole: bool = True) -> bool:
        with self._call():
            return self._tier.check_store(whole)

    def _close(self) -> None:
        self._pool.close()
        self._tier.close()

    def report(self) -> dict[str, Any]:
        """Return the report of the tier below, with what was compressed since it was opened.
        ``compress`` says in words whether records are compressed, and why."""
        below, own = self._tier.report(), super().report()
        reasons = Counter(below["refusals"]) + Counter(own["refusals"])
        with self._lock:
            return below | {
                "refused_records": below["refused_records"] + own["refused_records"],
                "refusals": dict(reasons),
                "compress": self._words(),
                "compressed_records": self._records,
                "compressed_from_bytes": self._from_bytes,
                "compressed_to_bytes": self._to_bytes,
                "not_compressed_records": self._kept_plain,
            }

    # ------------------------------------------------------------ forms

    def _in_turn(
        self,
        keys: Sequence[bytes],
        ask: Callable[[Form, Sequence[int]], list[Outcome]],
    ) -> list[Outcome]:
        """Ask for each key in the form in which it was seen last, else compressed, and then for
        what was not there in the other form. A tier that is down is not asked again."""
        outcomes: list[Outcome] = [False] * len(keys)
        with self._lock:
            plain = [self._seen.get(key) is Form.PLAIN for key in keys]
        for other in (False, True):
            for form in _FORMS:
                first = [one is (form is Form.PLAIN) for one in plain]
                which = [
                    i for i, one in enumerate(outcomes) if one is not True and first[i] is not other
                ]
                if not which:
                    continue
                try:
                    got = ask(form, which)
                except TierDown as error:
                    got = [type(error)(str(error))] * len(which)
                for i, outcome in zip(which, got, strict=True):
                    if outcome is True or not isinstance(outcomes[i], TierDown):
                        outcomes[i] = outcome
                self._saw([keys[i] for i in which if outcomes[i] is True], form)
                if any(_is_down(outcome) for outcome in got):
                    return outcomes
        return outcomes

    def _saw(self, keys: Sequence[bytes], form: Form | None) -> None:
        """Remember in which form the records of these keys are. None: nobody knows."""
        with self._lock:
            for key in keys:
                self._seen.pop(key, None)
                if form is not None:
                    self._seen[key] = form
            while len(self._seen) > _MOST_SEEN:
                del self._seen[next(iter(self._seen))]

    def _in_groups(
        self,
        keys: Sequence[bytes],
        data: Sequence[Shards],
        some: Callable[[Sequence[bytes], Sequence[Shards]], list[Outcome]],
    ) -> list[Outcome]:
        """Call ``some`` with groups of consecutive records, and return all outcomes."""
        ranges = [*batches_by_size([size_of(shards) for shards in data], _GROUP_BYTES)]

        def work(n: int) -> list[Outcome]:
            part = slice(ranges[n].start, ranges[n].stop)
            return some(keys[part], data[part])

        outcomes: list[Outcome] = []
        for group, got in zip(ranges, self._pool.each(work, [0] * len(ranges)), strict=True):
            outcomes += [got] * len(group) if isinstance(got, TierDown) else got
        return outcomes

    # ------------------------------------------------------------ a group

    def _store_some(
        self, tenant: str, on: bool, keys: Sequence[bytes], data: Sequence[Shards]
    ) -> list[Outcome]:
        forms, packed = self._packed(data, on)
        self._forget_others(keys, forms)
        outcomes: list[Outcome] = [False] * len(keys)
        for form in _FORMS:
            which = [i for i, one in enumerate(forms) if one is form]
            if not which:
                continue
            names, some = _names(form, [keys[i] for i in which]), [packed[i] for i in which]
            held = self._writes.timed(
                partial(self._tier.store_for, tenant, names, some), partial(_moved, some)
            )
            for i, one in zip(which, held, strict=True):
                outcomes[i] = one
                self._saw([keys[i]], form if one else None)
        return outcomes

    def _forget_others(self, keys: Sequence[bytes], forms: Sequence[Form]) -> None:
        """Delete the records of these keys that are in the store in another form. Before the new
        ones are stored: of two forms of a record nobody could tell the newer one."""
        with self._lock:
            seen = [self._seen.get(key) for key in keys]
        other = {Form.PLAIN: Form.COMPRESSED, Form.COMPRESSED: Form.PLAIN}
        self_same = [was in (form, Form.ABSENT) for was, form in zip(seen, forms, strict=True)]
        names = [
            name
            for key, form, same in zip(keys, forms, self_same, strict=True)
            if not same
            for name in _names(other[form], [key])
        ]
        if names:
            with suppress(ItemRefused):  # it may delete nothing: equal keys mean equal bytes anyway
                self._tier.delete(names)

    def _packed(self, data: Sequence[Shards], on: bool) -> tuple[list[Form], list[Shards]]:
        """Compress what is worth it, if ``on``. Returns the form of each record, and its data."""
        rooms = self._memory.rooms(data) if on else []
        forms, packed = [Form.PLAIN] * len(data), [*data]
        for i, room in enumerate(rooms):
            shards = data[i]
            coding = self._codings.of(shards) if size_of(shards) >= LEAST_BYTES else None
            if coding is None:
                continue
            size = self._encodes.timed(
                partial(encode, shards, coding, room[: _most(shards)]),
                partial(_whole, size_of(shards)),
            )
            if not size:
                self._codings.failed(shards)
                continue
            end = align_up(size) if size >= _PADDED_BYTES else size
            room[size:end] = 0
            forms[i], packed[i] = Form.COMPRESSED, Varying([room[:end]])
        self._count(data, packed, on)
        return forms, packed

    def _count(self, data: Sequence[Shards], packed: Sequence[Shards], on: bool) -> None:
        with self._lock:
            for shards, made in zip(data, packed, strict=True) if on else ():
                if made is shards:
                    self._kept_plain += 1
                else:
                    self._records += 1
                    self._from_bytes += size_of(shards)
                    self._to_bytes += size_of(made)

    def _load_some(
        self, form: Form, keys: Sequence[bytes], into: Sequence[Shards]
    ) -> list[Outcome]:
        names, rooms = _names(form, keys), list(into)
        if form is Form.COMPRESSED:
            rooms = [Varying([room]) for room in self._memory.rooms(into)]
        part = self._part() if form is Form.COMPRESSED else 1.0
        held = self._reads.timed(
            partial(self._tier.load, names, rooms), lambda held: int(part * _moved(into, held))
        )
        if form is Form.PLAIN:
            return [*held]
        return [
            one and self._decoded(room[0], shards)
            for one, room, shards in zip(held, rooms, into, strict=True)
        ]

    def _part(self) -> float:
        """Return which part of their size compressed records take, as far as it is known."""
        with self._lock:
            return self._to_bytes / self._from_bytes if self._from_bytes else _USUAL

    def _decoded(self, room: Buffer, into: Shards) -> Outcome:
        whole = size_of(into)
        why = self._decodes.timed(partial(decode, room, into), lambda why: 0 if why else whole)
        if why and why != OTHER_LENGTHS:
            return ItemUnreadable(f"{self.name}: a compressed record: {why}")
        return not why

    # ------------------------------------------------------------ whether it is worth it

    def _compressing(self) -> bool:
        """Whether records are to be compressed now."""
        if self._mode == "auto" and not self._never:
            write, read = self._writes.value(), self._reads.value()
            if write is not None or read is not None:
                self._on = self._is_slow(write, read)
        return self._on

    def _is_slow(self, write: float | None, read: float | None) -> bool:
        """Whether the store takes, and gives, less than a core compresses and decompresses."""
        with self._trying:
            if not self._on and (now := time.monotonic()) >= self._try_at:
                self._try_at = now + _TRY_AGAIN_S
                self._encodes, self._decodes = Rate(each=True), Rate(each=True)
            if self._encodes.value() is None or self._decodes.value() is None:
                try_a_core(self._encodes, self._decodes)
            encode_, decode_ = self._encodes.value(), self._decodes.value()
        part = 1.0 if self._on else _CLEARLY
        assert encode_ is not None
        assert decode_ is not None
        writes_slowly = self._remote if write is None else write < part * encode_
        return writes_slowly and (read is None or read < part * decode_)

    def _words(self) -> str:
        """Whether records are compressed, and why. The caller holds the lock."""
        if self._mode == "lossless":
            return "on"
        if self._never:
            return "off: the store is in memory over RDMA"
        rates = [
            f"{what} {rate / 1e9:.2f} GB/s"
            for what, rate in (
                ("the store takes", self._writes.value()),
                ("gives", self._reads.value()),
                ("a core compresses", self._encodes.value()),
                ("decompresses", self._decodes.value()),
            )
            if rate is not None
        ]
        return f"{'on' if self._on else 'off'}: {', '.join(rates) or 'nothing was measured yet'}"


_FORMS: Final = (Form.COMPRESSED, Form.PLAIN)


def _names(form: Form, keys: Sequence[bytes]) -> list[bytes]:
    """Return the names of records in this form. That of a plain one is its key."""
    if form is Form.PLAIN:
        return list(keys)
    return [hashlib.blake2b(key, digest_size=32, person=_PERSON).digest() for key in keys]


def _most(shards: Shards) -> int:
    """Return the most bytes that these may have when they are compressed."""
    return int(codings.WORTH * size_of(shards))


def _moved(data: Sequence[Shards], held: Sequence[bool]) -> int:
    """Return the bytes of those that are held."""
    return sum(size_of(shards) for shards, one in zip(data, held, strict=True) if one)


def _whole(size: int, made: int) -> int:
    return size if made else 0


def _is_down(outcome: Outcome) -> bool:
    return isinstance(outcome, TierDown) and not isinstance(outcome, ItemRefused)


def try_a_core(encodes: Rate, decodes: Rate) -> float:
    """Measure how fast this processor compresses and decompresses values of a normal distribution
    in bfloat16. Returns to which part of their size."""
    values = np.random.default_rng(0).standard_normal(_TRIED_BYTES // 2, np.float32)
    plain = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    coding, _ = best_coding([plain])
    room, back = np.empty(_TRIED_BYTES, np.uint8), np.empty(_TRIED_BYTES, np.uint8)
    size = 0
    while encodes.value() is None or decodes.value() is None:
        size = encodes.timed(partial(encode, [plain], coding, room), lambda _: len(plain))
        decodes.timed(partial(decode, room[:size], [back]), lambda _: len(plain))
    return size / len(plain)


def open_compressed(
    open_: Callable[[], RecordTier | EncryptedTier], mode: Mode, **how: bool
) -> CompressedTier:
    """Open a tier, and compress what it keeps. Raises what ``open_`` raises."""
    return CompressedTier(open_(), mode, **how)
