"""Disks of 2 MiB that a test may fill, and make read-only.

Law of this file: nothing is skipped. Where a mount namespace can be had, as root or by way of a
user namespace, the disk is a tmpfs in one, reached by the root folder of the process that holds it;
it is gone with that process. A disk that is only counted, by what stands before the system calls,
can be had everywhere.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import pytest

SIZE: Final = 2 << 20
_WAYS: Final = (("unshare", "-m"), ("unshare", "-Urm"))


class SmallDisk(Protocol):
    """A disk of ``SIZE`` bytes; ``folder`` is all of it."""

    folder: Path

    def remount(self, how: str) -> None:
        """``ro`` or ``rw``; nobody has a file open there."""
        ...


class Mounted:
    """A tmpfs in a mount namespace of its own, that ``shell`` lives in."""

    def __init__(self, shell: subprocess.Popen[str], point: Path) -> None:
        self._shell = shell
        self._point = point
        self.folder = Path(f"/proc/{shell.pid}/root{point}")

    @classmethod
    @contextmanager
    def made(cls, point: Path) -> Iterator[Mounted | None]:
        """``None``: this process may not."""
        for way in _WAYS:
            shell = subprocess.Popen(
                [*way, "sh"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            try:
                disk = cls(shell, point)
                if disk._does(f"mount -t tmpfs -o size={SIZE},mode=0755 kvass-test '{point}'"):
                    yield disk
                    return
            finally:
                shell.kill()
                shell.communicate(timeout=30)
        yield None

    def remount(self, how: str) -> None:
        assert self._does(f"mount -o remount,bind,{how} '{self._point}'")

    def _does(self, command: str) -> bool:
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        try:
            self._shell.stdin.write(f"{command} >/dev/null && echo done || echo failed\n")
            self._shell.stdin.flush()
        except BrokenPipeError:  # it never came as far as a shell
            return False
        return self._shell.stdout.readline() == "done\n"


class Counted:
    """A folder whose files may take ``SIZE`` bytes together, as far as calls go by ``os``."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._read_only = False
        real_open, real_allocate, real_stat = os.open, os.posix_fallocate, os.statvfs

        def open_(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            if self._read_only and flags & (os.O_WRONLY | os.O_RDWR) and self._has(path, **more):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
            return real_open(path, flags, *rest, **more)

        def allocate(fd: int, at: int, size: int) -> None:
            missing = at + size - os.fstat(fd).st_blocks * 512
            if missing > self._free() and self._has(fd):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real_allocate(fd, at, size)

        def statvfs(path: Any) -> Any:
            if not self._has(path):
                return real_stat(path)
            free = self._free() // 4096
            return os.statvfs_result((4096, 4096, SIZE // 4096, free, free, 99, 99, 99, 0, 255))

        patch.setattr(os, "open", open_)
        patch.setattr(os, "posix_fallocate", allocate)
        patch.setattr(os, "statvfs", statvfs)

    def remount(self, how: str) -> None:
        self._read_only = how == "ro"

    def _has(self, path: Any, dir_fd: int | None = None) -> bool:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        if dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        return Path(path).is_relative_to(self.folder)

    def _free(self) -> int:
        return SIZE - sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())


def _may_mount() -> bool:
    with Mounted.made(Path("/tmp")) as disk:
        return disk is not None


KINDS: Final = ("mounted", "counted") if _may_mount() else ("counted",)


@contextmanager
def small_disk(kind: str, folder: Path) -> Iterator[SmallDisk]:
    """One of ``KINDS``; ``folder`` is an empty one that it may use."""
    if kind == "mounted":
        with Mounted.made(folder) as disk:
            assert disk is not None
            yield disk
    else:
        with pytest.MonkeyPatch.context() as patch:
            yield Counted(folder, patch)
