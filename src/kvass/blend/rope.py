"""Moves K to other positions, by rotating the numbers that rotary embedding (RoPE) rotates.

Always move the K that was stored, never K that was moved before, because rounding errors add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Literal

import numpy as np
import torch

from kvass.errors import UsageError
from kvass.types import I64Array

Style = Literal["neox", "gptj"]
Part = Literal["keys", "values"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The data types of K that can be moved. In fp8 a rotated K may exceed the range, and only the
engine knows its scale."""


class RopeRefused(UsageError):
    """K of this model cannot be moved. ``name`` says which feature is the reason, like ``dynamic
    NTK``."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"blend cannot move K of {name}: {why}")
        self.name = name


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of one layer group: which numbers are rotated, and by which angles.

    Numbers ``[offset, offset + width)`` of a head are rotated, in the cache's ``part``. MLA has
    them in what HF calls values. ``inv_freq`` is what the engine uses, in radians per token,
    scaling included. It is empty for a layer without positions. Pairs are (i, i + width / 2) in
    style ``neox`` and (2i, 2i + 1) in ``gptj``. The engine divides positions by ``divisor`` first.
    K already contains ``mscale``, so it is not applied.

    Raises ``RopeRefused`` for a dtype other than float32, float16 and bfloat16.
    """

    style: Style
    inv_freq: tuple[float, ...]
    dtype: torch.dtype
    offset: int = 0
    part: Part = "keys"
    divisor: float = 1.0
    mscale: float = 1.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise RopeRefused(f"a KV cache of {self.dtype}", "use float32, float16 or bfloat16")

    @property
    def width(self) -> int:
        return 2 * len(self.inv_freq)

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """The angles that the engine uses, with its rounding: float64, [tokens, width / 2]."""
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=positions.device)
        return ((positions.float() / self.divisor)[:, None] * inv_freq).double()


def fingerprint(ropes: Sequence[Rope]) -> bytes:
    """A digest of 16 bytes of the ropes of a model's layers; part of the space of segments."""
    digest = blake2b(digest_size=16)
    for rope in ropes:
        fields = (rope.style, rope.dtype, rope.offset, rope.part, rope.divisor, rope.mscale)
        digest.update(repr((*fields, rope.width)).encode())
        digest.update(np.array(rope.inv_freq, "<f4").tobytes())
    return digest.digest()


@dataclass(frozen=True)
class Move:
    """Moves K of tokens from positions ``old`` to ``new``, both [tokens], on ``device``.

    Make one for all layers of a rope: it computes each sine once.
    """

    rope: Rope
    old: I64Array
    new: I64Array
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.old.shape != self.new.shape or self.old.ndim != 1:
            raise UsageError(f"moves from {self.old.shape} positions to {self.new.shape}")

    @cached_property
    def _turn(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [tokens, width / 2], and which tokens move, bool [tokens, 1].

        The angle is the difference of the two angles as the engine rounds them. 100,000 tokens from
        the start these are wrong by 0.004 radians, and the moved K must be as the engine's.
        """
        old, new = (torch.from_numpy(p).to(self.device) for p in (self.old, self.new))
        delta = self.rope.angles(new) - self.rope.angles(old)
        return delta.cos().float(), delta.sin().float(), (old != new)[:, None]

    def __call__(self, stored: torch.Tensor, tokens: int = -2) -> torch.Tensor:
        """A copy of ``stored`` at the new positions. Its last dimension is one head's numbers, and
        ``tokens`` (-2 or -3) is that of the tokens. Tokens that do not move stay as they are, bit
        for bit.

        Raises ``UsageError`` if the dtype, the tokens or the head size do not fit.
        """
        rope = self.rope
        begin, end = rope.offset, rope.offset + rope.width
        if stored.dtype != rope.dtype or stored.shape[-1] < end or tokens not in (-2, -3):
            raise UsageError(f"{stored.dtype} {tuple(stored.shape)} is not K of {rope}")
        if stored.shape[tokens] != len(self.old):
            raise UsageError(f"K of {stored.shape[tokens]} tokens, positions of {len(self.old)}")
        cos, sin, moves = (t if tokens == -2 else t[:, None] for t in self._turn)
        before = stored[..., begin:end]
        wide = before.float()
        if rope.style == "gptj":
            a, b = wide[..., 0::2], wide[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = wide.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        moved = stored.clone()
        moved[..., begin:end] = torch.where(moves, turned.to(stored.dtype), before)
        return moved


def move(rope: Rope, stored: torch.Tensor, old_start: int, new_start: int) -> torch.Tensor:
    """K of consecutive tokens [..., tokens, numbers], moved from ``old_start`` to ``new_start``."""
    old = np.arange(old_start, old_start + stored.shape[-2])
    return Move(rope, old, old + (new_start - old_start), stored.device)(stored)
