"""``Placer``, which writes K and V of segments to their places in a prompt, in vLLM's worker.

A file of vLLM's version (see ``adapt.py``). A load first copies the rows of segments unchanged into
blocks of the request. Then the placer reads K and V from these blocks, rotates K to the new
positions, and has vLLM's own code write both to the slots of their tokens.

Laws of this file:

- The layout of a page and the rotation of K are measured for each layer when the engine starts. A
  model for which the measurement fails is refused.
- An exception while segments are placed makes the load fail. Then vLLM computes the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from vllm.forward_context import set_forward_context

from kvass.blend.plan import Prompt, Selection
from kvass.blend.rope import Move, Rope, RopeRefused
from kvass.blend.rope_of import MEASURED_AT, rope_that_explains
from kvass.connectors.vllm import borrowed
from kvass.connectors.vllm.blend_oracle import KeptSegments, Oracle
from kvass.engine.boundary import Boundary
from kvass.errors import ConfigError

BASE: Final = 256
"""The base of the digits in ``LayerPages._measure``. All integers up to it are exact in each of
``rope.DTYPES``."""


@dataclass(frozen=True)
class Span:
    """A loaded segment. It was stored at position ``old`` and begins at ``new`` in the prompt.
    ``blocks`` are the blocks that its rows were copied into."""

    blocks: tuple[int, ...]
    old: int
    new: int


@dataclass(frozen=True)
class Placement:
    """The segments of ``request``, which are placed once all ``loads`` have ended. ``table``: the
    request's blocks in the order of its tokens."""

    request: str
    loads: tuple[str, ...]
    table: tuple[int, ...]
    spans: tuple[Span, ...]
    oracle: tuple[Prompt, Selection] | None = None
    """If set, the segments are not placed but kept for the oracle (``blend_oracle.py``)."""


class _Measured(Exception):
    """Raised by a hook to end a layer's forward pass. Its argument is K of that layer, [positions,
    heads, numbers]."""


class LayerPages:
    """The pages of one attention layer. ``cache`` [blocks, ...] is their tensor. Raises
    ``ConfigError`` if the place of K and V in a page cannot be measured."""

    def __init__(self, name: str, layer: Any, cache: Any, rope: Rope, block: int) -> None:
        self._layer, self._cache, self._block, self.rope = layer, cache, block, rope
        self.name = name
        self._shapes = [
            (block, layer.num_kv_heads, size) for size in (layer.head_size, layer.head_size_v)
        ]
        self._sizes = [int(np.prod(shape)) for shape in self._shapes]
        self._order = self._measure(name)

    def _measure(self, name: str) -> Any:
        """The index in a page of each number of K, then of V.

        vLLM writes test values for which each number's value is its own index. They are written
        digit by digit in base ``BASE``, because a dtype may not represent large indices.
        """
        page = self._cache.new_zeros((1, *self._cache.shape[1:]))
        numbers = torch.arange(sum(self._sizes))
        found, unit = torch.zeros(page.numel(), dtype=torch.long), 1
        while unit < len(numbers):
            split = (numbers // unit % BASE).to(page.dtype).split(self._sizes)
            k, v = (part.view(shape) for part, shape in zip(split, self._shapes, strict=True))
            self._write(page, k, v, torch.arange(self._block))
            found += page.flatten().round().long() * unit
            unit *= BASE
        order = found.argsort()
        if not torch.equal(found[order], numbers):
            raise ConfigError(
                f"blend cannot read the KV pages of {name}: they are laid out otherwise"
            )
        return order

    def _write(self, cache: Any, k: Any, v: Any, slots: Any) -> None:
        self._layer.impl.do_kv_cache_update(self._layer, k, v, cache, slots)

    def read(self, blocks: Any) -> tuple[Any, Any]:
        """K and V of the tokens in ``blocks``, each [tokens, heads, numbers]."""
        numbers = self._cache[blocks].flatten(1)[:, self._order].split(self._sizes, 1)
        k, v = (
            part.unflatten(1, shape).flatten(0, 1).contiguous()
            for part, shape in zip(numbers, self._shapes, strict=True)
        )
        return k, v

    def read_slots(self, slots: Any) -> tuple[Any, Any]:
        """K and V of the tokens in ``slots`` [tokens], each [tokens, heads, numbers]."""
        blocks, at = (slots // self._block).unique(return_inverse=True)
        k, v = self.read(blocks)
        at = at * self._block + slots % self._block
        return k[at], v[at]

    def moved(self, blocks: Any, move: Move) -> tuple[Any, Any]:
        """K and V as ``read`` returns them, with K rotated to its new positions."""
        k, v = self.read(blocks)
        return (move(k, tokens=-3) if self.rope.inv_freq else k), v

    def write(self, k: Any, v: Any, slots: Any) -> None:
        """Write K and V to ``slots`` [tokens]."""
        self._write(self._cache, k, v, slots)


class Placer:
    """The writer of segments into the pages of one rank. Raises ``ConfigError`` or ``RopeRefused``
    for a model that blend does not support. Used from the engine's thread."""

    def __init__(
        self, vllm_config: Any, caches: Mapping[str, Any], block: int, boundary: Boundary
    ) -> None:
        self._boundary, self._block = boundary, block
        self._waiting: dict[str, Placement] = {}
        self._ended: dict[str, bool] = {}
        """The loads that have ended, and whether each failed."""
        if (model := borrowed.model()) is None:
            raise ConfigError("blend did not find the model of this worker")
        layers = vllm_config.compilation_config.static_forward_context
        self._layers = []
        for name, cache in caches.items():
            if layers[name].kv_sharing_target_layer_name is not None:
                continue  # it shares another layer's pages, whose K would be moved twice
            rope = _rope(vllm_config, model, name, layers[name], cache.dtype)
            self._layers.append(LayerPages(name, layers[name], cache, rope, block))
        self.oracle = Oracle(self._layers)

    def expect(self, placements: Iterable[Placement]) -> None:
        """Add placements that the scheduler planned in this step."""
        self._waiting |= {placement.request: placement for placement in placements}

    def place_loaded(self, finished: set[str], failed: set[str]) -> tuple[set[str], set[str]]:
        """Place the segments whose loads have all ended. Returns the requests that are complete,
        and those of them that failed; the parameters are the same of loads. The load of an exact
        prefix has the name of its request, so a request without segments is complete with it.
        """
        if not self._waiting:
            return finished, failed
        awaited = {load for waiting in self._waiting.values() for load in waiting.loads} & finished
        self._ended |= {load: load in failed for load in awaited}
        finished, failed = finished - awaited, failed - awaited
        for name, placement in list(self._waiting.items()):
            if all(load in self._ended for load in placement.loads):
                del self._waiting[name]
                failures = sum(self._ended.pop(load) for load in placement.loads)
                finished.add(name)
                if failures or not self._boundary.run(False, self._place, placement):
                    failed.add(name)
        return finished, failed

    def _place(self, placement: Placement) -> bool:
        """Write K and V of the segments to their slots, or keep them for the oracle. Returns True,
        so that the boundary's False means a failure."""
        size, moves, kept = self._block, dict[Rope, Move](), list[tuple[Any, Any]]()
        spans = placement.spans
        offsets = [np.arange(len(span.blocks) * size) for span in spans]
        old = np.concatenate([at + span.old for at, span in zip(offsets, spans, strict=True)])
        new = np.concatenate([at + span.new for at, span in zip(offsets, spans, strict=True)])
        blocks = torch.tensor([block for span in spans for block in span.blocks])
        slots = torch.from_numpy(np.asarray(placement.table)[new // size] * size + new % size)
        with torch.inference_mode():
            for layer in self._layers:
                move = moves.setdefault(layer.rope, Move(layer.rope, old, new))
                k, v = layer.moved(blocks, move)
                if placement.oracle is None:
                    layer.write(k, v, slots)
                else:
                    kept.append((k, v))
        if placement.oracle is not None:
            prompt, selection = placement.oracle
            self.oracle.keep(placement.request, KeptSegments(prompt, selection, new, slots, kept))
        return True


def _rope(vllm_config: Any, model: Any, name: str, layer: Any, dtype: torch.dtype) -> Rope:
    """The rope of the attention layer ``name``, measured. The layer's parent module computes one
    token at several positions, and the rope is the one that explains the K that reaches the
    layer."""

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Measured(kwargs["key"] if "key" in kwargs else args[1])

    outer = model.get_submodule(name.rpartition(".")[0])
    weights = next(outer.parameters())
    hidden = torch.ones(1, vllm_config.model_config.get_hidden_size(), dtype=weights.dtype)
    positions = torch.from_numpy(MEASURED_AT)
    hook = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.inference_mode(), set_forward_context(None, vllm_config):
            outer(positions=positions, hidden_states=hidden.repeat(len(positions), 1))
    except _Measured as found:
        k = found.args[0].view(len(positions), -1, layer.head_size)
        return rope_that_explains(name, outer, k, dtype)
    except TypeError as error:
        raise RopeRefused(f"layer {name}", f"its module is called otherwise: {error}") from None
    finally:
        hook.remove()
    raise RopeRefused(f"layer {name}", "its module does not call it")
