"""What a process of a soak has in use, as it tells itself.

The system's figure also counts what malloc keeps free. It rises when several threads need memory at
once, and does not fall again; so a small leak would not show in it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Final

EVERY_S: Final = 5.0
FIGURES: Final = ("malloc_bytes", "python_blocks")
"""What ``malloc`` has given out; Python's blocks of up to 512 bytes, which are not malloc's: two
for an array, one for a number."""


class _MallocInfo(ctypes.Structure):  # mallinfo(3)
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    )


def tell(folder: Path) -> None:
    """Have a thread write ``FIGURES`` into a file of ``folder``, again and again."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallocInfo
    new, file = folder / f"{os.getpid()}.new", folder / f"{os.getpid()}.in-use"

    def tell_again() -> None:
        while folder.exists():
            gc.collect()  # cycles that errors leave wait for many minutes
            malloc = mallinfo2()
            new.write_text(f"{malloc.uordblks + malloc.hblkhd} {sys.getallocatedblocks()}")
            new.replace(file)
            time.sleep(EVERY_S)

    threading.Thread(target=tell_again, daemon=True).start()


def told(folder: Path, pid: int) -> dict[str, int]:
    """``FIGURES`` of a process, empty if it has told nothing yet."""
    try:
        words = (folder / f"{pid}.in-use").read_text().split()
    except FileNotFoundError:
        return {}
    return dict(zip(FIGURES, map(int, words), strict=True))
