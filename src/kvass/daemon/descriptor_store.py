"""The place of an arena in systemd: two memfds that systemd keeps for its service between two
daemons (``--arena systemd``, ``FileDescriptorStoreMax=``).

Laws of this file, beside those of ``arena/place.py``:

- A memfd is stored at systemd before anything is in it. So it is lost, or known to the next daemon,
  but never half.
- What comes back is checked as the files of a folder are: memory, ours alone, that cannot get
  smaller. A memfd that fails is removed from systemd's store, and so is one whose fellow is
  missing.
- The lock is a lock of the kernel on the index. systemd has the descriptor that was sent to it, so
  the lock belongs to another one, which is opened again through ``/proc``.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import ExitStack
from typing import Final

from kvass.arena.memory import memfd
from kvass.arena.place import INDEX, SLOTS, Place
from kvass.daemon import notify
from kvass.errors import ConfigError
from kvass.types import PAGE

NAME: Final = "systemd"
"""The option ``arena`` that names this place. A folder of that name is ``./systemd``."""
NEEDED: Final = 2
"""How many descriptors systemd must keep."""
_FIRST: Final = 3  # SD_LISTEN_FDS_START
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
"""It may grow, but no client can add a seal against that."""
_EXEC: Final = 0x20  # F_SEAL_EXEC, which vm.memfd_noexec adds; not in Python's fcntl module
_PREFIX: Final = "kvass-"
_LOCK_WAIT_S: Final = 2.0
_LOCK_RETRY_S: Final = 0.02
_SETTINGS: Final = (
    f"set FileDescriptorStoreMax={NEEDED} in the unit and, from systemd 254 on, "
    "FileDescriptorStorePreserve=yes to keep L1 over a stop, too"
)


class StoredPlace(Place):
    """Memory that systemd keeps. ``stored``: what it gave us, by the names of the descriptors.
    ``page_bytes``: the size of the pages of the slots."""

    def __init__(self, stored: dict[str, list[int]], page_bytes: int) -> None:
        super().__init__(NAME, page_bytes)
        self._stored = dict[str, int]()
        self.unusable = (
            "" if stored else f"systemd had nothing for it; if this repeats, {_SETTINGS}"
        )
        for name, fds in stored.items():
            page = page_bytes if name == SLOTS else PAGE
            why = "there are several" if len(fds) > 1 else _foreign(fds[0], page)
            if why:
                self.unusable = f"{_PREFIX}{name} of systemd's store: {why}"
                _remove(name, fds)
            else:
                self._stored[name] = fds[0]

    def _open(self, name: str) -> int:
        fd = self._stored.pop(name, -1)
        if fd >= 0 and name == INDEX and not self._lock(fd):
            self.unusable = "another process uses its memory"
            _remove(name, [fd])
            fd = -1
        return fd if fd >= 0 else self._new(name)

    def _new(self, name: str) -> int:
        fd = memfd(_PREFIX + name, self.page_bytes if name == SLOTS else PAGE)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            notify.send_with(f"FDSTORE=1\nFDNAME={_PREFIX}{name}", fd)
            locked = name != INDEX or self._lock(fd)
            assert locked, "nobody else has it"
        except OSError:
            os.close(fd)
            raise
        return fd

    def _remove(self, name: str) -> None:
        notify.send_with(_removal(name))

    def _lock(self, index: int) -> bool:
        """Lock the memfd ``index``. Waits for a while: processes of a killed daemon's tiers may
        still be exiting. Raises ``OSError``."""
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
        self.lock_fd = os.open(f"/proc/self/fd/{index}", os.O_RDWR | os.O_CLOEXEC)
        until = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > until:
                    return False
            time.sleep(_LOCK_RETRY_S)


def open_stored(slots_bytes: int, index_bytes: int, page_bytes: int = PAGE) -> StoredPlace:
    """The place in systemd's store. Raises ``ConfigError``."""
    with ExitStack() as undo:
        place = StoredPlace(received(), page_bytes)
        undo.callback(place.release)
        place.open(slots_bytes, index_bytes)
        undo.pop_all()
    return place


def check() -> None:
    """Raise ``ConfigError`` if systemd keeps no descriptors for this process."""
    kept = os.environ.get("FDSTORE", "")  # from systemd 254 on, if the unit allows any
    if not os.environ.get("NOTIFY_SOCKET"):
        why = "systemd has not started this process as a service of Type=notify"
    elif kept.isdecimal() and int(kept) < NEEDED:
        why = f"systemd keeps {kept} descriptors for this service"
    else:
        return
    raise ConfigError(f"arena {NAME}: {why}: start it by systemctl, and {_SETTINGS}")


def received() -> dict[str, list[int]]:
    """The descriptors of ours that systemd gave us, by their names without ``kvass-``
    (sd_listen_fds(3)). No child of this process gets them."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    found = dict[str, list[int]]()
    for fd, full in enumerate(os.environ.get("LISTEN_FDNAMES", "").split(":"), _FIRST):
        name = full.removeprefix(_PREFIX)
        if name != full and name in (SLOTS, INDEX):
            os.set_inheritable(fd, False)
            found.setdefault(name, []).append(fd)
    return found


def held_bytes() -> int:
    """How many bytes of memory the slots have already."""
    return sum(os.fstat(fd).st_blocks * 512 for fd in received().get(SLOTS, ()))


def remove_stored() -> None:
    """Have systemd forget what an earlier daemon stored, which nobody uses any more."""
    for name, fds in received().items():
        _remove(name, fds)


def _remove(name: str, fds: list[int]) -> None:
    notify.send(_removal(name))
    for fd in fds:
        os.close(fd)


def _removal(name: str) -> str:
    return f"FDSTOREREMOVE=1\nFDNAME={_PREFIX}{name}"


def _foreign(fd: int, page_bytes: int) -> str:
    """Why ``fd`` is not memory that an earlier daemon has made; empty if it is."""
    try:
        there, seals = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return "it is no memory"
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if seals & ~_EXEC != _SEALS:
        return "it is not sealed as it must be"
    if flags & os.O_ACCMODE != os.O_RDWR:
        return "it cannot be written"
    if there.st_uid != os.geteuid():
        return f"it belongs to user {there.st_uid}"
    if max(PAGE, os.fstatvfs(fd).f_bsize) != page_bytes:
        return "its pages have another size"
    return ""
