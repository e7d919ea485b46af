"""A name for an engine's weights by their content: equal files have equal names, wherever they lie.

Laws of this file:

- A name says what the engine has loaded, or there is no name: none for files that changed since
  this process started, or while they are read here.
- Each process of an engine finds the same name by itself, and believes nothing that another user
  of the machine could have written. Paths and times of files do not count.
- The engine's own threads read no weight file. The threads that do keep no process from ending.

Files count by their SHA-256: a name that the Hub's client gave to one it fetched, or computed, once
in each process.
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

READY_S: Final = 2.0
"""How long the start of an engine waits for a name. Of many gigabytes it comes later."""
THREAD: Final = "kvass-weights"
NAME_IT: Final = "set kvass.model_id to a name of your own for these weights"
BLOB: Final = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""How the Hub's client names a blob: by the SHA-1 that git has of a small file, or by SHA-256."""
PIECE_BYTES: Final = 1 << 20
MAX_THREADS: Final = 8
"""Of one process. Each hashes one file at a time, for which it needs no GIL."""
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


def begin(sources: tuple[Source, ...], processes: int = 1) -> Future[str]:
    """Name these weights, on threads, and wait for that up to ``READY_S``. ``processes``: how many
    of this machine do the same and share its cores. Raises ``Indescribable`` if it has failed by
    then; it may also fail later. Cancel it to hear no more.
    """
    cores = len(os.sched_getaffinity(0))
    threads = max(1, min(MAX_THREADS, cores // processes))
    name = on_thread(THREAD, name_of, sources, threads)
    with suppress(TimeoutError):
        name.result(READY_S)
    return name


def name_of(sources: tuple[Source, ...], threads: int = 1) -> str:
    """The name of these weights. Raises ``Indescribable``."""
    try:
        return identity.canonical(
            [source if isinstance(source, str) else _content(source, threads) for source in sources]
        )
    except OSError as error:
        raise Indescribable(f"the weight files cannot be read: {error}") from error


def _content(weights: WeightFiles, threads: int) -> str:
    """The digest of the files' names and contents."""
    files = weights.files()
    if not files:
        raise Indescribable(f"no weight files are in {weights.root}: {NAME_IT}")
    before = _states(weights.root, files)
    digests = _digests(files, threads)
    if _states(weights.root, weights.files()) != before:
        raise _changed(weights.root)
    parts = ((name, digests[name]) for name in files)
    return "sha256:" + identity.digest(text for pair in parts for text in pair)


def _changed(root: Path) -> Indescribable:
    return Indescribable(
        f"the weight files in {root} changed since this engine started, so it may have "
        "loaded others: restart the engine"
    )


# ---------------------------------------------------------------- changes


def _states(root: Path, files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """What differs if one of the files is changed or replaced. Raises OSError, and
    ``Indescribable`` if that happened since this process started."""
    states, changed_ns = {}, replaced_ns(root)
    for name, file in files.items():
        state = file.stat()
        states[name] = _key(state)
        if not _blob(file):  # a blob of the Hub's cache is named by its content
            link_ns = replaced_ns(file) if file.is_symlink() else 0
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


def replaced_ns(path: Path) -> int:
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

_digest_of: dict[tuple[int, str, tuple[int, ...]], Future[str]] = {}
"""What this process computed, or is computing: by process (a fork has no threads of its parent's),
path and state of the file. In one process an engine's scheduler and its worker name the same."""


def _digests(files: Mapping[str, Path], threads: int) -> dict[str, str]:
    """The digests of ``files``, by name. Raises OSError."""
    left = deque(sorted(files, key=lambda name: files[name].stat().st_size, reverse=True))
    found: dict[str, str] = {}

    def work() -> None:
        try:
            for name in _popped(left):
                found[name] = _sha256(files[name])
        finally:
            left.clear()  # whoever failed has failed for all

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
    """The name of the blob in the Hub's cache that ``file`` links to; empty if it is no such link,
    or the blob was written to since."""
    if not file.is_symlink():
        return ""
    blob = file.parent / os.readlink(file)
    named = blob.parent.name == "blobs" and BLOB.fullmatch(blob.name)
    settled = file.stat().st_ctime_ns <= file.lstat().st_ctime_ns
    return blob.name if named and settled and "snapshots" in file.parent.resolve().parts else ""


def _sha256(file: Path) -> str:
    """The digest of ``file``: the name of its blob, or computed, once. Raises OSError."""
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
