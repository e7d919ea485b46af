"""The lines of a recording: what ``kvass serve --record`` writes and ``kvass simulate`` reads.

Law of this file: a recording reveals no prompts. It has no tokens. Chunk hashes and request ids are
hashed with a random key, which is new for each recording and is stored nowhere.

JSON lines, in order of time. ``t``: seconds since the recording began. ``keys``: ``KEY_BYTES``
each, in base64; equal keys of one engine mean equal prompts up to the chunk's end.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvass.types import GroupKind

KEY_BYTES: Final = 8


class Line(msgspec.Struct, tag_field="kind", omit_defaults=True):
    """A line of a recording. ``engine`` is the number of a namespace."""

    engine: int


class Group(msgspec.Struct, omit_defaults=True):
    """A layer group. ``row_bytes`` is the size of a row, with all shards."""

    kind: GroupKind
    block_tokens: int
    row_bytes: int
    window_tokens: int = 0


class EngineLine(Line, tag="engine"):
    """A namespace. This line comes before all others of the namespace."""

    chunk_tokens: int
    groups: tuple[Group, ...]


class LookupLine(Line, tag="lookup"):
    """A prompt was looked up: the keys of all its chunks, and of the blocks after the last one."""

    t: float
    request: int
    keys: bytes
    blocks: bytes = b""


class StoreLine(Line, tag="store"):
    """A request to store rows of the layer groups ``groups`` (a bit mask), for chunks from
    ``first`` on.

    ``blocks`` are the keys of the blocks of these chunks, and of those after the last chunk. It is
    empty if hits end with a chunk.
    """

    t: float
    request: int
    first: int
    keys: bytes
    groups: int = 1
    blocks: bytes = b""


class LostLine(Line, tag="lost"):
    """The number of messages before this line that are missing, because the disk was too slow."""

    messages: int


AnyLine = EngineLine | LookupLine | StoreLine | LostLine
