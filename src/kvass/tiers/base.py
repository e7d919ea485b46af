"""The protocol of a tier: what it must promise, and what it may rely on.

Law of this file: a tier is a plain, blocking, batched, thread-safe store of *records*: some bytes,
in shards, under a key. It knows no namespace, no lease, no arena and no daemon. A load returns a
whole record as it was stored, or a miss. It never returns bytes of another record, or a part of
one.

**Keys** are opaque, 1 to ``MAX_KEY_BYTES`` long. They cover all that changes the bytes
(``codec.record_key``), so equal keys mean equal bytes, and daemons may share a tier.

**Memory.** A record's data is a list of one-dimensional, C-contiguous uint8 arrays, one per shard,
at most ``MAX_SHARDS``, each possibly empty. The *caller* owns them. Until the call returns it keeps
them alive and does not change them. The tier does not access them after the call. A device can
access a buffer directly if address and length are multiples of ``PAGE``, as those of arena slots
are. A tier must also accept other buffers, but may be slower with them.

**Notes** are a few small values that must outlive the records: the epoch of each namespace, which
is part of every record's key. They are not evicted, do not expire, and ``clear`` keeps them. If a
note is lost, records are lost but none becomes wrong: a daemon that finds no note begins a new
epoch, and no record has that epoch in its key.

**Results.** One bool per key, in the order of the keys. If one record is absent, has other lengths
than the buffers, is damaged, does not fit, is refused by the store, or has an I/O error, its result
is ``False``, and the batch goes on. ``TierDown`` is raised only if no record of the batch succeeded
and at least one failed because of the tier itself. The caller may then send no requests for a
while. A store that refuses one record, a note or a clear may be well: the tier asks for something
else before it says that it is down, or raises ``ItemRefused`` for a note or a clear. Misuse (wrong
types, keys that are too long, a closed tier) raises ``UsageError``.

**Threads.** Every method may be called from several threads at once. A tier may use threads of its
own, but bounds their number. A call blocks until its device is done.

**Process.** In a daemon each tier runs in its own process. Its stderr is the daemon's; its stdout
is discarded. The process may be killed at any moment without ``close``; the tier is then opened
again in a new one. What it kept in memory alone, notes included, is then lost. A tier may start
processes. One that it *forks* cannot access the arena, and is killed when the tier's process ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvass.errors import UsageError
from kvass.types import MAX_RANKS

MAX_KEY_BYTES: Final = 256
MAX_SHARDS: Final = MAX_RANKS
MAX_NOTE_BYTES: Final = 4096

Buffer: TypeAlias = npt.NDArray[np.uint8]
"""One shard's bytes: uint8, shape ``(n,)``, C-contiguous."""

Shards: TypeAlias = Sequence[Buffer]
"""One record's data: the source of a store, or the destination of a load."""


class Varying(list[Buffer]):
    """The data of a record whose one shard has another length than those of its kind. A tier that
    keeps records of equal size may waste a thirtieth of its room. A load fills the beginning of the
    buffer with a record of one shard that is not longer."""


def taking(lengths: Sequence[int], into: Shards) -> Shards | None:
    """Return the buffers for a record with shards of these lengths. None if ``into`` is for
    others."""
    if isinstance(into, Varying) and len(lengths) == 1 and lengths[0] <= len(into[0]):
        return [into[0][: lengths[0]]]
    return into if tuple(lengths) == tuple(map(len, into)) else None


@runtime_checkable
class Tier(Protocol):
    """A store of records. The top of this file says what holds for every method."""

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the tier holds it, as far as it knows now. A load may still
        miss. A probe must be cheap: it is called with every chunk of a long prompt."""

    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        """Fill ``into[i]`` with the record of ``keys[i]``. ``True``: the buffers hold the complete
        record of one single ``store`` of this key.

        A record whose shards have other lengths than the buffers is a miss. After ``False`` the
        buffers' contents are undefined. A key may occur twice. A damaged record is deleted, so that
        it can be stored again.
        """

    def store(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """Store ``data[i]`` under ``keys[i]``. Returns for each key whether it is held now.

        The last store of a key wins, also within one batch. A load at the same time gets the whole
        old record, the whole new one, or a miss. A full tier evicts the least recently used records
        by itself. After ``False`` the key's old record may be kept or gone. A record that is held
        need not be durable: a crash of the machine may lose it, but must not change its bytes.
        """

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete these records. Absent keys are ignored. A load that began earlier may still
        succeed. A deleted record stays deleted if the process ends; after a power loss it may be
        back."""

    def clear(self) -> None:
        """Delete all records, and free their space (``kvass clear --tier``). Notes stay."""

    def note(self, name: str) -> bytes | None:
        """Return the note of that name, or ``None`` if there is none. Raises ``TierDown`` if the
        tier cannot be read."""

    def set_note(self, name: str, value: bytes) -> None:
        """Set a note, or replace its value. Returns once the note is as durable as the tier can
        make it. Raises ``TierDown`` if the note may not have been stored."""

    def close(self) -> None:
        """Wait for running calls, then release all resources. Records stay. Idempotent. Any later
        call of another method raises ``UsageError``."""


@runtime_checkable
class DividedTier(Protocol):
    """The additional method of a ``Tier`` that tells the records of tenants apart: by quotas, or by
    keys of encryption."""

    def store_for(self, tenant: str, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """Store records as ``store`` does. They count against the quota of ``tenant``, if the
        tier has quotas. Lookups of all tenants find them."""


@runtime_checkable
class ProvingTier(Protocol):
    """The additional method of a ``Tier`` whose store is elsewhere, where others may answer."""

    def check_store(self, whole: bool) -> bool:
        """Raise ``TierDown`` unless what answers is proven to be the store, by what it keeps.
        ``whole``: also write to it, if that is allowed. Otherwise this is one small request.
        Returns whether it was written to."""


_NOTE_NAME: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")


def check_note(name: str, value: bytes = b"") -> None:
    """Check a note's name and value. Raises ``UsageError`` if one is invalid."""
    if not _NOTE_NAME.fullmatch(name):
        raise UsageError(f"a note's name is 1 to 128 of 0-9 A-Z a-z . _ -: {name!r:.150}")
    if len(value) > MAX_NOTE_BYTES:
        raise UsageError(f"a note is at most {MAX_NOTE_BYTES} bytes, not {len(value)}")


def check_batch(keys: Sequence[bytes], data: Sequence[Shards] | None = None) -> None:
    """Check the keys and buffers of a batch. Raises ``UsageError`` if one is invalid."""
    for key in keys:
        if not isinstance(key, bytes) or not 1 <= len(key) <= MAX_KEY_BYTES:
            raise UsageError(f"a key is 1 to {MAX_KEY_BYTES} bytes: {key!r:.80}")
    if data is None:
        return
    if len(data) != len(keys):
        raise UsageError(f"{len(keys)} keys, but data for {len(data)}: one list of shards each")
    for shards in data:
        if len(shards) > MAX_SHARDS:
            raise UsageError(f"a record has at most {MAX_SHARDS} shards, not {len(shards)}")
        for s in shards:
            if s.dtype != np.uint8 or s.ndim != 1 or not s.flags.c_contiguous:
                raise UsageError("a shard is a C-contiguous uint8 array of one dimension")
