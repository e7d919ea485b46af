"""What an earlier life left in the disk tier's folder, and the notes there.

Law of this file: only files named like ours are touched, and only by the one who holds the lock.
"""

from __future__ import annotations

import os
import re
import struct
from itertools import accumulate
from typing import Final

import msgspec
import xxhash

from kvass.errors import ConfigError
from kvass.tiers.disk.folder import Folder
from kvass.tiers.disk.segment import SEGMENT, TABLE, SegmentFile
from kvass.types import Size

NOTES_BYTES: Final = 32 << 10
"""What the notes take at most; the ones set longest ago make room."""
_NOTES: Final = "notes"
_CHECK: Final = struct.Struct("<Q")
_NAME: Final = re.compile(f"([0-9a-f]{{8}})({re.escape(SEGMENT)}|{re.escape(TABLE)})")


def check_capacity(folder: Folder, capacity: int) -> None:
    """Refuse a capacity that this disk cannot have. ``ConfigError``."""
    disk = os.statvfs(folder.fd)
    size = disk.f_blocks * disk.f_frsize
    if capacity > size:
        raise ConfigError(
            f"{folder.path}: a capacity of {Size(capacity)}, but the disk has {Size(size)}; "
            "choose less"
        )


def reopen_segments(folder: Folder, capacity: int, direct: bool) -> tuple[list[SegmentFile], int]:
    """What an earlier life left, newest first, and the highest number ever used.

    What is damaged, or more than ``capacity`` (then the oldest), is removed. Raises
    ``ConfigError`` for a format newer than ours, having removed nothing, and for what the disk
    refuses.
    """
    numbers: set[int] = set()
    opened: list[SegmentFile] = []
    try:
        for name in folder.names():
            if match := _NAME.fullmatch(name):
                numbers.add(int(match[1], 16))
        for number in sorted(numbers, reverse=True):
            opened += _reopen(folder, number, direct)
        kept = _within(capacity, opened)
        for number in numbers - {file.number for file in kept}:
            for suffix in (SEGMENT, TABLE):
                folder.unlink(f"{number:08x}{suffix}")
    except (OSError, ConfigError) as error:
        for file in opened:
            file.close()
        if isinstance(error, ConfigError):
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise ConfigError(f"{folder.path}: {where}{error.strerror}") from error
    for file in opened[len(kept) :]:
        file.close()
    return kept, max(numbers, default=0)


def read_note(folder: Folder, name: str) -> bytes | None:
    """What ``write_note`` kept last. Raises ``OSError``."""
    return _notes(folder).get(name)


def write_note(folder: Folder, name: str, value: bytes) -> None:
    """Keep a note, past any power loss; one caller at a time. Raises ``OSError``."""
    notes = _notes(folder)
    notes.pop(name, None)  # so that it becomes the last
    notes[name] = value
    while len(raw := msgspec.msgpack.encode(notes)) > NOTES_BYTES - _CHECK.size:
        del notes[next(iter(notes))]
    folder.put(_NOTES, _CHECK.pack(xxhash.xxh3_64_intdigest(raw)) + raw)


def _notes(folder: Folder) -> dict[str, bytes]:
    """All notes, the one set longest ago first; none, if the file is not as it was written."""
    try:
        with os.fdopen(folder.open(_NOTES, os.O_RDONLY), "rb") as file:
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


def _reopen(folder: Folder, number: int, direct: bool) -> list[SegmentFile]:
    try:
        file = SegmentFile.reopen(folder, number, direct)
    except FileNotFoundError:  # its table is left alone
        file = None
    return [file] if file is not None else []
