"""The disk tier's folder: who owns it, and what an earlier life left there.

Law of this file: only files named like ours are touched, and only by the one who holds the lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time
from itertools import accumulate
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from kvass.errors import ConfigError
from kvass.tiers.segment import SEGMENT, TABLE, SegmentFile
from kvass.types import Size

NOTES_BYTES: Final = 32 << 10
"""What the notes take at most; the ones set longest ago make room."""
_LOCK: Final = "lock"
_NOTES: Final = "notes"
_PATIENCE_S: Final = 2.0
_ORPHANS_S: Final = 60.0
"""It gives back its memory first: 0.1 to 0.3 s per GiB."""
_LOOK_S: Final = 0.02
_CHECK: Final = struct.Struct("<Q")
_NAME: Final = re.compile(f"([0-9a-f]{{8}})({re.escape(SEGMENT)}|{re.escape(TABLE)})")


def own(folder: Path) -> int:
    """Lock ``folder`` for this process; the descriptor that holds the lock. ``ConfigError``."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; make it, or mount what should be there")
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error
    try:
        _lock(fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d %d" % (os.getpid(), os.getppid()), 0)
    except OSError as error:
        owner, daemon = _owner(fd)
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise ConfigError(
                f"{folder}: in use by process {owner}, started by process {daemon}: "
                "a folder is one daemon's; choose another"
            ) from error
        raise ConfigError(f"{folder}: cannot be locked and written: {error.strerror}") from error
    return fd


def _lock(fd: int) -> None:
    """Lock it; who had it last may have been killed a moment ago, and be giving back an arena."""
    begun = time.monotonic()
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - begun
            if waited > _ORPHANS_S or (waited > _PATIENCE_S and not _is_orphan(*_owner(fd))):
                raise
            time.sleep(_LOOK_S)


def _owner(fd: int) -> tuple[str, str]:
    """Who wrote the lock file last, and who had started it."""
    words = os.pread(fd, 40, 0).decode(errors="replace").split()
    return (words[0], words[1]) if len(words) == 2 else ("?", "?")


def _is_orphan(owner: str, daemon: str) -> bool:
    """Whether a process has lost the daemon that started it; so it is ending."""
    try:
        status = Path(f"/proc/{int(owner)}/status").read_text()
    except (OSError, ValueError):  # of another namespace, for all we know
        return False
    return f"PPid:\t{daemon}\n" not in status


def check_capacity(folder: Path, capacity: int) -> None:
    """Refuse a capacity that this disk cannot have. ``ConfigError``."""
    disk = os.statvfs(folder)
    size = disk.f_blocks * disk.f_frsize
    if capacity > size:
        raise ConfigError(
            f"{folder}: a capacity of {Size(capacity)}, but the disk has {Size(size)}; choose less"
        )


def reopen_segments(folder: Path, capacity: int, direct: bool) -> tuple[list[SegmentFile], int]:
    """What an earlier life left, newest first, and the highest number ever used.

    What is damaged, or more than ``capacity`` (then the oldest), is removed. Raises
    ``ConfigError`` for a format newer than ours, having removed nothing, and for what the disk
    refuses.
    """
    numbers: set[int] = set()
    for path in folder.iterdir():
        if match := _NAME.fullmatch(path.name):
            numbers.add(int(match[1], 16))
    opened: list[SegmentFile] = []
    try:
        for number in sorted(numbers, reverse=True):
            opened += _reopen(folder, number, direct)
        kept = _within(capacity, opened)
        for number in numbers - {file.number for file in kept}:
            for suffix in (SEGMENT, TABLE):
                (folder / f"{number:08x}{suffix}").unlink(missing_ok=True)
    except (OSError, ConfigError) as error:
        for file in opened:
            file.close()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder}: {error}") from error
    for file in opened[len(kept) :]:
        file.close()
    return kept, max(numbers, default=0)


def read_note(folder: Path, name: str) -> bytes | None:
    """What ``write_note`` kept last. Raises ``OSError``."""
    return _notes(folder).get(name)


def write_note(folder: Path, name: str, value: bytes) -> None:
    """Keep a note, past any power loss; one caller at a time. Raises ``OSError``."""
    notes = _notes(folder)
    notes.pop(name, None)  # so that it becomes the last
    notes[name] = value
    while len(raw := msgspec.msgpack.encode(notes)) > NOTES_BYTES - _CHECK.size:
        del notes[next(iter(notes))]
    written = folder / (_NOTES + ".new")
    with open(written, "wb") as file:
        file.write(_CHECK.pack(xxhash.xxh3_64_intdigest(raw)) + raw)
        file.flush()
        os.fsync(file.fileno())
    os.replace(written, folder / _NOTES)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _notes(folder: Path) -> dict[str, bytes]:
    """All notes, the one set longest ago first; none, if the file is not as it was written."""
    try:
        with open(folder / _NOTES, "rb") as file:
            raw = file.read(NOTES_BYTES)
    except FileNotFoundError:
        return {}
    if raw[: _CHECK.size] != _CHECK.pack(xxhash.xxh3_64_intdigest(raw[_CHECK.size :])):
        return {}
    return msgspec.msgpack.decode(raw[_CHECK.size :], type=dict[str, bytes])


def _within(capacity: int, files: list[SegmentFile]) -> list[SegmentFile]:
    """The first of ``files`` that fit together."""
    sums = accumulate(file.bytes for file in files)
    return [file for file, total in zip(files, sums, strict=True) if total <= capacity]


def _reopen(folder: Path, number: int, direct: bool) -> list[SegmentFile]:
    try:
        file = SegmentFile.reopen(folder, number, direct)
    except FileNotFoundError:  # its table is left alone
        file = None
    return [file] if file is not None else []
