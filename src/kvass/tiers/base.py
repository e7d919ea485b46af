"""What a tier promises and what it may rely on.

Law of this file: a tier is a plain, blocking, batched, thread-safe store of *records*: some bytes,
in shards, under a key. It knows no namespace, no lease, no arena and no daemon. What it gives back
is what was stored, whole, or a miss: never another record's bytes, never half of one.

**Keys** are opaque, 1 to ``MAX_KEY_BYTES`` long. They cover all that changes the bytes
(``codec.record_key``), so equal keys mean equal bytes, and daemons may share a tier.

**Memory.** A record's data is a list of one-dimensional, C-contiguous uint8 arrays, one per shard,
at most ``MAX_SHARDS``, each possibly empty. The *caller* owns them: it keeps them alive and leaves
them alone until the call returns, and no call of the tier touches them afterwards. Devices can read
and write buffers directly that begin at a multiple of ``PAGE`` and are as long as one (slots of the
arena are); a tier has to accept all others too, if slower.

**Notes** are the few small facts that have to outlive records: each namespace's epoch. Nobody
evicts them, they do not expire, and ``clear`` leaves them. A lost one costs records and makes
nothing wrong: whoever finds none begins a new epoch, that no record has.

**Answers.** One bool per key, in the order asked. What is wrong with one record is a value: absent,
of other lengths than asked for, damaged, no room, an error of the device: ``False``, and the batch
goes on. ``TierDown`` is raised only when trouble of the tier's own (not absence) left a batch
without a single success; the caller may then leave the tier alone for a while. Misuse (wrong types,
keys too long, a closed tier) raises ``UsageError``.

**Threads.** Every method may be called from several threads at once. A tier may use threads of its
own, but bounds them. A call blocks for as long as its device does.

**Process.** In a daemon a tier has a process of its own, with the daemon's stderr, and stdout
nowhere. It may be killed at any moment without ``close`` and is opened anew; what it keeps in
memory is lost then, notes too. It may start processes of its own, but what it *forks* has neither
the buffers it was given nor any part in it.
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
"""One record's data, or where it shall go."""


@runtime_checkable
class Tier(Protocol):
    """A backend for records. See the top of this file for what holds of every method."""

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are held, as far as the tier knows now: a load may still miss. Cheap enough
        to be asked about every chunk of a long prompt."""

    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        """Fill ``into[i]`` with the record of ``keys[i]``. ``True``: every byte of every buffer is
        what one ``store`` of this key was given.

        A record whose shards have other lengths than the buffers is a miss. After ``False`` the
        buffers' contents are undefined. A key may occur twice. A record that turns out damaged is
        forgotten, so that it can be stored again.
        """

    def store(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """Keep ``data[i]`` under ``keys[i]``; which of them are held now.

        The last store of a key wins, of a batch too, and a load that runs meanwhile gets the old
        record or the new one whole, or a miss. A tier that is full makes room by itself, least
        recently used first; after ``False`` what the key had before is kept or gone. Held is not
        durable: a crash of the machine may lose any record, but never turns one into other bytes.
        """

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget these records; absent keys are fine. A load that began earlier may still succeed.
        What was deleted before a process ended stays deleted; after a power loss it may be back."""

    def clear(self) -> None:
        """Forget every record, and give the space back (``kvass clear --tier``). Notes stay."""

    def note(self, name: str) -> bytes | None:
        """The note of that name; ``None``: there is none. Raises ``TierDown`` if it cannot tell."""

    def set_note(self, name: str, value: bytes) -> None:
        """Keep a note, instead of what it said before. Returns once it is as durable as the tier
        can make it; ``TierDown``: it may not be kept."""

    def close(self) -> None:
        """Wait for the calls that run, then let go of everything; records stay. Idempotent. Any
        other call from here on raises ``UsageError``."""


@runtime_checkable
class DividedTier(Protocol):
    """What a ``Tier`` has as well whose capacity tenants can have quotas of."""

    def store_for(self, tenant: str, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """``store`` of records that ``tenant`` pays for. Everybody finds them."""


_NOTE_NAME: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")


def check_note(name: str, value: bytes = b"") -> None:
    """Raise ``UsageError`` for a note that no tier can be asked to keep."""
    if not _NOTE_NAME.fullmatch(name):
        raise UsageError(f"a note's name is 1 to 128 of 0-9 A-Z a-z . _ -: {name!r:.150}")
    if len(value) > MAX_NOTE_BYTES:
        raise UsageError(f"a note is at most {MAX_NOTE_BYTES} bytes, not {len(value)}")


def check_batch(keys: Sequence[bytes], data: Sequence[Shards] | None = None) -> None:
    """Raise ``UsageError`` for a batch that no tier can be asked to serve."""
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
