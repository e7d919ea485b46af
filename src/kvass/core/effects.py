"""What goes into ``CacheMachine.step`` and what comes out of it.

Plain values. An event says what happened; an effect says what the daemon must do. The result of an
effect, where it has one, is a later event. What goes to a tier or comes from it is tagged, because
it travels to and from the tier's process.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvass.errors import ErrorCode
from kvass.messages import FromClient, FromDaemon
from kvass.types import DEFAULT_TENANT, Quota, Slots, U64Array

SessionId = int
"""Chosen by the daemon, never reused in one boot."""


# ---------------------------------------------------------------- events


class Opened(msgspec.Struct, frozen=True):
    """A peer of user ``uid`` connected. ``own``: it is the daemon's user, or root. ``refusal``: why
    it may not connect; empty: it may."""

    session: SessionId
    uid: int = 0
    own: bool = False
    refusal: str = ""
    pid: int = 0


class Received(msgspec.Struct, frozen=True):
    """One decoded message of a session."""

    session: SessionId
    message: FromClient


class Faulted(msgspec.Struct, frozen=True):
    """Bytes of a session that are no message. Its stream cannot be trusted any more (law 11)."""

    session: SessionId
    code: ErrorCode
    text: str


class Lost(msgspec.Struct, frozen=True):
    """EOF: the peer starts no more writes. Writes that its device has begun may still go on.

    ``exiting``: its process was seen to be exiting. Its end is told, if it is watched (``Watch``).
    """

    session: SessionId
    exiting: bool = False


class ProcessEnded(msgspec.Struct, frozen=True):
    """The process behind a lost session has ended, and the kernel has released its files."""

    session: SessionId


class PopulatedTo(msgspec.Struct, frozen=True):
    """The arena's first ``bytes`` are faulted in."""

    bytes: int


class Tick(msgspec.Struct, frozen=True):
    """Time passed: do what is due."""


class QuotasAre(msgspec.Struct, frozen=True):
    """These are all quotas from now on. Nothing changes if they cannot be (``Tenants.replace``)."""

    quotas: tuple[Quota, ...]


class TiersAre(msgspec.Struct, frozen=True):
    """These tiers are used from now on, in this order. A number that is new is the next one; that
    of a removed tier comes back with the same name and only when it owes no answer. ``renewed``: of
    a tier that stays, whose store may be another one or may have changed."""

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    renewed: tuple[int, ...] = ()


class Stopping(msgspec.Struct, frozen=True):
    """The daemon was told to stop: what is queued for tiers is flushed, and nothing new."""


# A tier's answers. Each ends the operation ``op``, once; they come in any order. ``held`` and
# ``which``: bool, one per record.


class Probed(msgspec.Struct, frozen=True, tag=True):
    """The end of a ``TierProbe``: which records it holds, all batches in a row."""

    op: int
    held: npt.NDArray[np.bool_]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The end of a ``TierLoad``: nobody writes to its slots any more; ``which`` are right."""

    op: int
    which: npt.NDArray[np.bool_]


class Stored(msgspec.Struct, frozen=True, tag=True):
    """The end of a ``TierStore``: nobody reads its slots any more; ``which`` are held now.

    ``down``: the tier was not asked, or it is down, which says nothing about these records.
    """

    op: int
    which: npt.NDArray[np.bool_]
    down: bool = False


class EpochIs(msgspec.Struct, frozen=True, tag=True):
    """The end of a ``TierEpoch``; None: the tier could not tell, or not keep it."""

    op: int
    epoch: int | None


class Emptied(msgspec.Struct, frozen=True, tag=True):
    """The end of a ``TierClear``."""

    op: int
    done: bool


class TierReport(msgspec.Struct, frozen=True, tag=True):
    """How a tier is: JSON-able fields for ``kvass status``. No operation's end."""

    tier: int
    fields: dict[str, Any]


FromTier = Probed | Loaded | Stored | EpochIs | Emptied
FromSession = Opened | Received | Faulted | Lost | ProcessEnded
Told = QuotasAre | TiersAre | Stopping
Event = FromSession | PopulatedTo | Told | Tick | TierReport | FromTier


# ---------------------------------------------------------------- effects


class Send(msgspec.Struct, frozen=True):
    """Send ``message``; with ``with_arena`` the arena's descriptor rides on its frame."""

    session: SessionId
    message: FromDaemon
    with_arena: bool = False


class Close(msgspec.Struct, frozen=True):
    """Close the session after what was sent to it: it owes nothing. ``Lost`` need not follow."""

    session: SessionId


class HalfClose(msgspec.Struct, frozen=True):
    """Shut down our sending side, drop whatever still arrives, and wait for EOF (then ``Lost``):
    the session may still write to slots that it was granted (law 3)."""

    session: SessionId


class Watch(msgspec.Struct, frozen=True):
    """A lost session owed commits: if its process ends before ``until``, say ``ProcessEnded``.

    ``until``: CLOCK_MONOTONIC, seconds; infinity for a process that is exiting.
    """

    session: SessionId
    until: float


class Records(msgspec.Struct, frozen=True):
    """Records of one row class in a tier: what ``tiers.codec.record_key`` is made of.

    ``keys``: uint64, shape ``(n, 4)``: chunk hashes, filled up with zeros to 32 bytes.
    """

    namespace: bytes
    epoch: int
    group: int
    keys: U64Array


class TierProbe(msgspec.Struct, frozen=True, tag=True):
    """Ask tier number ``tier`` which of these records it holds; ``Probed`` is its end."""

    tier: int
    op: int
    batches: tuple[Records, ...]


class TierLoad(msgspec.Struct, frozen=True, tag=True):
    """Have the tier fill ``slots``, one per record, each of shards of ``shard_bytes``. They are
    nobody else's until ``Loaded``."""

    tier: int
    op: int
    records: Records
    slots: Slots
    shard_bytes: tuple[int, ...]


class TierStore(msgspec.Struct, frozen=True, tag=True):
    """Have the tier keep what is in ``slots``, which do not change until ``Stored``. ``tenant``
    pays for them."""

    tier: int
    op: int
    records: Records
    slots: Slots
    shard_bytes: tuple[int, ...]
    tenant: str = DEFAULT_TENANT


class TierEpoch(msgspec.Struct, frozen=True, tag=True):
    """Ask for the namespace's epoch in a tier; ``EpochIs`` is its end.

    ``core.epochs.to_note`` says what is to be noted there. ``known``: the highest epoch that was
    seen there before, 0 if none was. ``fresh``: random bits for a fresh one, which ``renew`` asks
    for.
    """

    tier: int
    op: int
    namespace: bytes
    fresh: int
    renew: bool = False
    known: int = 0


class TierClear(msgspec.Struct, frozen=True, tag=True):
    """Have the tier forget every record, of all namespaces; ``Emptied`` is its end."""

    tier: int
    op: int


ToSession = Send | Close | HalfClose
ToTier = TierProbe | TierLoad | TierStore | TierEpoch | TierClear
Effect = ToSession | Watch | ToTier
