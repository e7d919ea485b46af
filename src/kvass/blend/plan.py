"""Selects the tokens of a prompt that are computed if the prompt contains cached segments.

Tokens that are neither in the exact prefix nor in a segment are always computed, and so is the last
token. A ``Selector`` adds tokens of the segments. The tokens before a segment are not those that
stood before it when it was stored; computing some of its tokens again corrects for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvass.errors import UsageError
from kvass.types import I64Array


@dataclass(frozen=True)
class PlacedSegment:
    """Cached tokens ``[old_start, old_start + length)`` that stand at ``new_start`` in the prompt.

    ``predecessor`` is the key of the chunk before ``old_start`` when the segment was stored, empty
    at position 0. ``last`` is the key of the segment's own last chunk, empty if not known.
    """

    new_start: int
    old_start: int
    length: int
    predecessor: bytes = b""
    last: bytes = b""

    @property
    def new_end(self) -> int:
        return self.new_start + self.length


class BadSegment(UsageError):
    """The position or the length of segment ``index`` is not possible."""

    def __init__(self, index: int, segment: PlacedSegment, reason: str) -> None:
        where = f"segment {index} at [{segment.new_start}, {segment.new_end})"
        super().__init__(f"{where}, stored at {segment.old_start}: {reason}")
        self.index = index


@dataclass(frozen=True)
class Prompt:
    """A prompt of ``tokens`` tokens, of which the first ``prefix`` are an exact hit.

    ``prefix_last`` is the key of the prefix's last chunk. Segments ascend, are disjoint and begin
    at or after ``prefix``. Raises ``BadSegment`` for any other segment, ``UsageError`` for a bad
    prefix.
    """

    tokens: int
    prefix: int
    segments: tuple[PlacedSegment, ...]
    prefix_last: bytes = b""

    def __post_init__(self) -> None:
        if not 0 <= self.prefix <= self.tokens or self.tokens == 0:
            raise UsageError(f"a prefix of {self.prefix} tokens in a prompt of {self.tokens}")
        end = self.prefix
        for index, segment in enumerate(self.segments):
            if min(segment.new_start, segment.old_start) < 0 or segment.length <= 0:
                raise BadSegment(
                    index, segment, "a start is negative, or the length is not above 0"
                )
            if segment.new_end > self.tokens:
                raise BadSegment(index, segment, f"the prompt ends at {self.tokens}")
            if segment.new_start < end:
                what = "the segment before it" if index else "the exact prefix"
                raise BadSegment(index, segment, f"{what} ends at {end}: overlapping or unsorted")
            end = segment.new_end

    def in_segments(self) -> npt.NDArray[np.bool_]:
        """For each token whether it is in a segment: shape ``(tokens,)``."""
        inside = np.zeros(self.tokens, np.bool_)
        for segment in self.segments:
            inside[segment.new_start : segment.new_end] = True
        return inside

    def heads(self) -> list[PlacedSegment]:
        """The segments that now stand right behind something else than when they were stored."""
        heads, end, before = [], self.prefix, self.prefix_last
        for segment in self.segments:
            follows = segment.new_start == end and segment.predecessor == before
            if not (follows and (before or end == 0)):
                heads.append(segment)
            end, before = segment.new_end, segment.last
        return heads


class Selector(Protocol):
    """A function that chooses the tokens of segments that are computed again."""

    def __call__(self, prompt: Prompt) -> npt.ArrayLike:
        """Positions in ``[0, prompt.tokens)``, in any order. Only those in segments count."""


def plan(prompt: Prompt, select: Selector) -> I64Array:
    """The positions to compute, ascending. The last token is always one of them.

    Raises ``UsageError`` if ``select`` names a position outside of the prompt.
    """
    chosen = np.asarray(select(prompt), np.int64).reshape(-1)
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < prompt.tokens):
        raise UsageError(f"{select!r} chose a position outside of [0, {prompt.tokens})")
    inside = prompt.in_segments()
    computed = ~inside
    computed[: prompt.prefix] = False
    computed[chosen] |= inside[chosen]
    computed[-1] = True
    return np.flatnonzero(computed)


# ---------------------------------------------------------------- selectors


def none(prompt: Prompt) -> I64Array:
    """No token of a segment."""
    return np.zeros(0, np.int64)


def all_tokens(prompt: Prompt) -> I64Array:
    """Every token of every segment. Then only the exact prefix is reused."""
    return np.flatnonzero(prompt.in_segments())


@dataclass(frozen=True)
class FirstK:
    """The first ``k`` tokens of each segment, as in EPIC. No token is chosen of a segment that was
    stored right behind what stands before it now (the exact prefix, or another segment).

    Raises ``UsageError`` for a negative ``k``.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 0:
            raise UsageError(f"first_k of {self.k} tokens: give 0 or more")

    def __call__(self, prompt: Prompt) -> I64Array:
        heads = [
            np.arange(s.new_start, min(s.new_start + self.k, s.new_end)) for s in prompt.heads()
        ]
        return np.concatenate([none(prompt), *heads])


Deviation = Callable[[Prompt], npt.ArrayLike]
"""For each token how far the moved K of the first layers is from the K computed in this prompt:
shape ``(tokens,)``."""


@dataclass(frozen=True)
class KvDev:
    """The share ``ratio`` of all tokens in segments: those whose K deviates most, as in CacheBlend.

    Raises ``UsageError`` for a ratio outside of 0 to 1, or deviations of another length.
    """

    ratio: float
    deviation: Deviation

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise UsageError(f"kv_dev with a ratio of {self.ratio}: give 0 to 1")

    def __call__(self, prompt: Prompt) -> I64Array:
        inside = np.flatnonzero(prompt.in_segments())
        measured = np.asarray(self.deviation(prompt), np.float64)
        if measured.shape != (prompt.tokens,):
            raise UsageError(f"deviations {measured.shape} of a prompt of {prompt.tokens} tokens")
        # NaN comes from broken K, so these tokens are chosen first.
        order = np.argsort(-np.nan_to_num(measured[inside], nan=np.inf), kind="stable")
        chosen: I64Array = inside[order[: math.ceil(self.ratio * len(inside))]]
        return chosen


Selection = Selector | float
"""Which tokens of segments are computed again: a selector, or the ratio of ``kv_dev``."""


def parse(text: str | Selector) -> Selection:
    """The selection that the option ``blend`` names: ``first_k:16``, ``kv_dev:0.15``, ``all``,
    ``none``, or a selector, which is returned as it is. Raises ``UsageError`` for anything else."""
    if callable(text):
        return text
    name, _, value = str(text).partition(":")
    try:
        if name == "first_k":
            return FirstK(int(value))
        if name == "kv_dev":
            return KvDev(float(value), none).ratio
    except ValueError:
        pass
    if text in ("all", "none"):
        return all_tokens if text == "all" else none
    raise UsageError(f"blend {text!r}: give first_k:TOKENS, kv_dev:RATIO, all, none or a function")
