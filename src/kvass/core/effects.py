"""The events that go into ``CacheMachine.step``, and the effects that come out of it.

Both are plain values. An event says what happened. An effect says what the daemon must do. If an
effect has a result, it is a later event. The effects and events of a tier are tagged structs,
because they are encoded for the tier's process.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvass.errors import ErrorCode
from kvass.messages import FromClient, FromDaemon
from kvass.types import DEFAULT_TENANT, Quota, Slots, U64Array

ConnectionId = int
"""Chosen by the daemon, never reused in one boot."""
_WRITTEN: Final = {"connection": "session"}
"""The name that the lines of events have for a field (``event_lines``)."""


# ---------------------------------------------------------------- events


class Opened(msgspec.Struct, frozen=True, rename=_WRITTEN):
    """A peer of user ``uid`` connected. ``own``: ``uid`` is the daemon's user, or root.
    ``refusal``: why the peer may not connect; empty if it may. ``start``: the start time of its
    process, field 22 of /proc/PID/stat; 0 if unknown."""

    connection: ConnectionId
    uid: int = 0
    own: bool = False
    refusal: str = ""
    pid: int = 0
    start: int = 0


class Received(msgspec.Struct, frozen=True, rename=_WRITTEN):
    connection: ConnectionId
    message: FromClient


class Faulted(msgspec.Struct, frozen=True, rename=_WRITTEN):
    """A connection sent bytes that are no message. The rest of its stream is not read (law 11)."""

    connection: ConnectionId
    code: ErrorCode
    text: str


class Lost(msgspec.Struct, frozen=True, rename=_WRITTEN):
    """A connection ended (EOF). The peer starts no more writes, but its device may still write.

    ``exiting``: its process is exiting. If it is watched (``Watch``), ``ProcessEnded`` follows.
    """

    connection: ConnectionId
    exiting: bool = False


class ProcessEnded(msgspec.Struct, frozen=True, rename=_WRITTEN):
    """The process of a lost connection ended, and the kernel has released its files."""

    connection: ConnectionId


class FormerEnded(msgspec.Struct, frozen=True):
    """A worker of a former life of the daemon, ``FormerProcess`` number ``number``, has ended."""

    number: int


class PopulatedTo(msgspec.Struct, frozen=True):
    """The first ``bytes`` bytes of the arena are populated (faulted in)."""

    bytes: int


class Tick(msgspec.Struct, frozen=True):
    """Time passed. The core does what is due."""


class QuotasAre(msgspec.Struct, frozen=True):
    """Replace all quotas. Nothing changes if the new ones cannot be set (``Tenants.replace``)."""

    quotas: tuple[Quota, ...]


class TiersAre(msgspec.Struct, frozen=True):
    """Replace the list of tiers, in the order in which lookups ask them.

    A new tier has the next number, or that of a removed tier of that name without open operations.
    ``renewed``: the numbers of tiers that stay, but whose store may have been replaced or changed.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    renewed: tuple[int, ...] = ()


class Stopping(msgspec.Struct, frozen=True):
    """The daemon will stop: rows that are queued for tiers are flushed, and no others are
    queued. If its memory has a place, nothing more is granted."""


class FromTier(msgspec.Struct, frozen=True, tag=True):
    """The answer of a tier, which ends the operation ``op``. Answers come in any order. ``held``
    and ``which`` have one bool per record."""

    op: int


class Probed(FromTier, frozen=True):
    """The end of a ``TierProbe``. ``held``: which records the tier has, all batches
    concatenated."""

    held: npt.NDArray[np.bool_]


class Loaded(FromTier, frozen=True):
    """The end of a ``TierLoad``: the tier no longer writes to the slots. ``which``: the records
    that it loaded."""

    which: npt.NDArray[np.bool_]


class Stored(FromTier, frozen=True):
    """The end of a ``TierStore``: the tier no longer reads the slots. ``which``: the records that
    it stored.

    ``down``: the tier is down or was not asked, so the records may be stored later.
    """

    which: npt.NDArray[np.bool_]
    down: bool = False


class EpochIs(FromTier, frozen=True):
    """The end of a ``TierEpoch``. ``epoch``: the epoch that the tier has noted now; ``None``: it
    could not read or write its note."""

    epoch: int | None


class Emptied(FromTier, frozen=True):
    """The end of a ``TierClear``. ``done``: whether it succeeded. ``why``: why not, if known."""

    done: bool
    why: str = ""


class TierReport(msgspec.Struct, frozen=True, tag=True):
    """The state of a tier: JSON-able fields for ``kvass status``. It ends no operation."""

    tier: int
    fields: dict[str, Any]


FromConnection = Opened | Received | Faulted | Lost | ProcessEnded | FormerEnded
Instruction = QuotasAre | TiersAre | Stopping
Event = FromConnection | PopulatedTo | Instruction | Tick | TierReport | FromTier


# ---------------------------------------------------------------- effects


class Send(msgspec.Struct, frozen=True):
    """Send ``message``. ``with_arena``: its frame carries the file descriptor of the arena."""

    connection: ConnectionId
    message: FromDaemon
    with_arena: bool = False


class Close(msgspec.Struct, frozen=True):
    """Close a connection that owes nothing, after all messages to it were sent. The daemon need not
    report ``Lost``."""

    connection: ConnectionId


class HalfClose(msgspec.Struct, frozen=True):
    """Shut down the daemon's sending side, drop what still arrives, and report EOF as ``Lost``.

    The connection may still write to slots that it was granted (law 3).
    """

    connection: ConnectionId


class Watch(msgspec.Struct, frozen=True):
    """Watch the process of a lost connection that owed commits. Report the end of the process as
    ``ProcessEnded``.

    ``until``: the watch ends at this CLOCK_MONOTONIC second; infinity if the process is exiting.
    """

    connection: ConnectionId
    until: float


class Records(msgspec.Struct, frozen=True):
    """Records of one row class in a tier: the fields of ``tiers.codec.record_key``.

    ``keys``: chunk hashes, padded with zeros to 32 bytes: uint64, shape ``(n, 4)``.
    """

    namespace: bytes
    epoch: int
    group: int
    keys: U64Array


class ToTier(msgspec.Struct, frozen=True, tag=True):
    """An operation that tier number ``tier`` is asked for. ``ENDS`` has the event that ends it."""

    tier: int
    op: int

    def failed(self) -> FromTier:
        """Its end if it failed, or was not passed to the tier."""
        raise NotImplementedError


class TierProbe(ToTier, frozen=True):
    """Ask a tier which of these records it has."""

    batches: tuple[Records, ...]

    def failed(self) -> Probed:
        return Probed(self.op, _none(*self.batches))


class TierLoad(ToTier, frozen=True):
    """Have the tier load each record into one of ``slots``, which have shards of ``shard_bytes``.
    Until it ends nobody else uses the slots."""

    records: Records
    slots: Slots
    shard_bytes: tuple[int, ...]

    def failed(self) -> Loaded:
        return Loaded(self.op, _none(self.records))


class TierStore(ToTier, frozen=True):
    """Have the tier store each of ``slots`` as a record. Until it ends the slots do not change.
    ``tenant`` pays for the rows."""

    records: Records
    slots: Slots
    shard_bytes: tuple[int, ...]
    tenant: str = DEFAULT_TENANT

    def failed(self) -> Stored:
        return Stored(self.op, _none(self.records), down=True)


class TierEpoch(ToTier, frozen=True):
    """Have a tier note a namespace's epoch, and ask for that epoch.

    ``core.tiers.epochs.to_note`` computes the epoch. ``renew``: it must be a fresh one. ``fresh``:
    the random bits of a fresh epoch. ``known``: the highest epoch that the daemon has seen in that
    tier; 0: none.
    """

    namespace: bytes
    fresh: int
    renew: bool = False
    known: int = 0

    def failed(self) -> EpochIs:
        return EpochIs(self.op, None)


class TierClear(ToTier, frozen=True):
    """Have the tier delete every record of all namespaces."""

    def failed(self) -> Emptied:
        return Emptied(self.op, False)


def _none(*batches: Records) -> npt.NDArray[np.bool_]:
    return np.zeros(sum(len(records.keys) for records in batches), np.bool_)


ENDS: Final[dict[type[ToTier], type[FromTier]]] = {
    TierProbe: Probed,
    TierLoad: Loaded,
    TierStore: Stored,
    TierEpoch: EpochIs,
    TierClear: Emptied,
}
"""All operations of tiers, and the event that ends each. ``daemon/tier_process/operations.py`` has
how each is carried out."""


ToConnection = Send | Close | HalfClose
Effect = ToConnection | Watch | ToTier
