"""Which blocks of a request are the rows of its chunks, group by group.

A block table has a request's block ids by group, in token order. Id 0 is the null block: the block
that was there has been freed. ``GroupLayout`` says what a row keeps of a chunk, and what a hit
needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvass.layout.windows import EVERYWHERE, Points, WindowRows
from kvass.types import GroupLayout

Blocks = tuple[tuple[int, ...], ...]
"""``blocks[g]``: block ids of group ``g`` for whole rows, in token order."""
Table = Sequence[Sequence[int]]
States = Mapping[tuple[int, int], int]
"""``states[group, chunk]``: the block that holds a group's state at the end of a chunk."""


class Spans:
    """Maps the chunks of an engine's requests to blocks. A chunk has ``chunk_tokens`` tokens.
    ``window_interval``: that of ``WindowRows``."""

    def __init__(
        self, groups: Sequence[GroupLayout], chunk_tokens: int, window_interval: int = 0
    ) -> None:
        self._groups = groups
        self._chunk_tokens = chunk_tokens
        self._windows = WindowRows(groups, chunk_tokens, window_interval)

    def row_blocks(self) -> tuple[int, ...]:
        """How many blocks a row of each group keeps."""
        return tuple(one.row_blocks(self._chunk_tokens) for one in self._groups)

    def row(self, group: int, ids: Sequence[int], chunk: int) -> tuple[int, ...]:
        """The blocks that the row of ``chunk`` keeps."""
        one = self._groups[group]
        end = (chunk + 1) * (self._chunk_tokens // one.block_tokens)
        return tuple(ids[end - one.row_blocks(self._chunk_tokens) : end])

    def covered(self, table: Table) -> int:
        """The number of leading chunks that have blocks in every group that keeps any."""
        each = zip(table, self._groups, self.row_blocks(), strict=True)
        tokens = (len(ids) * one.block_tokens for ids, one, kept in each if kept)
        return min(tokens, default=0) // self._chunk_tokens

    def storable(self, table: Table, states: States, chunk: int) -> int:
        """Bit mask of the groups whose row of a covered ``chunk`` can be copied now.

        It is 0 unless every group is among them of which hits need all rows.
        """
        mask = 0
        for number, one in enumerate(self._groups):
            if one.rules.summary:
                copyable = (number, chunk) in states
            else:
                ids = self.row(number, table[number], chunk)
                copyable = bool(ids) and all(ids)
            if one.rules.whole and not copyable:
                return 0
            mask |= copyable << number
        return mask

    def runs(
        self, table: Table, states: States, since: int, ready: int, points: Points = EVERYWHERE
    ) -> list[tuple[int, int, int]]:
        """Which rows can be stored of chunks ``[since, ready)``, and of the chunks with a block in
        ``states``: ``(begin, end, mask)`` for each run of chunks with the same mask of groups. Of
        windows these are the rows that hits need which end at ``points``."""
        masks = {
            c: self.storable(table, states, c) & self._windows.wanted(c, points)
            for c in range(since, ready)
        }
        for group, chunk in states:  # also for chunks whose other rows were offered before
            masks[chunk] = masks.get(chunk, 0) | 1 << group
        runs: list[tuple[int, int, int]] = []
        for chunk, mask in sorted(masks.items()):
            if runs and runs[-1][1:] == (chunk, mask):
                runs[-1] = (runs[-1][0], chunk + 1, mask)
            elif mask:
                runs.append((chunk, chunk + 1, mask))
        return runs

    def to_store(
        self, table: Table, states: States, mask: int, which: Iterable[Sequence[int]]
    ) -> Blocks:
        """The blocks of granted rows. ``which[i]`` has the chunks of the i-th group in ``mask``."""
        groups = [g for g in range(len(self._groups)) if mask >> g & 1]
        blocks: list[tuple[int, ...]] = [()] * len(self._groups)
        for number, chunks in zip(groups, which, strict=True):
            if self._groups[number].rules.summary:
                blocks[number] = tuple(states[number, chunk] for chunk in chunks)
            else:
                rows = (self.row(number, table[number], chunk) for chunk in chunks)
                blocks[number] = tuple(i for ids in rows for i in ids)
        return tuple(blocks)

    def to_load(
        self, table: Table, local: int, first: int, tokens: int, rows: Sequence[int]
    ) -> tuple[Blocks, tuple[int, ...]] | None:
        """The blocks to fill for a hit of ``tokens`` tokens, and for each group how many blocks of
        its first row to leave out.

        The engine has the first ``local`` tokens itself, and they end in chunk ``first``.
        ``rows[g]`` rows of group ``g`` were matched. If the hit ends inside a chunk, the last row
        is filled up to there only. None if these rows are not those that the hit needs: do not use
        the hit.
        """
        if len(rows) != len(self._groups):
            return None
        chunks = -(-tokens // self._chunk_tokens)
        blocks, skips = [], []
        for number, (one, count) in enumerate(zip(self._groups, rows, strict=True)):
            needs = one.needs(tokens)
            begin = min(chunks, max(first, needs // self._chunk_tokens))
            if count != chunks - begin:
                return None
            held_ids = table[number][: (end := len(one.blocks(0, tokens)))]
            each = (self.row(number, held_ids, c) for c in range(begin, chunks))
            ids = tuple(i for row in each for i in row)
            if len(held_ids) < end and count and one.row_blocks(self._chunk_tokens):
                return None
            held = one.blocks(0, (begin + 1) * self._chunk_tokens)[
                -one.row_blocks(self._chunk_tokens) :
            ]
            wanted = one.blocks(max(local, needs), tokens)
            blocks.append(ids)
            skips.append(max(0, wanted.start - held.start) if ids else 0)
        return tuple(blocks), tuple(skips)
