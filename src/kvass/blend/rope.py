"""Moves K to other positions by rotating it further, as rotary embedding (RoPE) would have done.

Law of this file: only K as it was stored is moved, never K that was moved before, because the
errors of bfloat16 add up.
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
"""In fp8 a turned K may exceed the range, and its scale is the engine's: refused."""


class RopeRefused(UsageError):
    """K of this model cannot be moved. ``name`` says which feature prevents it, like ``dynamic
    NTK``."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"blend cannot move K of {name}: {why}")
        self.name = name


@dataclass(frozen=True)
class Rope:
    """Where the rotated numbers of one layer group stand, and by which angles they are rotated.

    Numbers ``[offset, offset + width)`` of a head are rotated, in the cache's ``part``: MLA has
    them behind the latent (vLLM) or in what HF calls values. ``inv_freq`` is the engine's own, in
    radians per token, scaling included; empty for a layer without positions. Pairs are (i, i +
    width / 2) in style ``neox`` and (2i, 2i + 1) in ``gptj``. The engine divides positions by
    ``divisor`` first. ``mscale`` is in K already and is not applied.

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
        """[tokens, width / 2], float64: the angles that the engine used, rounded as it rounds."""
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=positions.device)
        return ((positions.float() / self.divisor)[:, None] * inv_freq).double()


def fingerprint(ropes: Sequence[Rope]) -> bytes:
    """16 bytes that differ when the ropes of a model's layers do; part of the index's space."""
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
        """cos and sin [tokens, width / 2] in float32; [tokens, 1]: which tokens move at all.

        The difference is that of the engine's two rounded angles: 100,000 tokens from the start
        these are wrong by 0.004 radians, and K must be where the engine would have put it.
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
    """K of consecutive tokens [..., tokens, numbers] from ``old_start`` to ``new_start``."""
    old = np.arange(old_start, old_start + stored.shape[-2])
    return Move(rope, old, old + (new_start - old_start), stored.device)(stored)
