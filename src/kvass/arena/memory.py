"""The arena: one memfd, or one file of a tmpfs, mapped by the daemon and by every worker.

The daemon never changes its size. A memfd is sealed, so no client can shrink it while others use
it. A file (``place.py``) cannot be sealed, so any client could. A mapping ends when the last view
of it ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvass.errors import RemoteError, UsageError
from kvass.types import PAGE

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SLICE_BYTES: Final = 16 << 20
"""A good number of bytes for one call of ``populate``: it takes about 9 ms of a core."""
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not in Python's mmap module
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SHMEM_HUGE: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise  # mmap.madvise of Python would hold the GIL
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


class Arena:
    """A shared mapping of ``size`` bytes. ``create`` and ``attach`` make one."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self.page_bytes: int = max(PAGE, os.fstatvfs(fd).f_bsize)
        """More than ``PAGE`` if the pages are huge ones that root has reserved (hugetlb)."""
        self._fd = self._file = fd
        import numpy as np  # imported late: a client that only asks for a status maps no arena

        self._buffer: npt.NDArray[np.uint8] | None = np.frombuffer(
            mmap.mmap(fd, size, mmap.MAP_SHARED), np.uint8
        )
        self._address: int = self._buffer.ctypes.data

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The memory as a writable uint8 array of shape ``(size,)``. Raises ``UsageError`` if
        closed."""
        if self._buffer is None:
            raise UsageError("this arena is closed: attach the current one")
        return self._buffer

    def fileno(self) -> int:
        """The descriptor to send to a client; -1 for an attached or closed arena."""
        return self._fd

    def populate(self, lo: int, hi: int) -> None:
        """Fault in the pages of bytes ``[lo, hi)``, without the GIL. Their contents stay.

        Another thread may use the buffer meanwhile, but must not close the arena's last view.
        Raises ``OSError`` if there is no memory for them (a full file system, strict overcommit): a
        process that touches such a page is killed by SIGBUS. Raises ``UsageError`` for bounds
        outside the arena.
        """
        if not 0 <= lo <= hi <= self.size:
            raise UsageError(f"populate [{lo}, {hi}): outside the arena's {self.size} bytes")
        view = self.buffer  # keeps the mapping while we are in the kernel
        lo -= lo % mmap.PAGESIZE
        if _madvise(self._address + lo, hi - lo, _MADV_POPULATE_WRITE) == 0:
            return
        number = ctypes.get_errno()
        if number == errno.EFAULT:  # touching the page would raise SIGBUS
            number = errno.ENOSPC
        if number != errno.EINVAL:
            raise OSError(number, os.strerror(number), f"arena of {view.size} bytes at {lo}")
        if self._fd >= 0:  # a kernel before 5.14: allocate the pages, but do not map them
            os.posix_fallocate(self._fd, lo, hi - lo)

    def has_page(self, at: int) -> bool:
        """Whether the page at offset ``at``, a multiple of ``PAGE``, is in memory. Any process may
        have faulted it in. Of reserved huge pages: whether as many are in memory as lie up to
        there."""
        if self.page_bytes > PAGE:  # mincore would see those that this process has mapped
            return os.fstat(self._file).st_blocks * 512 > at
        there = ctypes.create_string_buffer(1)
        return _libc.mincore(self._address + at, PAGE, there) == 0 and bool(there.raw[0] & 1)

    def advise_huge(self) -> bool:
        """Ask the kernel for transparent huge pages. Returns whether it can use them for shared
        memory. Reserved huge pages stay what they are."""
        if self.page_bytes > PAGE:
            return False
        try:
            setting = _SHMEM_HUGE.read_text()
        except OSError:  # a kernel without huge pages, or a sandbox that hides the setting
            setting = ""
        if not setting or "[never]" in setting or "[deny]" in setting:
            return False
        return bool(_madvise(self._address, self.size, mmap.MADV_HUGEPAGE) == 0)

    def keep_from_forks(self) -> None:
        """Leave this mapping out of the processes that this one forks."""
        _madvise(self._address, self.size, mmap.MADV_DONTFORK)

    def close(self) -> None:
        """Close the arena. It is unmapped when the last view of ``buffer`` ends. Idempotent.

        This takes 0.1 to 0.3 s per populated GiB, without the GIL, so do not call it from a thread
        that others wait for. The page-table entries are dropped slice by slice, because unmapping
        all of them at once would hold the lock on this process's memory. Views still have their
        bytes (madvise(2)).
        """
        buffer, self._buffer = self._buffer, None
        step = max(SLICE_BYTES, self.page_bytes)
        for lo in range(0, self.size if buffer is not None else 0, step):
            _madvise(self._address + lo, min(step, self.size - lo), mmap.MADV_DONTNEED)
        if self._file >= 0:
            os.close(self._file)
            self._fd = self._file = -1


def create(size: int, page_bytes: int = PAGE) -> Arena:
    """A new arena of ``size`` bytes (a multiple of ``page_bytes``), all zero, with no page
    populated.

    Other pages than those of ``PAGE`` are huge ones that root has reserved; from here on they are
    reserved for this arena. Raises ``UsageError`` for any other size, ``OSError`` if the kernel has
    no memory for it.
    """
    if size <= 0 or size % page_bytes:
        raise UsageError(f"arena of {size} bytes: use a positive multiple of {page_bytes}")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if page_bytes != PAGE:
        flags |= os.MFD_HUGETLB | (page_bytes.bit_length() - 1) << os.MFD_HUGE_SHIFT
    fd = os.memfd_create("kvass-arena", flags)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return Arena(fd, size)
    except OSError:
        os.close(fd)
        raise


def attach(fd: int, size: int) -> Arena:
    """The arena of the daemon, mapped from its descriptor ``fd``, which belongs to it from now on.
    Touches no page.

    Raises ``RemoteError`` if ``fd`` is neither a memfd that cannot get smaller, nor a file of
    memory, or if it has fewer than ``size`` bytes.
    """
    arena = None
    try:
        seals, there = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        sealed, file = seals & fcntl.F_SEAL_SHRINK, seals == fcntl.F_SEAL_SEAL
        if not (sealed or file) or there < size:
            raise RemoteError(f"the daemon's descriptor is no arena of {size} bytes")
        arena = Arena(fd, size)
    except (OSError, ValueError) as error:
        raise RemoteError(f"cannot map the daemon's arena: {error}") from error
    finally:
        if arena is None or arena.page_bytes == PAGE:
            os.close(fd)
    arena._fd = -1
    if arena.page_bytes == PAGE:
        arena._file = -1
    return arena
