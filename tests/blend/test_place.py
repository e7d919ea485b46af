"""Which segments can be loaded, by hand and against a rule token by token."""

from __future__ import annotations

import random

from kvass.blend.place import chunk_keys, place
from kvass.blend.plan import PlacedSegment
from kvass.messages import Segment, Segments

CHUNK, WIDTH = 16, 4


def found(*segments: tuple[int, int, str]) -> Segments:
    """Segments of ``(new_start, old_start, chunks)``; a letter names a chunk."""
    return Segments(
        segments=tuple(
            Segment(new, old, len(chunks) * CHUNK, b"before") for new, old, chunks in segments
        ),
        digests="".join(letter * WIDTH for *_, chunks in segments for letter in chunks).encode(),
    )


def test_a_chunk_that_stands_twice_is_asked_for_once_and_has_one_row() -> None:
    twice = found((5, 0, "ab"), (90, 16, "bc"))
    assert chunk_keys(twice, WIDTH) == [b"aaaa", b"bbbb", b"cccc"]
    segments, rows = place(twice, WIDTH, CHUNK, 3)
    assert rows == [[0, 1], [1, 2]]
    assert segments == [
        PlacedSegment(5, 0, 2 * CHUNK, b"before", b"bbbb"),
        PlacedSegment(90, 16, 2 * CHUNK, b"before", b"cccc"),
    ]


def test_a_segment_ends_before_its_first_chunk_without_a_row() -> None:
    some = found((0, 0, "abc"), (60, 0, "da"), (100, 32, "ad"))
    segments, rows = place(some, WIDTH, CHUNK, 2)
    assert rows == [[0, 1], [0]], "c and d have none"
    assert [(s.new_start, s.length, s.last) for s in segments] == [
        (0, 2 * CHUNK, b"bbbb"),
        (100, CHUNK, b"aaaa"),
    ]
    assert place(some, WIDTH, CHUNK, 0) == ([], [])


def test_every_chunk_of_a_placed_segment_is_the_one_that_was_found_there() -> None:
    for seed in range(200):
        rng, start, parts = random.Random(seed), 0, []
        for _ in range(rng.randint(0, 5)):
            start += rng.randint(0, 40)
            parts.append((start, rng.randint(0, 9) * CHUNK, rng.choices("abcdefg", k=3)))
            start += 3 * CHUNK
        those = found(*[(new, old, "".join(chunks)) for new, old, chunks in parts])
        keys, rows = chunk_keys(those, WIDTH), rng.randint(0, 7)
        stands = {new + at * CHUNK: c for new, _, cs in parts for at, c in enumerate(cs)}
        segments, rows_of_each = place(those, WIDTH, CHUNK, rows)
        loaded = {
            segment.new_start + at * CHUNK: keys[row]
            for segment, of_one in zip(segments, rows_of_each, strict=True)
            for at, row in enumerate(of_one)
        }
        known = keys[:rows]
        for new, _, chunks in parts:
            here = [c.encode() * WIDTH in known for c in chunks]
            kept = [all(here[: at + 1]) for at in range(3)]
            assert [new + at * CHUNK in loaded for at in range(3)] == kept
        assert all(key == stands[at].encode() * WIDTH for at, key in loaded.items())
