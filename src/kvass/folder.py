"""A folder that one process owns, such as a disk tier's: its lock, and how its files are opened.

Law of this file: a file is opened, created or removed by its name relative to the open folder
(``dir_fd``), and never through a symbolic link. No other user may have write permission there. The
folder is used only while the lock file that this process has locked is still the one in the folder.
If it is not, another process may own the folder, and this one never accesses it again.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kvass import processes
from kvass.errors import ConfigError

_log: Final = logging.getLogger("kvass")
LOCK: Final = "lock"
_PROBE: Final = "writable"
_LOCK_WAIT_S: Final = 2.0
_ORPHAN_WAIT_S: Final = 60.0
"""Seconds to wait for an owner whose daemon has ended. While the owner exits, the kernel frees its
memory, which takes 0.1 to 0.3 s per GiB."""
_LOCK_RETRY_S: Final = 0.02


class Folder:
    """An open folder. Raises ``ConfigError`` if it does not exist, or if other users may write to
    it. ``path`` may be a symbolic link; it is followed once, when the folder is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock_fd = -1
        """Holds the lock; -1 if it is not locked."""
        self.lost_because = ""
        """Why this process does not own the folder any more. Empty if it did at the last
        ``check``."""
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
        """Close the folder and release the lock. Idempotent."""
        for fd in (self.lock_fd, self.fd):
            if fd >= 0:
                os.close(fd)
        self.lock_fd = self.fd = -1

    def open(self, name: str, flags: int) -> int:
        """Open a file in the folder. Raises ``OSError``, also if the file is a link, has several
        names, or belongs to another user."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block the call
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
        """Remove a file, if it exists. Raises ``OSError``."""
        self.check()
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def replace(self, name: str, data: bytes) -> None:
        """Replace a file's contents durably and atomically. Not thread-safe. Raises ``OSError``."""
        written = name + ".new"
        self.unlink(written)  # left by a process that was killed at this point
        with os.fdopen(self.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.check()
        os.replace(written, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)

    def lock(self, of_child: bool = True) -> None:
        """Lock the folder for this process until ``close``. ``of_child``: a daemon started this
        process, and its last owner. Raises ``ConfigError`` if the folder cannot be written to, or
        another daemon has locked it."""
        while True:
            try:
                fd = self.open(LOCK, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                raise ConfigError(f"{self.path}: cannot be written: {error.strerror}") from error
            try:
                _lock(fd, of_child, self.path)
                if self._in_place(fd):
                    self._check_writable()
                    os.ftruncate(fd, 0)
                    _sign(fd)
                    self.lock_fd = fd
                    return
                os.close(fd)  # the lock file was removed while we waited for the lock
            except OSError as error:
                owner, daemon = _owner(fd)
                os.close(fd)
                if isinstance(error, BlockingIOError):
                    by = f"process {owner}" + f", started by process {daemon}" * of_child
                    raise ConfigError(
                        f"{self.path}: in use by {by}: a folder is one daemon's; choose another"
                    ) from error
                text = f"{self.path}: cannot be locked and written: {error.strerror}"
                raise ConfigError(text) from error

    def _check_writable(self) -> None:
        """Create and remove a file. Raises ``OSError`` if that is not allowed: an older lock file
        could be opened all the same. A full disk is no error, because its records can be loaded."""
        try:
            os.close(self.open(_PROBE, os.O_WRONLY | os.O_CREAT))
            os.unlink(_PROBE, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def check(self) -> None:
        """Check that this process still owns the folder. Raises ``OSError`` if it does not, or if
        an earlier check found so. Takes some microseconds."""
        if self.lock_fd >= 0 and not self.lost_because:
            if not self._in_place(self.lock_fd):
                self.lost_because = "its lock file was removed or replaced"
            elif not _is_same(self.path, self.fd):
                self.lost_because = "it was moved, or replaced by another folder"
            else:
                self.lost_because = _untrusted(self.path, os.fstat(self.fd))
        if self.lost_because:
            text = (
                f"{self.lost_because}; it is not used any more: put it right and restart the daemon"
            )
            raise OSError(errno.ESTALE, text)

    def _in_place(self, fd: int) -> bool:
        """Whether the open lock file ``fd`` is the one that is in the folder now."""
        return _is_same(LOCK, fd, dir_fd=self.fd, follow_symlinks=False)


def _is_same(path: str | Path, fd: int, **how: Any) -> bool:
    try:
        return os.path.samestat(os.stat(path, **how), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _untrusted(path: Path, folder: os.stat_result) -> str:
    """Return why a folder cannot be used; empty if it can. An ACL that lets other users write is
    visible in the bits of the group."""
    us = os.geteuid()
    if folder.st_uid not in (us, 0):
        why = f"it belongs to user {folder.st_uid}, and this is user {us}: `chown -R {us} {path}`"
    elif folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(folder.st_mode)
        why = f"other users may write to it (mode {mode:04o}): `chmod go-w {path}`"
    else:
        return ""
    return f"{why}, or name a folder of your own in it"


def _lock(fd: int, of_child: bool, path: Path) -> None:
    """Lock the file ``fd`` in the folder ``path``. Waits for a while, because its last owner may
    have been killed a moment ago and still be exiting."""
    begun = time.monotonic()
    said = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - begun
            ends = _ends(fd, of_child)
            if waited > _ORPHAN_WAIT_S or (waited > _LOCK_WAIT_S and not ends):
                raise
            if ends and not said:
                said = True
                text = "%s: locked by process %s, which is ending: waiting up to %g s"
                _log.info(text, path, _owner(fd)[0], _ORPHAN_WAIT_S)
            time.sleep(_LOCK_RETRY_S)


def _sign(fd: int) -> None:
    """Write into the lock file whose it is. Raises ``OSError``."""
    try:
        os.pwrite(fd, b"%d %d" % (os.getpid(), os.getppid()), 0)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file of hugetlbfs cannot be written: not said
            raise


def _owner(fd: int) -> tuple[str, str]:
    """Return the pid of the last owner of the lock file, and of the daemon that started it."""
    words = os.pread(fd, 40, 0).decode(errors="replace").split()
    return (words[0], words[1]) if len(words) == 2 else ("?", "?")


def _ends(fd: int, of_child: bool) -> bool:
    """Whether the owner of the lock file will release it soon, because it, or the daemon that
    started it, has ended."""
    owner, daemon = _owner(fd)
    if of_child:
        return _is_orphan(owner, daemon)
    return owner.isdecimal() and processes.exiting(int(owner))


def _is_orphan(owner: str, daemon: str) -> bool:
    """Whether the parent of ``owner`` is not the daemon that started it. Then the daemon has ended,
    and the owner is exiting."""
    try:
        status = Path(f"/proc/{int(owner)}/status").read_text()
    except (OSError, ValueError):  # it may be in another PID namespace
        return False
    return f"PPid:\t{daemon}\n" not in status
