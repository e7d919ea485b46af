"""The processes that may still write to the arena, in the memory that outlives the daemon.

Law of this file: a process is noted before it may write, and forgotten when it can no longer (law
3). The next daemon reads here for whom slots must rest.

A place of the table is free, or it has a process in one or both of two roles: it writes in this
life of the daemon, and it may still write because of a former life.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvass.types import U64Array

PLACES: Final = 4096
PROCESS: Final = np.dtype(
    [
        ("start", np.uint64),
        ("who", np.uint64),
        ("check", np.uint64),
        ("pid", np.uint32),
        ("roles", np.uint32),
    ]
)
_WORKER: Final = 1
_FORMER: Final = 4
_MIX: Final = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


class FormerProcess(msgspec.Struct, frozen=True):
    """A process that was noted in a former life. ``number``: its place. ``pid``: 0 if unknown.
    ``start``: its start time, field 22 of /proc/PID/stat."""

    number: int
    pid: int
    start: int


def who(instance: str, rank: int) -> int:
    text = f"{rank}/{instance}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class Processes:
    """The table in ``memory``: structs of ``PROCESS``, ``PLACES`` of them."""

    def __init__(self, memory: npt.NDArray[np.void]) -> None:
        self._start, self._who = memory["start"], memory["who"]
        self._pid, self._roles, self._check = memory["pid"], memory["roles"], memory["check"]
        self._place_of: dict[int, int] = {}
        """By connection of this life."""

    def begin(self, pids_known: bool) -> None:
        """Begin a life: every worker so far is a former one. A damaged pid is unknown.

        ``pids_known``: whether pids mean now what they meant then.
        """
        damaged = self._check != _checks(self._start, self._who, self._pid)
        self._pid[damaged | (not pids_known)] = 0
        workers = np.flatnonzero(self._roles & _WORKER)
        self._roles[workers] = _FORMER

    def former(self) -> tuple[FormerProcess, ...]:
        """The workers that may still write because of a former life."""
        return tuple(
            FormerProcess(i, int(self._pid[i]), int(self._start[i]))
            for i in np.flatnonzero(self._roles & _FORMER).tolist()
        )

    def former_of(self, pids: Mapping[int, int]) -> list[int]:
        """The former workers that may be one of these processes. ``pids``: the pid of each ``who``;
        0: unknown."""
        places = np.flatnonzero(self._roles & _FORMER)
        there = zip(
            *(places.tolist(), self._who[places].tolist(), self._pid[places].tolist()), strict=True
        )
        return [
            place
            for place, name, pid in there
            if name in pids and (pid == pids[name] or not pid or not pids[name])
        ]

    def forget_pid(self, number: int) -> None:
        """The end of a process cannot be seen: its pid is unknown from now on."""
        self._pid[number] = 0

    def former_ended(self, number: int) -> None:
        """A former worker writes no more on behalf of a former life."""
        self._roles[number] &= ~np.uint32(_FORMER)

    def note_worker(self, connection: int, pid: int, start: int, name: int) -> bool:
        """Note the process of a connection. False: the table is full. A second call changes
        nothing."""
        if connection in self._place_of:
            return True
        same = (self._roles == _FORMER) & (self._who == name)
        same &= (self._pid == pid) & (self._start == start)
        if (place := self._enter(pid, start, name, same)) is None:
            return False
        self._place_of[connection] = place
        return True

    def forget_worker(self, connection: int) -> None:
        """The process of a connection writes no more on behalf of this life."""
        if (place := self._place_of.pop(connection, None)) is not None:
            self._roles[place] &= ~np.uint32(_WORKER)

    def _enter(self, pid: int, start: int, name: int, same: npt.NDArray[np.bool_]) -> int | None:
        """Give a process a place of ``same``, or a free one."""
        places = np.flatnonzero(same)
        if not len(places):
            places = np.flatnonzero(self._roles == 0)
        if not len(places):
            return None
        place = int(places[0])
        self._start[place], self._who[place], self._pid[place] = start, name, pid
        one = slice(place, place + 1)
        self._check[one] = _checks(self._start[one], self._who[one], self._pid[one])
        self._roles[place] |= np.uint32(_WORKER)  # last: only now the place is taken
        return place


def _checks(starts: U64Array, names: U64Array, pids: npt.NDArray[np.uint32]) -> U64Array:
    """A checksum for each process."""
    mixed: U64Array = (starts * _MIX[0]) ^ ((names + _MIX[1]) * _MIX[2])
    mixed = (mixed ^ (mixed >> np.uint64(31)) ^ pids) * _MIX[1]
    return mixed ^ (mixed >> np.uint64(29))
