"""A name for an engine's weights by their content: equal files have equal names, wherever they lie.

Laws of this file:

- A name says what the engine has loaded, or there is no name: none for files that changed since
  this process started, or while they are read here.
- Each process of an engine finds the same name by itself. Paths and times of files do not count.
- The engine's own threads read no weight file.

Files count by their SHA-256. It is cached in the user's cache folder, by the file's device, inode,
size and times. Processes that need it at the same time compute it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from kvass.engine import identity
from kvass.engine.boundary import on_thread
from kvass.engine.identity import Indescribable

READY_S: Final = 2.0
"""How long the start of an engine waits for a name. Of many gigabytes it comes later."""
NAME_IT: Final = "set kvass.model_id to a name of your own for these weights"
SHA256: Final = re.compile(b"[0-9a-f]{64}")
BLOB: Final = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""How the Hub's client names a blob: by the SHA-1 that git has of a small file, or by SHA-256."""
PIECE_BYTES: Final = 1 << 20
LOADING_NS: Final = 100_000_000
"""Added to a process's start time: no process reads weights sooner, and both clocks are coarse."""
_imported_ns: Final = time.time_ns()


class WeightFiles(Protocol):
    """Weights in a folder, or in one file."""

    @property
    def root(self) -> Path:
        """The folder or the file."""

    def files(self) -> Mapping[str, Path]:
        """The files that count, by name relative to the root, in a fixed order. Empty if none of
        them holds weights. Raises OSError."""


Source = str | WeightFiles
"""The weights of one model: their name, if it is known at once, or their files."""


def begin(sources: tuple[Source, ...]) -> Future[str]:
    """Name these weights, on a thread, and wait for that up to ``READY_S``. Raises
    ``Indescribable`` if it has failed by then; it may also fail later. Cancel it to hear no more.
    """
    name = on_thread("kvass-weights", name_of, sources)
    with suppress(TimeoutError):
        name.result(READY_S)
    return name


def name_of(sources: tuple[Source, ...]) -> str:
    """The name of these weights. Raises ``Indescribable``."""
    try:
        return identity.canonical(
            [source if isinstance(source, str) else _content(source) for source in sources]
        )
    except OSError as error:
        raise Indescribable(f"the weight files cannot be read: {error}") from error


def _content(weights: WeightFiles) -> str:
    """The digest of the files' names and contents."""
    files = weights.files()
    if not files:
        raise Indescribable(f"no weight files are in {weights.root}: {NAME_IT}")
    before = _states(weights.root, files)
    digests = {name: _sha256(file) for name, file in files.items()}
    if _states(weights.root, weights.files()) != before:
        raise _changed(weights.root)
    return "sha256:" + identity.digest(text for pair in digests.items() for text in pair)


def _changed(root: Path) -> Indescribable:
    return Indescribable(
        f"the weight files in {root} changed since this engine started, so it may have "
        "loaded others: restart the engine"
    )


# ---------------------------------------------------------------- changes


def _states(root: Path, files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """What differs if one of the files is changed or replaced. Raises OSError, and
    ``Indescribable`` if that happened since this process started."""
    states, changed_ns = {}, _replaced_ns(root)
    for name, file in files.items():
        state = file.stat()
        states[name] = _key(state)
        if not _blob(file):  # a blob of the Hub's cache is named by its content
            link_ns = _replaced_ns(file) if file.is_symlink() else 0
            changed_ns = max(changed_ns, state.st_ctime_ns, link_ns)
    if changed_ns > started_ns():
        raise _changed(root)
    return states


def started_ns() -> int:
    """When this process started, plus ``LOADING_NS``: nanoseconds since the epoch."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError):
        return _imported_ns
    return min(time.time_ns() - int(age_s * 1e9) + LOADING_NS, _imported_ns)


def _replaced_ns(path: Path) -> int:
    """When a symbolic link on the path was last set, or a folder on it was last moved: unlike a new
    entry, that changes only its ctime."""
    newest, left = 0, 40
    while left and (links := [p for p in (*reversed(path.parents), path) if p.is_symlink()]):
        newest = max(newest, links[0].lstat().st_ctime_ns)
        target = links[0].parent / os.readlink(links[0]) / path.relative_to(links[0])
        path, left = Path(os.path.normpath(target)), left - 1
    for folder in (path, *path.parents):
        state = folder.stat()
        if folder.is_dir() and state.st_ctime_ns > state.st_mtime_ns:
            newest = max(newest, state.st_ctime_ns)
    return newest


# ---------------------------------------------------------------- digests


def _blob(file: Path) -> str:
    """The name of the blob in the Hub's cache that ``file`` links to; empty if it is no such link,
    or the blob was written to since."""
    if not file.is_symlink():
        return ""
    blob = file.parent / os.readlink(file)
    named = blob.parent.name == "blobs" and BLOB.fullmatch(blob.name)
    settled = file.stat().st_ctime_ns <= file.lstat().st_ctime_ns
    return blob.name if named and settled and "snapshots" in file.parent.resolve().parts else ""


def _sha256(file: Path) -> str:
    """The digest of ``file``: the name of its blob, cached, or computed. Raises OSError."""
    if len(blob := _blob(file)) == 64:
        return blob
    state = file.stat()
    try:
        entry = os.open(_cache_file(state), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # no cache folder
        return _compute(file)
    try:
        with suppress(OSError):  # without locks in the file system nobody waits
            fcntl.flock(entry, fcntl.LOCK_EX)
        if SHA256.fullmatch(known := os.pread(entry, 65, 0)):
            return known.decode()
        digest = _compute(file)
        if _key(file.stat()) == _key(state):
            with suppress(OSError):  # a full disk: the next process computes it again
                os.pwrite(entry, digest.encode(), 0)
        return digest
    finally:
        os.close(entry)


def _cache_file(state: os.stat_result) -> Path:
    """Where the digest of a file in ``state`` is cached. Raises OSError if that cannot be: a file
    system that keeps whole seconds may be an image in which two files have equal states."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not base.is_absolute() or state.st_ctime_ns % 1_000_000_000 == 0:
        raise OSError("not cached")
    folder = base / "kvass" / "weights"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / hashlib.sha256(repr(_key(state)).encode()).hexdigest()


def _key(state: os.stat_result) -> tuple[int, ...]:
    times = state.st_mtime_ns, state.st_ctime_ns
    return state.st_dev, state.st_ino, state.st_size, *times


def _compute(file: Path) -> str:
    with file.open("rb", buffering=0) as opened:
        return hashlib.file_digest(opened, "sha256", _bufsize=PIECE_BYTES).hexdigest()
