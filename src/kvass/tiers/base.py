"""What a tier promises and what it may rely on.

Law of this file: a tier is a plain, blocking, batched, thread-safe store of *records*: some bytes,
in shards, under a key. It knows no namespace, no lease, no arena and no daemon. A load returns the
whole record as it was stored, or a miss: never another record's bytes, never half of one.

**Keys** are opaque, 1 to ``MAX_KEY_BYTES`` long. They cover all that changes the bytes
(``codec.record_key``), so equal keys mean equal bytes, and daemons may share a tier.

**Memory.** A record's data is a list of one-dimensional, C-contiguous uint8 arrays, one per shard,
at most ``MAX_SHARDS``, each possibly empty. The *caller* owns them: it keeps them alive and leaves
them alone until the call returns, and no call of the tier touches them afterwards. Devices can read
and write buffers directly that begin at a multiple of ``PAGE`` and are as long as one (slots of the
arena are); a tier has to accept all others too, if slower.

**Notes** are small values that outlive records: the epoch of each namespace. They are not evicted,
do not expire, and are kept by ``clear``. If a note is lost, records are lost, but none becomes
wrong: a daemon that finds no note begins a new epoch, which no record has.

**Answers.** A call returns one bool per key, in the order of the keys. ``False`` means that this
record failed: it is absent or damaged, has other lengths than the buffers, found no room, or the
device had an error. The rest of the batch goes on. ``TierDown`` is raised only if no record of the
batch succeeded, and a failure other than absence was among the reasons. The caller may then not use
the tier for a while. Misuse (wrong types, keys too long, a closed tier) raises ``UsageError``.

**Threads.** Every method may be called from several threads at once. A tier may use threads of its
own, but a bounded number. A call blocks for as long as its device does.

**Process.** In a daemon each tier has its own process. Its stderr is the daemon's; its stdout is
discarded. The process may be killed at any moment without ``close``; then the tier is opened again,
and has lost what it kept in memory, notes too. A tier may start processes, but a process that it
*forks* has no access to the buffers, and takes no part in serving the tier.
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
"""The data of one record, or the buffers to load it into."""


@runtime_checkable
class Tier(Protocol):
    """A backend for records. See the top of this file for what holds of every method."""

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the tier holds each key, as far as it knows now; a later load may still miss. It
        is cheap enough to be called for every chunk of a long prompt."""

    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        """Fill ``into[i]`` with the record of ``keys[i]``. ``True`` means that every byte is as one
        ``store`` of this key wrote it.

        A record whose shards have other lengths than the buffers is a miss. After ``False`` the
        contents of the buffers are undefined. A key may occur twice. A damaged record is deleted,
        so that it can be stored again.
        """

    def store(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """Store ``data[i]`` under ``keys[i]``. Returns which of the records the tier holds now.

        The last store of a key wins, also within a batch. A load during a store gets the whole old
        record, the whole new one, or a miss. A full tier evicts the least recently used records.
        After ``False`` the old record of the key is either kept or gone. A stored record need not
        be durable: a crash of the machine may lose it, but never changes its bytes.
        """

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete these records; absent keys are no error. A load that began earlier may still
        succeed. After a power loss, but not after the end of a process, deleted records may be
        back."""

    def clear(self) -> None:
        """Delete all records, and free their space (``kvass clear --tier``). Notes stay."""

    def note(self, name: str) -> bytes | None:
        """The note of that name; ``None`` if there is none. Raises ``TierDown`` if it cannot be
        read."""

    def set_note(self, name: str, value: bytes) -> None:
        """Store a note, in place of its old value. Returns once it is as durable as the tier can
        make it. Raises ``TierDown`` if it may not have been stored."""

    def close(self) -> None:
        """Wait for running calls, then release all resources; records stay. Idempotent. Any other
        call after this one raises ``UsageError``."""


@runtime_checkable
class DividedTier(Protocol):
    """The additional method of a ``Tier`` whose capacity can be divided among tenants."""

    def store_for(self, tenant: str, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """Like ``store``, but the records count towards the quota of ``tenant``. Loads of all
        tenants find them."""


_NOTE_NAME: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")


def check_note(name: str, value: bytes = b"") -> None:
    """Raise ``UsageError`` for a note that no tier accepts."""
    if not _NOTE_NAME.fullmatch(name):
        raise UsageError(f"a note's name is 1 to 128 of 0-9 A-Z a-z . _ -: {name!r:.150}")
    if len(value) > MAX_NOTE_BYTES:
        raise UsageError(f"a note is at most {MAX_NOTE_BYTES} bytes, not {len(value)}")


def check_batch(keys: Sequence[bytes], data: Sequence[Shards] | None = None) -> None:
    """Raise ``UsageError`` for a batch that no tier accepts."""
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
