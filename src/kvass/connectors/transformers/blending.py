"""Blend in transformers: moves segments to their places in a prompt and recomputes some tokens.

Laws of this file:

- The loaded prefix does not change. K and V from the first segment on are an approximation and are
  never stored.
- A token is computed with all tokens before it, and with none after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvass.blend.plan import KvDev, PlacedSegment, Prompt, Selection, plan
from kvass.blend.rope import Move, Rope, fingerprint
from kvass.blend.rope_of import ropes_of_model
from kvass.connectors.transformers.identity import attention
from kvass.connectors.transformers.rows import KV
from kvass.engine import identity
from kvass.errors import UsageError

AT_ONCE: Final = 1024
"""The most tokens that are computed in one pass. Its mask has a number for each of them and each
token of the prompt."""
MASKED: Final = frozenset({"eager", "sdpa"})
"""Implementations of attention that take any mask."""
DEVIATING: Final = 1
"""The layer whose K and V are compared for ``kv_dev``: the first that depends on other tokens."""


class _ScatterLayer(DynamicLayer):
    """K and V of a whole prompt. Newly computed K and V replace those of the tokens ``at``."""

    def __init__(self, keys: Any, values: Any, at: Any) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self._at = keys, values, at

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        self.keys[:, :, self._at] = key_states
        self.values[:, :, self._at] = value_states
        return self.keys, self.values


class _Measured(Exception):
    """Raised by ``_MeasuredLayer`` to end the forward pass."""


class _MeasuredLayer(_ScatterLayer):
    """A layer that keeps the computed K and V as ``fresh``, and ends the forward pass."""

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        self.fresh = key_states, value_states
        raise _Measured


class Blender:
    """Blends the prompts of one model. Raises ``UsageError`` (``RopeRefused``) for a model whose K
    cannot be moved, or whose attention takes no mask."""

    def __init__(self, model: Any) -> None:
        if attention(model) not in MASKED:
            raise UsageError(
                f"blend needs attention with a mask, not {attention(model)!r}: load the model with "
                "attn_implementation='sdpa'"
            )
        self._model = model
        self._ropes: tuple[Rope, ...] = ropes_of_model(model)
        self._fingerprint = fingerprint(self._ropes).hex()

    def space(self, salt: str) -> bytes:
        """The space of ``salt``: 32 bytes. Only chunks that were indexed with it are found."""
        return bytes.fromhex(identity.digest([self._fingerprint, salt]))

    def move(self, kv: KV, segments: Sequence[PlacedSegment]) -> None:
        """Rotate the stored K of ``segments`` in ``kv`` from their old positions to the new
        ones."""
        spans = [np.arange(s.length) for s in segments]
        new = np.concatenate([a + s.new_start for a, s in zip(spans, segments, strict=True)])
        old = np.concatenate([a + s.old_start for a, s in zip(spans, segments, strict=True)])
        at = torch.from_numpy(new).to(kv[0].device)
        moves: dict[Rope, Move] = {}
        for layer, rope in enumerate(self._ropes):
            if rope.inv_freq:
                tensor = kv[2 * layer + (rope.part == "values")]
                turn = moves.setdefault(rope, Move(rope, old, new, tensor.device))
                tensor[:, :, at] = turn(tensor[:, :, at])

    def recompute(self, ids: Any, kv: KV, prompt: Prompt, selection: Selection) -> int:
        """Compute the tokens that ``plan`` chooses into ``kv``, except the prompt's last token.

        Returns how many of them are tokens of segments. ``ids``: shape ``(1, tokens)``. ``kv``: of
        all tokens but the last, with finite values where nothing was computed yet."""
        if isinstance(selection, float):
            selection = KvDev(selection, lambda _: self._deviation(ids, kv))
        positions = plan(prompt, selection)[:-1]
        for begin in range(0, len(positions), AT_ONCE):
            at = torch.from_numpy(positions[begin : begin + AT_ONCE]).to(ids.device)
            layers = [_ScatterLayer(k, v, at) for k, v in zip(kv[::2], kv[1::2], strict=True)]
            self._forward(ids, at, layers, kv[0].shape[2])
        return int(prompt.in_segments()[positions].sum())

    def _forward(self, ids: Any, at: Any, layers: list[Any], tokens: int) -> None:
        """Compute the tokens at positions ``at``. The cache has ``tokens`` tokens."""
        cache = DynamicCache()
        cache.layers = layers
        dtype = self._model.dtype
        mask = torch.zeros(len(at), tokens, dtype=dtype, device=at.device)
        later = torch.arange(tokens, device=at.device)[None] > at[:, None]
        mask.masked_fill_(later, torch.finfo(dtype).min)
        with torch.no_grad():
            self._model.base_model(
                input_ids=ids[:, at],
                position_ids=at[None],
                attention_mask=mask[None, None],
                past_key_values=cache,
                use_cache=True,
            )

    def _deviation(self, ids: Any, kv: KV) -> npt.NDArray[np.float64]:
        """The squared difference between ``kv`` and newly computed K and V, of each token."""
        tokens = kv[0].shape[2]
        pairs = list(zip(kv[::2], kv[1::2], strict=True))
        last = min(DEVIATING, len(pairs) - 1)
        fresh = [(keys.clone(), values.clone()) for keys, values in pairs[:last]]
        found = np.zeros(tokens + 1)
        for begin in range(0, tokens, AT_ONCE):
            at = torch.arange(begin, min(begin + AT_ONCE, tokens), device=ids.device)
            measured = _MeasuredLayer(*pairs[last], at)
            layers = [_ScatterLayer(keys, values, at) for keys, values in fresh]
            with suppress(_Measured):
                self._forward(ids, at, [*layers, measured], tokens)
            for computed, stored in zip(measured.fresh, pairs[last], strict=True):
                off = (computed.double() - stored[:, :, at].double()).square().sum((0, 1, 3))
                found[begin : begin + len(at)] += off.cpu().numpy()
        return found
