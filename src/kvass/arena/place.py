"""The place of an arena that outlives the daemon: a folder in a file system of memory.

``slots`` is the arena, ``index`` says what it holds, and ``lock`` is locked while processes use the
place (``folder.py``).

Laws of this file:

- The lock belongs to a daemon and to the processes of its tiers, which inherit ``lock_fd``. So it
  is free only when all of them have ended, whatever their pids are, and none of them writes to the
  slots (law 3).
- A file of a place never gets smaller: a process of an earlier daemon's engine may map it, and
  would be killed (SIGBUS). For the same reason ``allocate`` comes before the first write to a part
  of the index.
- If the index is of no use, both files are replaced by new ones, and never emptied: such a process
  may still write to the old slots (law 3).
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvass.arena.memory import Arena
from kvass.errors import ConfigError
from kvass.folder import Folder
from kvass.types import PAGE, Size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SLOTS: Final = "slots"
INDEX: Final = "index"
LOCK: Final = "lock"
_MEMORY: Final = ("tmpfs",)
"""The file systems that a place may be in."""
_HUGE: Final = ("huge=always", "huge=within_size", "huge=advise")


class Place:
    """A place that this process has locked. ``open_place`` makes one, with its files open."""

    def __init__(self, path: str, folder: Folder) -> None:
        self.path = path
        self._folder = folder
        self._index_fd = -1
        self.slots: Arena
        """The arena. It has what its last owner left in it."""
        self.index: npt.NDArray[np.uint8]
        """All of the index: uint8. All zero if it is new."""
        self.found = (0, 0)
        """The sizes that the slots and the index had before they were opened; 0: there was none."""

    @property
    def lock_fd(self) -> int:
        """The descriptor that holds the lock, in each process that has it open."""
        return self._folder.lock_fd

    @property
    def huge(self) -> bool:
        """Whether the file system gives huge pages."""
        return any(word in _HUGE for word in _mount(self._folder.fd).options)

    def open(self, slots_bytes: int, index_bytes: int) -> None:
        """Open the files, or make them. Larger files stay as large as they are. Both sizes are
        multiples of ``PAGE``. Raises ``ConfigError``."""
        assert slots_bytes % PAGE == index_bytes % PAGE == 0, "not whole pages"
        with ExitStack() as undo:
            try:
                fds = [self._file(name, undo) for name in (SLOTS, INDEX)]
                _check_room(self.path, fds, slots_bytes)
                self.found = (os.fstat(fds[0]).st_size, os.fstat(fds[1]).st_size)
                for fd, size in zip(fds, (slots_bytes, index_bytes), strict=True):
                    if os.fstat(fd).st_size < size:
                        os.ftruncate(fd, size)
                self.index = _mapped(fds[1])
                self.slots = Arena(fds[0], slots_bytes)
            except OSError as error:
                raise ConfigError(f"arena {self.path}: {error.strerror}") from error
            undo.pop_all()
        self._index_fd = fds[1]

    def _file(self, name: str, undo: ExitStack) -> int:
        fd = self._folder.open(name, os.O_RDWR | os.O_CREAT)
        undo.callback(os.close, fd)
        return fd

    def renew(self, slots_bytes: int, index_bytes: int) -> None:
        """Replace both files by new ones. Raises ``ConfigError``."""
        self.slots.close()
        os.close(self._index_fd)
        try:
            for name in (INDEX, SLOTS):
                self._folder.unlink(name)
        except OSError as error:
            raise ConfigError(f"arena {self.path}: {error.strerror}") from error
        self.open(slots_bytes, index_bytes)

    def allocate(self, lo: int, hi: int) -> bool:
        """Give bytes ``[lo, hi)`` of the index memory. Their contents stay. False: there is
        none."""
        try:
            os.posix_fallocate(self._index_fd, lo, hi - lo)
        except OSError:
            return False
        return True

    def release(self) -> None:
        """Give up the place: another process may open it once the tiers' processes have ended, so
        this one must not write to it any more. Both files stay mapped. Idempotent."""
        self._folder.close()
        if self._index_fd >= 0:
            os.close(self._index_fd)
            self._index_fd = -1


def open_place(path: str, slots_bytes: int, index_bytes: int) -> Place:
    """Lock the place at ``path``, and map its files. The folder is made if only its parent exists.

    Raises ``ConfigError`` if the folder is not of a tmpfs, too small or not safe to use, or if
    another process has locked it.
    """
    try:
        Path(path).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"arena {path}: cannot be made: {error.strerror}") from error
    with ExitStack() as undo:
        place = Place(path, _locked(path, undo))
        undo.callback(place.release)
        place.open(slots_bytes, index_bytes)
        undo.pop_all()
    return place


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
            # The lock last: nobody finds half a place. Without slots an index may be another file.
            for name in (INDEX, SLOTS, LOCK) if found else (LOCK,):
                folder.unlink(name)
        except OSError as error:
            raise ConfigError(f"arena {path}: cannot be removed: {error.strerror}") from error
    with suppress(OSError):  # it has other files, or its parent is not ours
        os.rmdir(path)
    if not found:
        raise ConfigError(f"arena {path}: there is no arena in this folder")


def _locked(path: str, undo: ExitStack) -> Folder:
    """The folder at ``path``, locked. It must be in a file system of memory."""
    folder = Folder(Path(path))
    undo.callback(folder.close)
    if (kind := _mount(folder.fd).kind) not in _MEMORY:
        raise ConfigError(
            f"arena {path}: a file system of type {kind} is no memory: name a folder of a tmpfs, "
            "such as /dev/shm/kvass"
        )
    folder.lock(of_child=False)
    return folder


def _check_room(path: str, fds: list[int], wanted: int) -> None:
    """Raise ``ConfigError`` unless the file system has room for ``wanted`` bytes in the files."""
    space = os.fstatvfs(fds[0])
    free = space.f_bavail * space.f_frsize + sum(os.fstat(fd).st_blocks * 512 for fd in fds)
    if space.f_blocks and wanted > free:  # no blocks: a tmpfs without a limit
        raise ConfigError(
            f"arena {path}: {Size(wanted).rounded()} do not fit into the {Size(free).rounded()} "
            "that its file system has for them: give less, or mount a larger tmpfs"
        )


def _mapped(fd: int) -> npt.NDArray[np.uint8]:
    import numpy as np

    return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED), np.uint8)


class _Mount(NamedTuple):
    kind: str
    """The type of the file system; ``unknown`` if ``/proc`` does not show it."""
    options: list[str]


def _mount(fd: int) -> _Mount:
    """The file system of an open folder."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:  # proc_pid_mountinfo(5)
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return _Mount(after.split()[0], after.split()[-1].split(","))
    return _Mount("unknown", [])
