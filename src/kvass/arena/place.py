"""The place of an arena that outlives the daemon: a folder in a file system of memory.

The file ``slots`` is the arena, ``index`` says what it holds, and ``lock`` is locked while
processes use the place (``folder.py``).

Laws of this file:

- The lock belongs to a daemon and to the processes of its tiers, which inherit ``lock_fd``. So it
  is free only when all of them have ended, whatever their pids are, and none of them writes to the
  slots (law 3).
- The memory of a place never gets smaller: a process of an earlier daemon's engine may map it, and
  would be killed (SIGBUS). For the same reason ``allocate`` comes before the first write to a part
  of the index.
- If the index is of no use, slots and index are replaced by new ones, and never emptied: such a
  process may still write to the old slots (law 3).
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvass.arena.huge import lacking
from kvass.arena.memory import Arena
from kvass.errors import ConfigError
from kvass.folder import LOCK, Folder
from kvass.types import PAGE, Size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SLOTS: Final = "slots"
INDEX: Final = "index"
LEAST_INDEX: Final = 5 << 20
"""The memory without which an index cannot note one extent set."""
_INDEX_SHARE: Final = 1024
"""Rows of 64 KiB, and few are smaller, take a 1024th of their size of the index."""
_MEMORY: Final = ("tmpfs", "hugetlbfs")
"""The file systems that a place may be in. A file of hugetlbfs can be mapped, but not written, and
has whole huge pages, which root has reserved."""
_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)  # only from Python 3.13 on
_HUGE: Final = ("huge=always", "huge=within_size", "huge=advise")


class Place:
    """A place that this process has locked, with its memory open."""

    def __init__(self, name: str, folder: Folder) -> None:
        self.name = name
        """For people: the option ``arena``."""
        self._folder = folder
        self.page_bytes = folder_page_bytes(name)
        """The size of the slots' pages; more than ``PAGE`` if root has reserved them."""
        self.lock_fd = folder.lock_fd
        """The descriptor that holds the lock, in each process that has it open."""
        self._index_fd = -1
        self.slots: Arena
        """The arena. It has what its last owner left in it."""
        self.index: npt.NDArray[np.uint8]
        """All of the index: uint8. All zero if it is new."""
        self.lacks_index = False
        """Whether there was no memory for a part of the index, so that L1 is not used to its full
        size."""
        self.found = (0, 0)
        """The sizes that the slots and the index had before they were opened; 0: there was none."""

    def huge(self) -> bool:
        """Ask for huge pages. Returns whether there will be any."""
        return any(word in _HUGE for word in _mount(os.fstat(self._folder.fd)).options)

    def open(self, slots_bytes: int, index_bytes: int) -> None:
        """Open the memory, or make it. Larger memory stays as large as it is. Both sizes are
        multiples of ``page_bytes``. Raises ``ConfigError``."""
        page = self.page_bytes
        assert slots_bytes % page == index_bytes % page == 0, "not whole pages"
        with ExitStack() as undo:
            try:
                fds = list[int]()
                for name in (SLOTS, INDEX):
                    fds.append(self._folder.open(name, os.O_RDWR | os.O_CREAT))
                    undo.callback(os.close, fds[-1])
                least = LEAST_INDEX + slots_bytes // _INDEX_SHARE
                self._check_room(fds, slots_bytes + min(index_bytes, least))
                self.found = (os.fstat(fds[0]).st_size, os.fstat(fds[1]).st_size)
                for fd, size in zip(fds, (slots_bytes, index_bytes), strict=True):
                    if os.fstat(fd).st_size < size:
                        os.ftruncate(fd, size)
                self.index = _mapped(fds[1])
                self.slots = Arena(fds[0], slots_bytes)
            except OSError as error:
                said = f"arena {self.name}: {error.strerror}"
                if page != PAGE and (why := lacking(page, slots_bytes)):
                    said += f": {why}"
                raise ConfigError(said) from error
            undo.pop_all()
        self._index_fd = fds[1]

    def _check_room(self, fds: list[int], wanted: int) -> None:
        """Raise ``ConfigError`` unless there is room for ``wanted`` bytes in ``fds``."""
        space = os.fstatvfs(fds[0])
        free = space.f_bavail * space.f_frsize + sum(os.fstat(fd).st_blocks * 512 for fd in fds)
        if not space.f_blocks or self.page_bytes != PAGE:
            return  # a tmpfs without a limit; or the kernel reserves pages when they are mapped
        if wanted > free:
            raise ConfigError(
                f"arena {self.name}: L1 and its index, {Size(wanted).rounded()}, do not fit "
                f"into the {Size(free).rounded()} that its file system has for them: give less, or "
                "mount a larger tmpfs"
            )

    def renew(self, slots_bytes: int, index_bytes: int) -> None:
        """Replace slots and index by new ones. Raises ``ConfigError``."""
        self.slots.close()
        os.close(self._index_fd)
        self._index_fd = -1
        try:
            for name in (INDEX, SLOTS):
                self._folder.unlink(name)
        except OSError as error:
            raise ConfigError(f"arena {self.name}: {error.strerror}") from error
        self.open(slots_bytes, index_bytes)

    def allocate(self, lo: int, hi: int) -> bool:
        """Give bytes ``[lo, hi)`` of the index memory. Their contents stay. False: there is
        none."""
        try:
            os.posix_fallocate(self._index_fd, lo, hi - lo)
        except OSError:
            self.lacks_index = True
            return False
        return True

    def release(self) -> None:
        """Give up the place: another process may open it once the tiers' processes have ended, so
        this one must not write to it any more. Slots and index stay mapped. Idempotent."""
        self._folder.close()
        if self._index_fd >= 0:
            os.close(self._index_fd)
        self.lock_fd = self._index_fd = -1


def open_place(path: str, slots_bytes: int, index_bytes: int) -> Place:
    """Lock the place at ``path``, and map its files. The folder is made if only its parent exists.

    Raises ``ConfigError`` if the folder is not of a tmpfs, too small or not safe to use, or if
    another process has locked it. A folder that was made for this is gone then.
    """
    new = not os.path.lexists(path)
    try:
        Path(path).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"arena {path}: cannot be made: {error.strerror}") from error
    with ExitStack() as undo:
        if new:
            undo.callback(_rmdir, path)
        place = Place(path, folder := _locked(path, undo))
        undo.callback(place.release)
        if new:
            undo.callback(_unlink_new, folder)
        place.open(slots_bytes, index_bytes)
        undo.pop_all()
    return place


def folder_page_bytes(path: str) -> int:
    """The size of the pages of memory at ``path``, or in its parent if it does not exist yet. Of a
    path that cannot be looked at, ``open_place`` says why."""
    for there in (path, os.path.dirname(os.path.abspath(path))):
        with suppress(OSError):
            huge = _mount(os.stat(there)).kind == "hugetlbfs"
            return os.statvfs(there).f_bsize if huge else PAGE
    return PAGE


def held_bytes(path: str) -> int:
    """How many bytes of memory the slots at ``path`` have already. 0 if there are none, or if
    ``path`` is empty."""
    try:
        return os.stat(Path(path) / SLOTS).st_blocks * 512 if path else 0
    except OSError:
        return 0


def remove_place(path: str) -> None:
    """Remove the place at ``path``. The memory is free once the last process that maps it has
    unmapped it. Raises ``ConfigError`` if there is none, or if a process has locked it."""
    with ExitStack() as undo:
        folder = _locked(path, undo)
        try:
            found = SLOTS in os.listdir(folder.fd)
            _unlink_all(folder, found)
        except OSError as error:
            raise ConfigError(f"arena {path}: cannot be removed: {error.strerror}") from error
    _rmdir(path)
    if not found:
        raise ConfigError(f"arena {path}: there is no arena in this folder")


def _unlink_all(folder: Folder, found: bool = True) -> None:
    """Remove the files of a locked place. The lock last: nobody finds half a place. Without slots
    (``found``) an index may be another file. Raises ``OSError``."""
    for name in (INDEX, SLOTS, LOCK) if found else (LOCK,):
        folder.unlink(name)


def _unlink_new(folder: Folder) -> None:
    with suppress(OSError):  # why the place could not be opened is said
        _unlink_all(folder)


def _rmdir(path: str) -> None:
    with suppress(OSError):  # it has other files, or its parent is not ours
        os.rmdir(path)


def _locked(path: str, undo: ExitStack) -> Folder:
    """The folder at ``path``, locked. It must be in a file system of memory."""
    folder = Folder(Path(path))
    undo.callback(folder.close)
    if (kind := _mount(os.fstat(folder.fd)).kind) not in _MEMORY:
        raise ConfigError(
            f"arena {path}: a file system of type {kind} is no memory: name a folder of a tmpfs, "
            "such as /dev/shm/kvass"
        )
    folder.lock(of_child=False)
    return folder


def _mapped(fd: int) -> npt.NDArray[np.uint8]:
    import numpy as np

    # Without a reservation: most of the index is never used, and ``allocate`` says what is.
    flags = mmap.MAP_SHARED | _NORESERVE
    return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, flags), np.uint8)


class _Mount(NamedTuple):
    kind: str
    """The type of the file system; ``unknown`` if ``/proc`` does not show it."""
    options: list[str]


def _mount(folder: os.stat_result) -> _Mount:
    """The file system of a folder."""
    number = f"{os.major(folder.st_dev)}:{os.minor(folder.st_dev)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:  # proc_pid_mountinfo(5)
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return _Mount(after.split()[0], after.split()[-1].split(","))
    return _Mount("unknown", [])
