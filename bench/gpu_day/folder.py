"""The folder of a run, with its models, sockets and logs. It goes with the run, and if that was
killed, as the next one begins: a folder that nobody has locked is nobody's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "kvass-day-"
_UNLOCKED: Final = f".{PREFIX}"


@contextmanager
def own_folder(within: str) -> Iterator[str]:
    """A new one there. Until it is locked it has a name that ``remove_left`` does not look for."""
    new = Path(tempfile.mkdtemp(dir=within, prefix=_UNLOCKED))
    folder = new.with_name(new.name.removeprefix("."))
    lock = os.open(new, os.O_RDONLY)  # no process that is started inherits it
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(folder)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_left(*places: str) -> None:
    """The folders of runs that were killed."""
    for folder in (one for place in places for one in Path(place).glob(f"{PREFIX}*")):
        with suppress(OSError):  # another user's, locked, or gone meanwhile
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
