"""What files hold: their SHA-256, and whether they changed since this process started.

Laws of this file:

- A digest is that of the content. If the Hugging Face Hub's client noted it and the file was not
  written to since then, it is taken from there; else it is computed.
- A computed digest is remembered in the user's cache folder, by the file's device, inode, size and
  times. Processes that need the same one at the same time compute it once.
- Nothing here needs the cache folder: without it each process computes for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SHA256: Final = re.compile("[0-9a-f]{64}")
BLOB: Final = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""How the Hub's client names a blob: by the SHA-1 that git has of a small file, or by SHA-256."""
PIECE_BYTES: Final = 1 << 20
"""Read and hashed at a time; after each we may be told to stop."""
AGAIN_S: Final = 0.05
"""How often we look whether another process has computed a digest."""
LOADING_NS: Final = 100_000_000
"""No process has read weights so soon after its start. It covers the coarseness of both clocks."""
_imported_ns: Final = time.time_ns()


class Stopped(Exception):
    """The digest is not needed any more."""


@dataclass(frozen=True)
class Seen:
    """A look at files. ``states`` differ if anything was changed or replaced between two looks;
    ``changed_ns`` is when that was last, by the file system's clock."""

    states: Mapping[str, tuple[int, ...]]
    changed_ns: int


def started_ns() -> int:
    """When this process started, by this machine's clock; a little later, see ``LOADING_NS``."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError):
        return _imported_ns
    return min(time.time_ns() - int(age_s * 1e9) + LOADING_NS, _imported_ns)


def look(root: Path, files: Mapping[str, Path]) -> Seen:
    """The present state of ``files``, which lie in the folder ``root``. Raises OSError."""
    states, changed_ns = {}, replaced_ns(root)
    for name, file in files.items():
        state = file.stat()
        states[name] = _key(state)
        if not _blob(file, state):  # what a blob of the Hub's cache holds, its name says
            link_ns = replaced_ns(file) if file.is_symlink() else 0
            changed_ns = max(changed_ns, state.st_ctime_ns, link_ns)
    return Seen(states, changed_ns)


def replaced_ns(path: Path) -> int:
    """When a link on the way to ``path`` was last set, or a folder on the way was last moved.

    What is put into a folder changes both of its times, a move only one of them.
    """
    newest, left = 0, 40
    while (link := _first_link(path)) is not None and left:
        newest = max(newest, link.lstat().st_ctime_ns)
        target = link.parent / os.readlink(link) / path.relative_to(link)
        path, left = Path(os.path.normpath(target)), left - 1
    for folder in (path, *path.parents):
        state = folder.stat()
        if folder.is_dir() and state.st_ctime_ns > state.st_mtime_ns:
            newest = max(newest, state.st_ctime_ns)
    return newest


def _first_link(path: Path) -> Path | None:
    return next((one for one in (*reversed(path.parents), path) if one.is_symlink()), None)


def noted(root: Path, name: str, file: Path) -> str:
    """The digest that the Hub's client noted of ``file``, empty if there is none to rely on.

    In the Hub's cache a file is a link to a blob, which a digest names; in a folder that was
    downloaded to, a note lies beside it. Whoever writes to the file afterwards makes it younger
    than the link or the note. Small files are named by another digest. Raises OSError.
    """
    state = file.stat()
    if blob := _blob(file, state):
        return blob if SHA256.fullmatch(blob) else ""
    note = root / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    try:
        _, digest, written_s, *_ = note.read_text().split()
        older = state.st_ctime_ns <= float(written_s) * 1e9
    except (OSError, ValueError):
        return ""
    return digest if older and SHA256.fullmatch(digest) else ""


def _blob(file: Path, state: os.stat_result) -> str:
    """The name of the blob that ``file`` links to, unless it was written to since. Links of others
    may lead to a folder of that name too."""
    if not file.is_symlink():
        return ""
    blob = file.parent / os.readlink(file)
    named = blob.parent.name == "blobs" and BLOB.fullmatch(blob.name)
    settled = state.st_ctime_ns <= file.lstat().st_ctime_ns
    return blob.name if named and settled and "snapshots" in file.parent.resolve().parts else ""


# ---------------------------------------------------------------- hashing


def sha256(file: Path, stopped: Callable[[], bool]) -> str:
    """The digest of ``file``, remembered or computed. Raises OSError, and ``Stopped`` if so."""
    state = file.stat()
    if (entry := _open_entry(state)) < 0:
        return _compute(file, stopped)
    try:
        return _remembered(file, state, entry, stopped)
    finally:
        os.close(entry)


def _remembered(file: Path, state: os.stat_result, entry: int, stopped: Callable[[], bool]) -> str:
    """What the file ``entry`` says, or the one process that has locked it writes into it."""
    locked = False
    while not SHA256.fullmatch(known := os.pread(entry, 65, 0).decode("ascii", "replace")):
        if locked:
            known = _compute(file, stopped)
            if _key(file.stat()) == _key(state):
                _write(entry, known)
            return known
        if not (locked := _lock(entry)):
            if stopped():
                raise Stopped
            time.sleep(AGAIN_S)
    return known


def _open_entry(state: os.stat_result) -> int:
    """The descriptor of the file for the digest of a file in ``state``; -1 if none can be had.

    File systems that keep whole seconds only are often images that are built so that all times are
    equal: on them two files may look the same, so nothing is remembered.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not base.is_absolute() or state.st_ctime_ns % 1_000_000_000 == 0:
        return -1
    folder = base / "kvass" / "weights"
    name = hashlib.sha256(repr(_key(state)).encode()).hexdigest()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1


def _key(state: os.stat_result) -> tuple[int, ...]:
    times = state.st_mtime_ns, state.st_ctime_ns
    return state.st_dev, state.st_ino, state.st_size, *times


def _lock(entry: int) -> bool:
    """False: another process has it. A file system without locks is no reason to wait."""
    try:
        fcntl.flock(entry, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _write(entry: int, digest: str) -> None:
    with suppress(OSError):  # a full disk: whoever needs it next computes it again
        os.pwrite(entry, digest.encode(), 0)


def _compute(file: Path, stopped: Callable[[], bool]) -> str:
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(piece):
            if stopped():
                raise Stopped
            digest.update(piece[:count])
    return digest.hexdigest()
