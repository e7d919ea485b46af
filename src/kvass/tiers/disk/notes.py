"""The notes of the disk tier: one file, synced and replaced as a whole.

The file holds a checksum, then a msgpack map from name to value. The map is ordered: the note that
was set longest ago is first.
"""

from __future__ import annotations

import os
import struct
from typing import Final

import msgspec
import xxhash

from kvass.tiers.disk.folder import Folder

NOTES_BYTES: Final = 32 << 10
"""The largest size of the file. If it would be exceeded, the notes set longest ago are dropped."""
_NOTES: Final = "notes"
_CHECK: Final = struct.Struct("<Q")


def read_note(folder: Folder, name: str) -> bytes | None:
    """The value that ``write_note`` stored last under ``name``, or None. Raises ``OSError``."""
    return _notes(folder).get(name)


def write_note(folder: Folder, name: str, value: bytes) -> None:
    """Store a note so that it survives a power loss. Only one thread may call this at a time.
    Raises ``OSError``."""
    notes = _notes(folder)
    notes.pop(name, None)  # so that it becomes the last
    notes[name] = value
    while len(raw := msgspec.msgpack.encode(notes)) > NOTES_BYTES - _CHECK.size:
        del notes[next(iter(notes))]
    folder.replace(_NOTES, _CHECK.pack(xxhash.xxh3_64_intdigest(raw)) + raw)


def _notes(folder: Folder) -> dict[str, bytes]:
    """All notes, the one set longest ago first. Empty if the file is absent or fails its
    checksum."""
    try:
        with os.fdopen(folder.open(_NOTES, os.O_RDONLY), "rb") as file:
            raw = file.read(NOTES_BYTES)
    except FileNotFoundError:
        return {}
    if raw[: _CHECK.size] != _CHECK.pack(xxhash.xxh3_64_intdigest(raw[_CHECK.size :])):
        return {}
    return msgspec.msgpack.decode(raw[_CHECK.size :], type=dict[str, bytes])
