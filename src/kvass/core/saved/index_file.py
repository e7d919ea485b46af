"""The memory in which the index of L1 outlives the daemon, and what may be read of it.

Law of this file: memory of another version, machine boot or size is never believed. ``open`` says
why it is not, and the daemon then starts with new memory for rows and index alike, because a worker
of a former life may still write to the old rows (law 3).

The memory has a header, the table of processes, the directory's log, the serials of extent sets,
and a record per row (``rows/row_table.py``), as many as the arena could have. It is sparse: only
parts that ``allocate`` was asked for are touched.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

import msgspec
import numpy as np

from kvass.core.saved.directory import MOST_COUNT, Allocate, Bytes, Directory, Entry
from kvass.core.saved.processes import PLACES, PROCESS, FormerProcess, Processes
from kvass.types import PAGE, I64Array, U64Array, align_up

__all__ = ["Allocate", "FormerProcess", "SavedIndex", "Unusable", "Where", "index_bytes"]

VERSION: Final = 2
"""Raised when anything in the memory gets another meaning."""
RECORD: Final = 64
"""The bytes of a row's record."""
MOST_SETS: Final = 1 << 20
_MAGIC: Final = b"kvassL1\0"
_HALF: Final = 16 << 20
_STEP: Final = 1 << 20
"""Memory is allocated in steps of this many bytes."""
_HEADER: Final = np.dtype(
    [
        ("magic", "S8"),
        ("version", np.uint64),
        ("boot_id", "V16"),
        ("pid_namespace", np.uint64),
        ("check", np.uint64),
        ("arena_bytes", np.uint64),
        ("largest_bytes", np.uint64),
        ("lease_until", np.float64),
        ("serial", np.uint64),
        ("log", np.uint64, 3),
    ]
)
_PROCESSES: Final = PAGE
_LOG: Final = _PROCESSES + align_up(PLACES * PROCESS.itemsize)
_SERIALS: Final = _LOG + 2 * _HALF
_RECORDS: Final = _SERIALS + 8 * MOST_SETS


class Where(msgspec.Struct, frozen=True):
    """Whose clock and pids an index has. ``boot_id``: 16 bytes, of the machine's boot.
    ``pid_namespace``: the number of the pid namespace; pids of another one mean nothing."""

    boot_id: bytes
    pid_namespace: int


class Unusable(msgspec.Struct, frozen=True):
    """Why a saved index is not used, in one line."""

    reason: str


def index_bytes(arena_bytes: int) -> int:
    """The size of the memory for an arena: a row takes a ``PAGE`` of it at least."""
    return align_up(_RECORDS + arena_bytes // PAGE * RECORD)


class SavedIndex:
    """An index in ``memory``. ``create`` and ``open`` make one."""

    def __init__(self, memory: Bytes, allocate: Allocate) -> None:
        self._allocate = allocate
        header = memory[: _HEADER.itemsize].view(_HEADER)
        self._header = header[0]
        self._lease_until = header["lease_until"]  # a view: each lease writes to it
        processes = memory[_PROCESSES : _PROCESSES + PLACES * PROCESS.itemsize]
        self.processes = Processes(processes.view(PROCESS))
        self.directory = Directory(
            memory[_LOG:_SERIALS],
            self._header["log"],
            lambda low, high: allocate(_LOG + low, _LOG + high),
        )
        self._serials: U64Array = memory[_SERIALS:_RECORDS].view(np.uint64)
        self._serials_there = 0
        self.records: Bytes = memory[_RECORDS:]
        self._records_there = 0
        self.entries: list[Entry] = []
        """What the directory of the former life had."""

    @classmethod
    def create(cls, memory: Bytes, where: Where, allocate: Allocate) -> SavedIndex | Unusable:
        """An empty index in zeroed ``memory`` of ``index_bytes``."""
        made = cls(memory, allocate)
        if not (allocate(0, _LOG) and made.directory.replace([])):
            return Unusable("there is no memory for the index")
        head = made._header
        head["version"], head["boot_id"] = VERSION, np.void(where.boot_id.ljust(16, b"\0"))
        head["pid_namespace"], head["check"] = where.pid_namespace, _check(where.boot_id)
        head["magic"] = _MAGIC
        return made

    @classmethod
    def open(
        cls, memory: Bytes, where: Where, allocate: Allocate, arena_bytes: int
    ) -> SavedIndex | Unusable:
        """The index that a former life left in ``memory``, for an arena of ``arena_bytes``."""
        if len(memory) < index_bytes(arena_bytes):
            return Unusable("the index is shorter than it must be")
        made = cls(memory, allocate)
        head = made._header
        if bytes(head["magic"]) != _MAGIC.rstrip(b"\0"):
            return Unusable("there is no index of kvass")
        if head["version"] != VERSION:
            return Unusable(f"the index has format {head['version']}, this kvass reads {VERSION}")
        boot_id = head["boot_id"].tobytes()
        whole = int(head["check"]) == _check(boot_id) and int(head["serial"]) < MOST_COUNT
        if not (whole and math.isfinite(head["lease_until"])):
            return Unusable("the index is damaged")
        if boot_id != where.boot_id.ljust(16, b"\0"):
            return Unusable("the index is of another boot of the machine")
        if int(head["arena_bytes"]) < min(arena_bytes, int(head["largest_bytes"])):
            return Unusable("the arena was larger once, and a writer of that time may still write")
        if (entries := made.directory.read()) is None:
            return Unusable("the index is damaged")
        made.entries = entries
        same = int(head["pid_namespace"]) == where.pid_namespace
        made.processes.begin(pids_known=same)
        head["pid_namespace"] = where.pid_namespace
        return made

    # ------------------------------------------------------------ the header

    @property
    def lease_until(self) -> float:
        """No lease of any life ends later (CLOCK_MONOTONIC, seconds)."""
        return float(self._lease_until[0])

    def promise(self, deadline: float) -> None:
        """From now on no lease ends later than ``deadline``."""
        self._lease_until[0] = deadline

    def begin(self, arena_bytes: int, entries: list[Entry]) -> bool:
        """Begin a life with an arena of ``arena_bytes``, and only these ``entries``. False: there
        is no memory for them."""
        if not self.directory.replace(entries):
            return False
        head = self._header
        head["largest_bytes"] = max(int(head["largest_bytes"]), arena_bytes)
        head["arena_bytes"] = arena_bytes
        self.entries = []
        return True

    # ------------------------------------------------------------ rows and sets

    @property
    def rows(self) -> int:
        """How many records there is place for."""
        return len(self.records) // RECORD

    def has_rows(self, rows: int) -> bool:
        """Give the first ``rows`` records memory. False: there is none."""
        if rows > self.rows:
            return False
        if (need := rows * RECORD) > self._records_there:
            need = min(len(self.records), align_up(need, _STEP))
            if not self._allocate(_RECORDS + self._records_there, _RECORDS + need):
                return False
            self._records_there = need
        return True

    def serials(self, sets: int) -> U64Array | None:
        """The serials of the first sets, at least ``sets``; ``None``: there is no memory."""
        if sets > MOST_SETS:
            return None
        if (need := 8 * sets) > self._serials_there:
            need = min(8 * MOST_SETS, align_up(need, _STEP))
            if not self._allocate(_SERIALS + self._serials_there, _SERIALS + need):
                return None
            self._serials_there = need
        return self._serials[: self._serials_there // 8]

    def new_serial(self, sets: I64Array) -> None:
        """Void the seals of all rows of ``sets``, which have memory."""
        self._header["serial"] += 1
        self._serials[sets] = self._header["serial"]


def _check(boot_id: bytes) -> int:
    digest = hashlib.blake2b(boot_id.ljust(16, b"\0"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
