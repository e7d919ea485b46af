"""The state of a LoRA adapter's files, as a text that changes when the files change."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from kvass.engine import identity
from kvass.engine.weights import replaced_ns

STABLE_NS: Final = 20_000_000
"""How long files must have been unchanged. The clock of a file system is coarse, so a file that
changed just now may change again without a new time."""
MAX_ENTRIES: Final = 1000
"""The most files of a folder whose state is read."""


def files_state(path: str) -> str:
    """A text that changes whenever a file in the folder ``path`` changes, or a link or folder on
    the way to it. Empty if it is not known: there is no such folder, it has more than
    ``MAX_ENTRIES`` files, or something changed less than ``STABLE_NS`` ago. Two words: what
    ``same_files`` returns, and when a link or folder on the way was last moved."""
    try:
        return _state(path)
    except OSError:
        return ""


def same_files(state: str) -> str:
    """What is equal in two states, of any machines, if they are of the same files in a shared
    folder. Folders above a mount are each machine's own, and so are their times."""
    return state.partition(" ")[0]


def _state(path: str) -> str:
    folder = Path(os.path.expanduser(path)).absolute()  # as engines do
    files = sorted(folder.iterdir())
    if len(files) > MAX_ENTRIES:
        return ""
    states = [file.stat() for file in (folder, *files)]
    moved_ns = max(replaced_ns(file) for file in (folder, *filter(os.path.islink, files)))
    newest_ns = max(moved_ns, *(s.st_ctime_ns for s in states))
    if newest_ns > time.time_ns() - STABLE_NS:
        return ""
    parts = [os.path.realpath(folder), *(os.path.realpath(file) for file in files)]
    parts += [str((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)) for s in states]
    return f"{identity.digest(parts)} {moved_ns}"
