"""A view of the rows that a namespace has of one prompt. It looks the rows up once."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from kvass.core.matching.coverage import (
    BoolArray,
    checked_groups,
    first_chunk,
    longest_hit,
    whole_end,
)
from kvass.core.matching.keeping import Found
from kvass.core.rows.index import ABSENT
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_states import RowStates
from kvass.core.rows.row_table import READY, WRITING, ClassRows
from kvass.types import KEY_WORDS, I64Array, U64Array

NO_BLOCKS: Final = np.empty((0, KEY_WORDS), np.uint64)


_NO_ROWS: Final = np.empty(0, np.int64)


class Hit(NamedTuple):
    """A hit: ``chunks`` chunks from chunk 0 on, and ``blocks`` blocks of the next chunk.

    ``parts``: the rows that the engine may read, by row class. ``spares``: the rows of the spare
    chunks, which it does not read.
    """

    chunks: int
    blocks: int
    parts: tuple[ClassRows, ...]
    spares: tuple[ClassRows, ...]


NO_HIT: Final = Hit(0, 0, (), ())


class PrefixView:
    """The rows of a prompt's chunks in every layer group. It is stale after rows change.

    ``keys``: the keys of the prompt's chunks from chunk 0 on. ``first``: the first chunk that the
    engine does not have itself. ``spare``: with EAGLE or MTP, the number of chunks after a hit that
    must be present too; they are not part of the hit. ``rest``: the block hashes after the last
    chunk. ``start``: the block hashes of chunk ``first``.
    ``found``: by row class, the row of each chunk, or ``ABSENT``.
    """

    def __init__(
        self,
        rows: RowStates,
        ns: Namespace,
        keys: U64Array,
        first: int,
        spare: int = 0,
        rest: U64Array = NO_BLOCKS,
        start: U64Array = NO_BLOCKS,
    ) -> None:
        self._rows, self.ns, self.first, self.spare = rows, ns, first, spare
        self.keys, self.rest, self.start = keys, rest, start
        self._groups = [c.spec.layout for c in ns.classes]
        self.found: list[I64Array] = [c.index.find(keys) for c in ns.classes]

    def there(self, least: int = READY) -> list[BoolArray]:
        """By row class, which chunks have a row in state ``least`` or above."""
        return [self._rows.there(rows, least) for rows in self.found]

    def longest(self, there: list[BoolArray]) -> int:
        """The length of the longest hit in chunks, made of the chunks in ``there``; ``first`` if
        there is none."""
        return longest_hit(self._groups, there, self.ns.chunk_tokens, self.first, self.spare)

    def whole(self, there: list[BoolArray]) -> int:
        """Up to which chunk the rows reach of groups of which a hit needs all; 0 if windows end no
        hit before that. ``there``: as for ``longest``."""
        rules = [group.rules for group in self._groups]
        if not any(each.windowed for each in rules) or not any(each.whole for each in rules):
            return 0
        return whole_end(self._groups, there, self.first)

    def missing(self, end: int, there: list[BoolArray]) -> tuple[int, int] | None:
        """The row for which the longest hit ends at ``end``: the number of its class, and its
        chunk. Rows of groups of which it needs all come first. ``None``: the prompt has no more
        chunks. ``there``: as for ``longest``."""
        upto = end + 1 + self.spare
        if upto > len(there[0]):
            return None
        for number, group in enumerate(self._groups):  # all rows before ``end`` are there
            for chunk in range(end, upto) if group.rules.whole else ():
                if not there[number].item(chunk):
                    return number, chunk
        for number, (begin, upto) in enumerate(self.needs(end + 1)):
            if not (rows := there[number][begin:upto]).all():
                return number, begin + int(rows.argmin())
        return None

    def needs(self, end: int) -> list[tuple[int, int]]:
        """By row class, the chunks ``[begin, upto)`` that a hit of ``end`` chunks needs: those of
        the hit, then the spare ones."""
        tokens, first = self.ns.chunk_tokens, self.first
        if not self.spare or end == first:
            return [(first_chunk(group, end, tokens, first), end) for group in self._groups]
        return [
            (first_chunk(group, end, tokens, first), end + self.spare * checked)
            for group, checked in zip(self._groups, checked_groups(self._groups), strict=True)
        ]

    def writers(self) -> set[int]:
        """The reservations whose WRITING rows would make the hit longer."""
        table, parts = self._rows.table, list[I64Array]()
        end = self.longest(self.there(WRITING))
        has = self._partial_chunk(end)[0]
        for c, rows, (begin, upto) in zip(
            self.ns.classes, self.found, self.needs(end), strict=True
        ):
            parts.append(rows[begin:upto])
            if end == len(rows):  # the key of a tail is the hash of its last block
                parts.append(c.index.find(self.rest[has:]))
        rows = np.concatenate(parts)
        rows = rows[rows != ABSENT]
        return set(table.loader[rows[table.state[rows] == WRITING]].tolist())

    def last_used_s(self, end: int) -> float:
        """The seconds since the last chunk of a hit of ``end`` chunks was used.

        It is 0 if no group has a row of that chunk: a window of one token needs none.
        """
        row = max([rows.item(end - 1) for rows in self.found])
        return 0.0 if row == ABSENT else self._rows.uses.age(self._rows.table.stamp.item(row))

    def use(self, end: int, there: bool = False, session: int | None = None) -> Hit:
        """Record a use of the rows of a hit of ``end`` chunks, and of the rows of the chunks that
        the engine has itself. Returns the hit. ``there``: no row of the hit is missing.
        ``session``: as of ``RowStates.touch``."""
        tokens, parts, spares = self.ns.chunk_tokens, [], []
        blocks, last = self._partial_chunk(end)
        for c, rows, row, (begin, upto) in zip(
            self.ns.classes, self.found, last, self.needs(end), strict=True
        ):
            used = rows[first_chunk(c.spec.layout, end, tokens) if self.first else begin : upto]
            hit = rows[begin:end]
            if len(row):
                hit = np.concatenate([hit, row])
                used = np.concatenate([used, row]) if self.first else hit
            if self.first or not there:
                used = used[used != ABSENT]
            self._rows.touch(c, used, session)
            parts.append(ClassRows(c.id, hit))
            spares.append(ClassRows(c.id, rows[end:upto]))
        return Hit(end, blocks, tuple(parts), tuple(spares))

    def to_keep(self, end: int) -> list[Found]:
        """By row class, the rows of whole chunks that a hit of ``end`` chunks needs, also of those
        chunks that the engine has itself."""
        tokens = self.ns.chunk_tokens
        begins = [first_chunk(group, end, tokens) for group in self._groups]
        return [(begin, rows[begin:end]) for begin, rows in zip(begins, self.found, strict=True)]

    def _partial_chunk(self, end: int) -> tuple[int, list[I64Array]]:
        """The first blocks of the chunk after ``end`` chunks that all classes have: their number,
        and the row of each class that has them.

        The number is 0 unless the hit has all chunks of the prompt, or only the engine's own.
        """
        classes, none = self.ns.classes, [_NO_ROWS] * len(self.ns.classes)
        wanted = self.start if end == self.first else NO_BLOCKS
        wanted = self.rest if end == len(self.found[0]) else wanted
        if not len(wanted):
            return 0, none
        indexes = [c.blocks for c in classes if c.blocks is not None]
        if len(indexes) < len(classes):
            return 0, none
        prints = self._rows.classes.prints(wanted)
        found = [index.longest(prints) for index in indexes]
        blocks = min(count for count, _ in found)
        return blocks, [np.array([row]) for _, row in found] if blocks else none
