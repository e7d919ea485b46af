"""The state of the files of a LoRA adapter: whether they are what they were."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from kvass.engine import identity
from kvass.engine.weights import replaced_ns

SETTLED_NS: Final = 20_000_000
"""A file that changed less than this before it is looked at may change again and keep its time,
because the clock of the file system is coarse."""
MAX_ENTRIES: Final = 1000


def files_state(path: str) -> str:
    """A text that changes with what lies at ``path``: with any file in this folder, and with links
    and folders on the way. Empty if that cannot be told: there is no such folder, it has too many
    files, or it changed just now."""
    try:
        return _state(path)
    except OSError:
        return ""


def _state(path: str) -> str:
    folder = Path(os.path.expanduser(path)).absolute()  # as engines do
    files = sorted(folder.iterdir())
    if len(files) > MAX_ENTRIES:
        return ""
    states = [file.stat() for file in (folder, *files)]
    moved_ns = max(replaced_ns(file) for file in (folder, *filter(os.path.islink, files)))
    newest_ns = max(moved_ns, *(s.st_ctime_ns for s in states))
    if newest_ns > time.time_ns() - SETTLED_NS:
        return ""
    parts = [os.path.realpath(folder), *(os.path.realpath(file) for file in files), str(moved_ns)]
    parts += [str((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)) for s in states]
    return identity.digest(parts)
