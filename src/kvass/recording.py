"""The lines of a recording: what ``kvass serve --record`` writes and ``kvass simulate`` reads.

Law of this file: a recording tells nothing of what was asked. It has no tokens, and keyed hashes of
chunk hashes and request ids; the key is drawn anew for each recording and kept nowhere.

JSON lines, in order of time. ``t``: seconds since the recording began. ``keys``: ``KEY_BYTES``
each, in base64; equal keys of one engine mean equal prompts up to the chunk's end.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvass.types import GroupKind

KEY_BYTES: Final = 8


class Line(msgspec.Struct, tag_field="kind", omit_defaults=True):
    """``engine``: a number for each namespace."""

    engine: int


class Group(msgspec.Struct, omit_defaults=True):
    """A layer group; ``row_bytes`` of all shards together."""

    kind: GroupKind
    block_tokens: int
    row_bytes: int
    window_tokens: int = 0


class EngineLine(Line, tag="engine"):
    """A namespace: comes before the first of its other lines."""

    chunk_tokens: int
    groups: tuple[Group, ...]


class LookupLine(Line, tag="lookup"):
    """A prompt was looked up: the keys of all its chunks, and of the blocks after the last one."""

    t: float
    request: int
    keys: bytes
    blocks: bytes = b""


class StoreLine(Line, tag="store"):
    """Rows were asked for, of groups ``groups`` (a bit mask), for a request's chunks from ``first``
    on. ``blocks``: the keys of their blocks, and of those after the last chunk; empty if hits end
    with a chunk."""

    t: float
    request: int
    first: int
    keys: bytes
    groups: int = 1
    blocks: bytes = b""


class LostLine(Line, tag="lost"):
    """So many messages before this one are not in the recording: the disk was too slow."""

    messages: int


AnyLine = EngineLine | LookupLine | StoreLine | LostLine
