"""SHA-256 of files, and whether they changed since this process started.

- If the Hugging Face Hub's client noted a file's digest, and the file was not written to since, the
  noted digest is used. Otherwise it is computed.
- A computed digest is cached in the user's cache folder. The key is the file's device, inode, size
  and times. Processes that need the same digest at the same time compute it once.
- The cache folder is optional: without it each process computes its own.
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
"""How much is read and hashed at a time. After each piece hashing may be stopped."""
POLL_S: Final = 0.05
"""How often to look whether another process has computed a digest."""
LOADING_NS: Final = 100_000_000
"""Added to a process's start time: no process reads weights sooner, and both clocks are coarse."""
_imported_ns: Final = time.time_ns()


class Stopped(Exception):
    """Hashing was stopped, because nobody needs the digest any more."""


@dataclass(frozen=True)
class Snapshot:
    """The state of files. ``states`` differ between two snapshots if any file was changed or
    replaced; ``changed_ns`` is the time of the last change, by the file system's clock."""

    states: Mapping[str, tuple[int, ...]]
    changed_ns: int


def started_ns() -> int:
    """When this process started, plus ``LOADING_NS``: nanoseconds since the epoch."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError):
        return _imported_ns
    return min(time.time_ns() - int(age_s * 1e9) + LOADING_NS, _imported_ns)


def look(root: Path, files: Mapping[str, Path]) -> Snapshot:
    """The present state of ``files``, which lie in the folder ``root``. Raises OSError."""
    states, changed_ns = {}, replaced_ns(root)
    for name, file in files.items():
        state = file.stat()
        states[name] = _key(state)
        if not _blob(file, state):  # a blob of the Hub's cache is named by its content
            link_ns = replaced_ns(file) if file.is_symlink() else 0
            changed_ns = max(changed_ns, state.st_ctime_ns, link_ns)
    return Snapshot(states, changed_ns)


def replaced_ns(path: Path) -> int:
    """When a symbolic link on the path was last set, or a folder on it was last moved.

    A new entry changes both times of a folder, a move changes its ctime only.
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
    return next((part for part in (*reversed(path.parents), path) if part.is_symlink()), None)


def noted(root: Path, name: str, file: Path) -> str:
    """The SHA-256 that the Hub's client noted for ``file``; empty if there is none to rely on.

    In the Hub's cache a file is a link to a blob that is named by its digest (a small file's by
    its SHA-1). In a folder that was downloaded to, the client keeps a note in ``.cache``. A file
    that was written to later is newer than the link or the note. Raises OSError.
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
    """The name of the Hub's blob that ``file`` links to; empty if it was written to since, or if
    the link is not one of the Hub's cache."""
    if not file.is_symlink():
        return ""
    blob = file.parent / os.readlink(file)
    named = blob.parent.name == "blobs" and BLOB.fullmatch(blob.name)
    settled = state.st_ctime_ns <= file.lstat().st_ctime_ns
    return blob.name if named and settled and "snapshots" in file.parent.resolve().parts else ""


# ---------------------------------------------------------------- hashing


def sha256(file: Path, stopped: Callable[[], bool]) -> str:
    """The digest of ``file``, cached or computed. Raises OSError, and ``Stopped`` when ``stopped``
    says so."""
    state = file.stat()
    if (entry := _open_entry(state)) < 0:
        return _compute(file, stopped)
    try:
        return _cached(file, state, entry, stopped)
    finally:
        os.close(entry)


def _cached(file: Path, state: os.stat_result, entry: int, stopped: Callable[[], bool]) -> str:
    """The digest in the cache file ``entry``. If it is empty, the process that locks it computes
    the digest, and the others wait."""
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
            time.sleep(POLL_S)
    return known


def _open_entry(state: os.stat_result) -> int:
    """The descriptor of the cache file for a file in ``state``; -1 if there can be none.

    A file system that keeps whole seconds is often an image whose times are all equal. There two
    files may look the same, so nothing is cached.
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
    """False: another process holds the lock. Without locks in the file system nobody waits."""
    try:
        fcntl.flock(entry, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _write(entry: int, digest: str) -> None:
    with suppress(OSError):  # a full disk: the next process computes it again
        os.pwrite(entry, digest.encode(), 0)


def _compute(file: Path, stopped: Callable[[], bool]) -> str:
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(piece):
            if stopped():
                raise Stopped
            digest.update(piece[:count])
    return digest.hexdigest()
