"""The name of an engine's weights, computed from the content of their files. Equal files have equal
names in any folder.

Laws of this file:

- The name is that of the weights that the engine has loaded. Files that changed since the engine
  began, or while they are read here, get no name.
- Each process of an engine computes the same name by itself, and trusts nothing that another user
  of the machine could have written. Paths and times of files are not part of the name.
- The engine's own threads read no weight file. Only daemon threads do.

The content of a file is its SHA-256. For a file from the Hub it is the blob's name that the Hub's
client gave it; for others it is computed, once in each process.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from kvass.engine import identity
from kvass.engine.boundary import on_thread
from kvass.engine.identity import Indescribable

NAME_WAIT_S: Final = 2.0
"""How long the start of an engine waits for the name. Large weights take longer."""
THREAD: Final = "kvass-weights"
NAME_IT: Final = "set kvass.model_id to a name of your own for these weights"
BLOB: Final = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""The names that the Hub's client gives to blobs: git's SHA-1 of a small file, or a SHA-256."""
PIECE_BYTES: Final = 1 << 20
"""How many bytes of a file are read at a time."""
MAX_THREADS: Final = 8
"""The most hashing threads of one process. Each hashes one file at a time, without the GIL."""
START_MARGIN_NS: Final = 100_000_000
"""A margin that is added to the start time of a process, because its clock and that of the file
system are coarse. No process reads weights so soon after its start."""
CLOCK_REALTIME_COARSE: Final = 5
"""Linux's number of the clock that file systems read. It ticks every 1 to 10 ms."""


class WeightFiles(Protocol):
    """The files of weights: a folder, or one file."""

    @property
    def root(self) -> Path:
        """The folder or the file."""

    def files(self) -> Mapping[str, Path]:
        """The files that are part of the name, by path relative to the root, in a fixed order.
        Empty if none of them has weights. Raises OSError."""


Source = str | WeightFiles
"""The weights of one model: their name if it is known already, else their files."""


def begin(
    sources: tuple[Source, ...], processes: int = 1, since_ns: int | None = None
) -> Future[str]:
    """Begin to compute the name of these weights on threads, and wait for it up to ``NAME_WAIT_S``.
    ``processes``: how many processes of this machine do the same and share its cores. ``since_ns``:
    when the engine began, if that is known (``now_ns``); else the start of this process. Raises
    ``Indescribable`` if the computation has failed by then. If it fails later, the future has the
    exception. Cancel the future if the name is not needed any more.
    """
    cores = len(os.sched_getaffinity(0))
    threads = max(1, min(MAX_THREADS, cores // processes))
    name = on_thread(THREAD, name_of, sources, threads, since_ns)
    with suppress(TimeoutError):
        name.result(NAME_WAIT_S)
    return name


def name_of(sources: tuple[Source, ...], threads: int = 1, since_ns: int | None = None) -> str:
    """The name of these weights; ``since_ns`` as for ``begin``. Raises ``Indescribable``."""
    since_ns = started_ns() if since_ns is None else since_ns
    try:
        return identity.canonical(
            [
                source if isinstance(source, str) else _content(source, threads, since_ns)
                for source in sources
            ]
        )
    except OSError as error:
        raise Indescribable(f"the weight files cannot be read: {error}") from error


def _content(weights: WeightFiles, threads: int, since_ns: int) -> str:
    files = weights.files()
    if not files:
        raise Indescribable(f"no weight files are in {weights.root}: {NAME_IT}")
    before = _states(weights.root, files, since_ns)
    digests = _digests(files, threads)
    if _states(weights.root, weights.files(), since_ns) != before:
        raise _changed(weights.root)
    parts = ((name, digests[name]) for name in files)
    return "sha256:" + identity.digest(text for pair in parts for text in pair)


def _changed(root: Path) -> Indescribable:
    return Indescribable(
        f"the weight files in {root} changed since this engine started, so it may have "
        "loaded others: restart the engine"
    )


# ---------------------------------------------------------------- changes


def _states(root: Path, files: Mapping[str, Path], since_ns: int) -> dict[str, tuple[int, ...]]:
    """The states of the files, by name: they differ if a file was changed or replaced. Raises
    OSError, and ``Indescribable`` if a file was changed or replaced after ``since_ns``."""
    states, changed_ns = {}, replaced_ns(root)
    for name, file in files.items():
        state = file.stat()
        states[name] = _key(state)
        if not _blob(file):  # a blob of the Hub's cache is named by its content
            link_ns = replaced_ns(file) if file.is_symlink() else 0
            changed_ns = max(changed_ns, state.st_ctime_ns, link_ns)
    if changed_ns > since_ns:
        raise _changed(root)
    return states


def now_ns() -> int:
    """The newest time of files that are surely older than this moment, in nanoseconds since the
    epoch. A file that changes later has a later time."""
    return time.clock_gettime_ns(CLOCK_REALTIME_COARSE) - 1


def _read_start_ns() -> int:
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError):
        return now_ns()
    return min(time.time_ns() - int(age_s * 1e9) + START_MARGIN_NS, now_ns())


_started_ns: Final = _read_start_ns()
"""Read at the import, so that a fork has the time of the process that has loaded its code."""


def started_ns() -> int:
    """When this process started, or the one that it was forked from if that has imported this
    module, plus ``START_MARGIN_NS``, in nanoseconds since the epoch."""
    return _started_ns


def replaced_ns(path: Path) -> int:
    """When a symbolic link on ``path`` was last set, or a folder on it was last moved, in
    nanoseconds since the epoch. A move of a folder changes only its ctime; a new entry in it
    changes its mtime, too."""
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

_digest_of: dict[tuple[int, str, tuple[int, ...]], Future[str]] = {}
"""The digests that this process has computed or is computing, by process id, path and state of the
file. The process id is part of the key because a fork has no threads of its parent. If an engine's
scheduler and worker are one process, they name the same files."""


def _digests(files: Mapping[str, Path], threads: int) -> dict[str, str]:
    """The digests of ``files``, by name. Raises OSError."""
    left = deque(sorted(files, key=lambda name: files[name].stat().st_size, reverse=True))
    found: dict[str, str] = {}

    def work() -> None:
        try:
            for name in _popped(left):
                found[name] = _sha256(files[name])
        finally:
            left.clear()  # if one thread failed, the others stop

    others = [on_thread(THREAD, work) for _ in range(min(threads, len(left)) - 1)]
    work()
    for other in others:
        other.result()
    return found


def _popped(left: deque[str]) -> Iterator[str]:
    with suppress(IndexError):
        while True:
            yield left.popleft()


def _blob(file: Path) -> str:
    """The name of the blob in the Hub's cache to which ``file`` links. Empty if it is no such link,
    or if the blob was changed after the link was made."""
    if not file.is_symlink():
        return ""
    blob = file.parent / os.readlink(file)
    named = blob.parent.name == "blobs" and BLOB.fullmatch(blob.name)
    unchanged = file.stat().st_ctime_ns <= file.lstat().st_ctime_ns
    return blob.name if named and unchanged and "snapshots" in file.parent.resolve().parts else ""


def _sha256(file: Path) -> str:
    """The SHA-256 of ``file``: the name of its blob, or computed once. Raises OSError."""
    if len(blob := _blob(file)) == 64:
        return blob
    mine: Future[str] = Future()
    key = os.getpid(), str(file), _key(file.stat())
    if (known := _digest_of.setdefault(key, mine)) is not mine:
        return known.result()
    try:
        mine.set_result(_compute(file))
    except OSError as error:
        mine.set_exception(error)
        del _digest_of[key]
    return mine.result()


def _key(state: os.stat_result) -> tuple[int, ...]:
    times = state.st_mtime_ns, state.st_ctime_ns
    return state.st_dev, state.st_ino, state.st_size, *times


def _compute(file: Path) -> str:
    with file.open("rb", buffering=0) as opened:
        return hashlib.file_digest(opened, "sha256", _bufsize=PIECE_BYTES).hexdigest()
