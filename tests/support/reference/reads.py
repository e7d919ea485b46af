"""What a token reads of those before it, by kind of layer group: the definition, which ``kinds.py``
has to agree with. A kind that is not here is an error, so that no random test leaves it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvass.kinds import GroupKind
from kvass.types import GroupLayout

_READS: Final[dict[GroupKind, Callable[[int, int, int], bool]]] = {
    "full": lambda token, tokens, window: True,
    "sliding_window": lambda token, tokens, window: tokens - token < window,
    "chunked_local": lambda token, tokens, window: token // window == tokens // window,
    "state": lambda token, tokens, window: token == tokens - 1,
}
"""Whether computing the token after ``tokens`` reads the KV of ``token``."""


def read_next(one: GroupLayout, tokens: int) -> list[int]:
    """The tokens whose KV is read to compute the token after ``tokens``."""
    reads = _READS[one.kind]
    return [t for t in range(tokens) if reads(t, tokens, one.window_tokens)]
