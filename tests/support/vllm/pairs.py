"""Random pairs of prompts of which the second shares a prefix with the first."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

BLOCK: Final = 32
CHUNK: Final = 256
KINDS: Final = ("plain", "turns", "salt", "plain", "lora", "other salt")


class PromptPair(NamedTuple):
    """``fields``: of the two requests, ``salt`` and ``lora``."""

    kind: str
    first: list[int]
    generates: int
    """Tokens after the first prompt. If it is more than one, the second prompt begins with them."""
    shared: int
    rest: list[int]
    longest: int
    fields: tuple[Mapping[str, Any], Mapping[str, Any]]

    def second(self, said: list[int]) -> list[int]:
        """The second prompt. ``said``: what the engine generated after the first."""
        shared = self.first + said if self.generates > 1 else self.first[: self.shared]
        return (shared + self.rest)[: self.longest]


def _length(rng: random.Random, most: int) -> int:
    """Of any size up to ``most``, often at or next to a block's or a chunk's end."""
    unit = rng.choice([1, 1, BLOCK, CHUNK])
    around = rng.randint(0, most // unit) * unit + rng.choice([-1, 0, 0, 1]) * (unit > 1)
    return min(max(around, 0), most)


def draw(seed: int, pairs: int, adapter: str | Path) -> Iterator[PromptPair]:
    """Pairs of prompts of 20 to 3,000 tokens. ``adapter``: of a LoRA, as engines take it."""
    rng = random.Random(seed)
    for number in range(pairs):
        first, rest = (
            [rng.randrange(4, 1000) for _ in range(max(20, _length(rng, 1500)))] for _ in range(2)
        )
        kind = KINDS[number % len(KINDS)]
        fields: Mapping[str, Any] = {"salt": "x"} if "salt" in kind else {}
        if kind == "lora":
            fields = {"lora": adapter}
        generates = rng.choice([1, 2, BLOCK, 40]) if kind in ("turns", "lora") else 1
        second = {"salt": "y"} if kind == "other salt" else fields
        sizes = _length(rng, len(first)), max(20, _length(rng, 3000))
        yield PromptPair(kind, first, generates, sizes[0], rest, sizes[1], (fields, second))
