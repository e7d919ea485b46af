"""The notes of the disk tier, in one file that is synced and replaced as a whole.

The file has a checksum, then a msgpack map from name to value. The note that was set least recently
is first.
"""

from __future__ import annotations

import os
import struct
from typing import Final

import msgspec
import xxhash

from kvass.folder import Folder

NOTES_BYTES: Final = 32 << 10
"""The largest size of the file. The notes that were set least recently are dropped."""
_NOTES: Final = "notes"
_CHECK: Final = struct.Struct("<Q")


def write_note(folder: Folder, name: str, value: bytes) -> None:
    """Write a note durably: it survives a power loss. Not thread-safe. Raises ``OSError``."""
    notes = read_notes(folder)
    notes.pop(name, None)  # so that it becomes the last
    notes[name] = value
    while len(raw := msgspec.msgpack.encode(notes)) > NOTES_BYTES - _CHECK.size:
        del notes[next(iter(notes))]
    folder.replace(_NOTES, _CHECK.pack(xxhash.xxh3_64_intdigest(raw)) + raw)


def read_notes(folder: Folder) -> dict[str, bytes]:
    """Return all notes, the least recently set first. Empty if the file is absent or damaged.
    Raises ``OSError``."""
    try:
        with os.fdopen(folder.open(_NOTES, os.O_RDONLY), "rb") as file:
            raw = file.read(NOTES_BYTES)
    except FileNotFoundError:
        return {}
    if raw[: _CHECK.size] != _CHECK.pack(xxhash.xxh3_64_intdigest(raw[_CHECK.size :])):
        return {}
    return msgspec.msgpack.decode(raw[_CHECK.size :], type=dict[str, bytes])
