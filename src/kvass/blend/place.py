"""The segments of a prompt that can be loaded: the parts of found segments that have rows.

Law of this file: a segment ends before its first chunk without a row, and a segment whose first
chunk has none is left out. So every token of a placed segment can be loaded.
"""

from __future__ import annotations

from itertools import takewhile

from kvass.blend.plan import PlacedSegment
from kvass.messages import Segments


def chunk_keys(found: Segments, width: int) -> list[bytes]:
    """The keys of the found chunks, ``width`` bytes each, for a lookup. A chunk that stands in the
    prompt several times has one key in the list."""
    return list(dict.fromkeys(_digests(found, width)))


def place(
    found: Segments, width: int, chunk_tokens: int, rows: int
) -> tuple[list[PlacedSegment], list[list[int]]]:
    """The segments that can be loaded, and for each of them the rows of its chunks. The lookup of
    ``chunk_keys`` matched the first ``rows`` keys. Row ``n`` holds the chunk of key ``n``."""
    digests = _digests(found, width)
    row_of = {key: row for row, key in enumerate(chunk_keys(found, width)[:rows])}
    segments, rows_of_each, begin = list[PlacedSegment](), list[list[int]](), 0
    for segment in found.segments:
        end = begin + segment.length // chunk_tokens
        kept = list(takewhile(row_of.__contains__, digests[begin:end]))
        begin = end
        if kept:
            placed = PlacedSegment(
                segment.new_start,
                segment.old_start,
                len(kept) * chunk_tokens,
                segment.predecessor,
                kept[-1],
            )
            segments.append(placed)
            rows_of_each.append([row_of[key] for key in kept])
    return segments, rows_of_each


def _digests(found: Segments, width: int) -> list[bytes]:
    return [found.digests[at : at + width] for at in range(0, len(found.digests), width)]
