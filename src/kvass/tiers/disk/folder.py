"""The disk tier's folder: who owns it, and how files in it are opened.

Law of this file: a file is opened, made or removed by its name relative to the open folder
(``dir_fd``), and never through a symbolic link. Nobody else may have write permission there. The
folder is used only while it still contains the lock file that this process has locked. Otherwise
another process may own the folder, so this process never touches it again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kvass.errors import ConfigError

_LOCK: Final = "lock"
_LOCK_WAIT_S: Final = 2.0
_ORPHAN_WAIT_S: Final = 60.0
"""How long to wait for an owner whose daemon has ended. The owner is ending, too, and that takes
0.1 to 0.3 s per GiB of memory that it frees."""
_LOCK_RETRY_S: Final = 0.02


class Folder:
    """An open folder of a disk tier.

    ``path`` may be a symbolic link. It is resolved once, when the folder is opened. Raises
    ``ConfigError`` if the folder does not exist, or if other users may write to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1
        self.lost = ""
        """Why this process lost the folder; empty if it still had it at the last ``check``."""
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            text = f"{path}: no such folder; make it, or mount what should be there"
            raise ConfigError(text) from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be opened: {error.strerror}") from error
        if why := _untrusted(path, os.fstat(self.fd)):
            self.close()
            raise ConfigError(f"{path}: {why}")

    def close(self) -> None:
        """Close the folder and release its lock. Idempotent."""
        for fd in (self._lock_fd, self.fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self.fd = -1

    def open(self, name: str, flags: int) -> int:
        """Open a file in the folder. Raises ``OSError``, also for a link or a file of another
        user."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # or a FIFO would block
        text = f"{name} is no file of this daemon's alone (a link, or another user's): remove it"
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self.fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, text) from error
            raise
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid():
            return fd
        os.close(fd)
        raise OSError(errno.EPERM, text)

    def unlink(self, name: str) -> None:
        """Remove a file if it exists. Raises ``OSError``."""
        self.check()
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def replace(self, name: str, data: bytes) -> None:
        """Replace a file's contents, durably and atomically. Only one thread may call this at a
        time. Raises ``OSError``."""
        written = name + ".new"
        self.unlink(written)  # of a life that ended here
        with os.fdopen(self.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.check()
        os.replace(written, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)

    def lock(self) -> None:
        """Lock the folder for this process until ``close``. Raises ``ConfigError`` if another
        daemon has locked it."""
        while True:
            try:
                fd = self.open(_LOCK, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                raise ConfigError(f"{self.path}: cannot be written: {error.strerror}") from error
            try:
                _lock(fd)
                if self._in_place(fd):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, b"%d %d" % (os.getpid(), os.getppid()), 0)
                    self._lock_fd = fd
                    return
                os.close(fd)  # it was removed while we waited for it
            except OSError as error:
                owner, daemon = _owner(fd)
                os.close(fd)
                if isinstance(error, BlockingIOError):
                    raise ConfigError(
                        f"{self.path}: in use by process {owner}, started by process {daemon}: "
                        "a folder is one daemon's; choose another"
                    ) from error
                text = f"{self.path}: cannot be locked and written: {error.strerror}"
                raise ConfigError(text) from error

    def check(self) -> None:
        """Raise ``OSError`` if this process has lost the folder, now or at an earlier check.

        A lost folder may have another owner. A check takes some microseconds.
        """
        if self._lock_fd >= 0 and not self.lost:
            if not self._in_place(self._lock_fd):
                self.lost = "its lock file was removed or replaced"
            elif not _is_same(self.path, self.fd):
                self.lost = "it was moved, or replaced by another folder"
            else:
                self.lost = _untrusted(self.path, os.fstat(self.fd))
        if self.lost:
            text = f"{self.lost}; it is not used any more: put it right and restart the daemon"
            raise OSError(errno.ESTALE, text)

    def _in_place(self, fd: int) -> bool:
        """Whether an open lock file is the one in the folder."""
        return _is_same(_LOCK, fd, dir_fd=self.fd, follow_symlinks=False)


def _is_same(path: str | Path, fd: int, **how: Any) -> bool:
    try:
        return os.path.samestat(os.stat(path, **how), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _untrusted(path: Path, folder: os.stat_result) -> str:
    """Why the folder cannot be used; empty if it can. An ACL that lets others write is seen,
    because it shows in the permission bits of the group."""
    us = os.geteuid()
    if folder.st_uid not in (us, 0):
        why = f"it belongs to user {folder.st_uid}, and this is user {us}: `chown -R {us} {path}`"
    elif folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(folder.st_mode)
        why = f"other users may write to it (mode {mode:04o}): `chmod go-w {path}`"
    else:
        return ""
    return f"{why}, or name a folder of your own in it"


def _lock(fd: int) -> None:
    """Lock a file, and wait for a while if it is locked. The previous owner may have been killed,
    but not ended yet."""
    begun = time.monotonic()
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - begun
            if waited > _ORPHAN_WAIT_S or (waited > _LOCK_WAIT_S and not _is_orphan(*_owner(fd))):
                raise
            time.sleep(_LOCK_RETRY_S)


def _owner(fd: int) -> tuple[str, str]:
    """The ids of the process that wrote the lock file last and of its parent, as text."""
    words = os.pread(fd, 40, 0).decode(errors="replace").split()
    return (words[0], words[1]) if len(words) == 2 else ("?", "?")


def _is_orphan(owner: str, daemon: str) -> bool:
    """Whether process ``owner`` has lost its parent ``daemon``. Such a process is about to end."""
    try:
        status = Path(f"/proc/{int(owner)}/status").read_text()
    except (OSError, ValueError):  # of another namespace, for all we know
        return False
    return f"PPid:\t{daemon}\n" not in status
