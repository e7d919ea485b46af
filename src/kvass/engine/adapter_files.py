"""The files of a LoRA adapter: what they hold, and whether they changed.

An adapter is a local folder in PEFT's format, or a name on the Hugging Face Hub. These functions
read the file system, so only the thread of ``adapters.py`` calls them.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvass.engine import identity

CONFIG: Final = "adapter_config.json"


@dataclass(frozen=True)
class AdapterFiles:
    """``content`` is equal for equal adapters in any engine. ``state`` changes whenever one of the
    files does; ``newest_ns`` is the time of the last change."""

    content: str
    state: str
    newest_ns: int


def read(path: str, before: AdapterFiles | None = None) -> AdapterFiles:
    """The adapter at the path that the engine was given: a local folder by the contents of its
    files, anything else by its name and commit on the Hub.

    Files that are still in the state ``before`` are not read again. An engine fetches the newest
    commit whenever it loads an adapter by name. Which one that is can be told beforehand only if
    the Hub is offline. Raises ``identity.Indescribable`` if it is not, and OSError if there is
    nothing to read.
    """
    folder = Path(os.path.expanduser(path))  # as engines do: what cannot be expanded is left
    if not (path.startswith(("/", "~")) or folder.exists()):
        return _on_the_hub(path)
    now = _state(folder)
    if before is not None and now == (before.state, before.newest_ns):
        return before
    parts = []
    for file in _files(folder):
        with file.open("rb") as opened:
            parts += [file.name, hashlib.file_digest(opened, "sha256").hexdigest()]
    if _state(folder) != now:
        raise OSError("its files are being changed")
    return AdapterFiles(identity.digest(["local", *parts]), *now)


def _files(folder: Path) -> list[Path]:
    return [folder / CONFIG, *sorted(folder.glob("adapter_model.*"))]


def _state(folder: Path) -> tuple[str, int]:
    """A digest that changes with the files and with links on the way to them, and the time of the
    last change."""
    files = _files(folder)
    states = [file.stat() for file in files]
    states += [p.lstat() for p in (folder, *folder.parents, *files) if p.is_symlink()]
    parts = [os.path.realpath(folder), *(file.name for file in files)]
    for state in states:
        parts += [str(state.st_size), str(state.st_mtime_ns), str(state.st_ctime_ns)]
    return identity.digest(parts), max(state.st_ctime_ns for state in states)


def _on_the_hub(name: str) -> AdapterFiles:
    # Engines bring this package; kvass itself does not depend on it.
    from huggingface_hub import constants, try_to_load_from_cache

    if not constants.HF_HUB_OFFLINE:
        raise identity.Indescribable(
            "no local folder; give one, or fetch it and set HF_HUB_OFFLINE"
        )
    found = try_to_load_from_cache(name, CONFIG)
    if not isinstance(found, str):
        raise FileNotFoundError("no local folder, nor was it fetched")
    snapshot = Path(found).parent
    chosen = snapshot.parent.parent / "refs" / "main"
    commit = identity.digest(["hub", name, snapshot.name])
    return AdapterFiles(commit, commit, chosen.stat().st_ctime_ns)
