"""The kinds of layer groups: what a hit needs of a group's rows, and all that follows from it.

Law of this file: nothing else decides by the name of a kind. A new kind is a class here, its name
in ``GroupKind`` and ``KINDS``, and a line in the engine's adapter (``connectors/vllm/groups.py``).

``window_tokens`` is that of ``types.GroupLayout``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Literal, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Tokens = TypeVar("Tokens", int, "npt.NDArray[np.int64]")
"""A number of tokens, or an array of such numbers."""

GroupKind = Literal["full", "sliding_window", "chunked_local", "state"]


class Kind(ABC):
    """What all groups of a kind have in common."""

    called = ""
    """What an operator reads of the rows of this kind."""
    whole = False
    """Whether a hit needs the rows of all its chunks. Then no hit reaches beyond a missing row,
    and a row has the KV of all tokens of its chunk."""
    windowed = False
    """Whether layouts of this kind have ``window_tokens``."""
    summary = False
    """Whether a row is a summary of all tokens so far. The engine says which block has it."""

    @abstractmethod
    def needs(self, tokens: Tokens, window_tokens: int) -> Tokens:
        """The first token whose pages a hit of ``tokens`` tokens needs. The hit needs all pages
        from there to its end."""

    @abstractmethod
    def kept(self, chunk_tokens: int, window_tokens: int) -> int:
        """How many tokens at the end of a chunk its row keeps: those that a hit ending there may
        need."""

    def sparse_tokens(self, window_tokens: int) -> int:
        """The least interval between windows at which most of their rows are left out; 0: the group
        has no windows. A local chunk that has just begun needs no row."""
        return 0

    def oldest_first(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The order in which the rows of a hit, given in chunk order, are evicted.

        If a hit needs all of them the deepest goes first, because it is useless without those
        before it. Else it goes last, because a hit needs only the rows at its end.
        """
        return rows[::-1] if self.whole else rows


class Full(Kind):
    """Each token attends to all tokens before it."""

    called = "full attention"
    whole = True

    def needs(self, tokens: Tokens, window_tokens: int) -> Tokens:
        return tokens * 0

    def kept(self, chunk_tokens: int, window_tokens: int) -> int:
        return chunk_tokens


class SlidingWindow(Kind):
    """Each token attends to itself and ``window_tokens - 1`` tokens before it."""

    called = "windows"
    windowed = True

    def needs(self, tokens: Tokens, window_tokens: int) -> Tokens:
        first = tokens - (window_tokens - 1)
        return first * (first > 0)

    def kept(self, chunk_tokens: int, window_tokens: int) -> int:
        return min(chunk_tokens, window_tokens - 1)

    def sparse_tokens(self, window_tokens: int) -> int:
        return 4 * window_tokens


class ChunkedLocal(Kind):
    """Each token attends to its local chunk, which begins at a multiple of ``window_tokens``."""

    called = "windows"
    windowed = True

    def needs(self, tokens: Tokens, window_tokens: int) -> Tokens:
        return tokens - tokens % window_tokens

    def kept(self, chunk_tokens: int, window_tokens: int) -> int:
        return chunk_tokens if chunk_tokens % window_tokens else 0

    def sparse_tokens(self, window_tokens: int) -> int:
        return window_tokens


class RunningState(Kind):
    """Each token changes a state, which is kept in the block that ends at the token."""

    called = "states"
    summary = True

    def needs(self, tokens: Tokens, window_tokens: int) -> Tokens:
        first = tokens - 1
        return first * (first > 0)

    def kept(self, chunk_tokens: int, window_tokens: int) -> int:
        return 1


KINDS: Final[dict[GroupKind, Kind]] = {
    "full": Full(),
    "sliding_window": SlidingWindow(),
    "chunked_local": ChunkedLocal(),
    "state": RunningState(),
}
