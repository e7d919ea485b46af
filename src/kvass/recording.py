"""The lines of a recording: what ``kvass serve --record`` writes and ``kvass simulate`` reads.

Law of this file: a recording reveals nothing of the prompts. It has no tokens. Instead of chunk
hashes and request ids it has keyed hashes of them; the key is random for each recording, and is not
kept.

A recording is JSON lines in order of time. ``t`` is in seconds since the recording began. ``keys``
are of ``KEY_BYTES`` each, in base64. Equal keys of one engine mean that the prompts are equal up to
the chunk's end.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvass.kinds import GroupKind

KEY_BYTES: Final = 8


class Line(msgspec.Struct, tag_field="kind", omit_defaults=True):
    """A line of a recording. ``engine``: the number of its namespace."""

    engine: int


class Group(msgspec.Struct, omit_defaults=True):
    """A layer group. ``row_bytes`` is the size of a row, all shards together."""

    kind: GroupKind
    block_tokens: int
    row_bytes: int
    window_tokens: int = 0


class EngineLine(Line, tag="engine"):
    """A namespace. This line comes before all other lines of the namespace."""

    chunk_tokens: int
    groups: tuple[Group, ...]


class LookupLine(Line, tag="lookup"):
    """A prompt was looked up, and its request got blocks. The keys of all its chunks, and of the
    blocks after the last one."""

    t: float
    request: int
    keys: bytes
    blocks: bytes = b""


class StoreLine(Line, tag="store"):
    """An engine asked to store a request's chunks from ``first`` on, in the layer groups of the bit
    mask ``groups``. ``blocks``: the keys of the blocks of these chunks, and of the blocks after the
    last one; empty if hits end with a chunk."""

    t: float
    request: int
    first: int
    keys: bytes
    groups: int = 1
    blocks: bytes = b""


class LostLine(Line, tag="lost"):
    """A number of messages before this line is missing, because the disk was too slow."""

    messages: int


AnyLine = EngineLine | LookupLine | StoreLine | LostLine
