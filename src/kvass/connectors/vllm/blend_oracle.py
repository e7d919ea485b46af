"""``Oracle``, which shows what blend would answer while vLLM computes the whole prompt.

It is for measurements: the option ``kvass.blend_oracle`` turns it on. It saves no time.
A file of vLLM's version (see ``adapt.py``).

Fact relied on: a layer first writes K and V of the step's tokens to their pages, then calls
``wait_for_layer_load``. Then attention reads K and V from the pages only.

Law of this file: between the write and attention, K and V of the tokens that blend would not
compute are replaced by the K and V that blend would load. So every other token is computed as blend
would compute it. Nothing reads what is computed for the replaced tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch

from kvass.blend.plan import KvDev, Prompt, Selection, plan
from kvass.types import I64Array

DEVIATING: Final = 1
"""The index of the layer whose K and V are compared for ``kv_dev``: the first whose K and V depend
on other tokens. In the layer before it, it does not matter which tokens are replaced."""


class Pages(Protocol):
    """The pages of a layer, as in ``blend_pages.LayerPages``."""

    name: str

    def read_slots(self, slots: Any) -> tuple[Any, Any]:
        """K and V in ``slots`` [tokens]."""

    def write(self, k: Any, v: Any, slots: Any) -> None:
        """Write K and V to ``slots`` [tokens]."""


@dataclass
class KeptSegments:
    """The segments of a request that the oracle replaces.

    ``at``: the positions of their tokens in the prompt [tokens]. ``slots``: their slots in the
    pages. ``kv``: for each layer, K and V at these positions. ``replaced``: the indices in ``at``
    of the tokens that blend would not compute. If ``selection`` is a ratio, it is None until layer
    ``DEVIATING`` is computed.
    """

    prompt: Prompt
    selection: Selection
    at: I64Array
    slots: Any
    kv: Sequence[tuple[Any, Any]]
    replaced: Any = None

    def __post_init__(self) -> None:
        if callable(self.selection):
            self.choose(plan(self.prompt, self.selection))

    def choose(self, computed: I64Array) -> None:
        """Set the replaced tokens: all but ``computed``, which blend would compute."""
        self.replaced = torch.from_numpy(np.flatnonzero(~np.isin(self.at, computed)))

    def choose_deviating(self, k: Any, v: Any) -> None:
        """Choose the tokens that blend would compute: the ratio ``selection`` of all, those whose
        computed ``k`` and ``v`` differ most from the loaded ones."""
        off = np.zeros(self.prompt.tokens)
        for fresh, stored in zip((k, v), self.kv[DEVIATING], strict=True):
            off[self.at] += (fresh.double() - stored.double()).square().sum((1, 2)).numpy()
        assert isinstance(self.selection, float)
        self.choose(plan(self.prompt, KvDev(self.selection, lambda _: off)))


class Oracle:
    """The part of blend that replaces K and V in pages. Used from the engine's thread."""

    def __init__(self, layers: Sequence[Pages]) -> None:
        self._layers = {layer.name: (number, layer) for number, layer in enumerate(layers)}
        self._kept: dict[str, KeptSegments] = {}
        self._step: list[KeptSegments] = []

    def keep(self, name: str, segments: KeptSegments) -> None:
        """Keep the segments of the request ``name`` until it ends."""
        self._kept[name] = segments

    def begin(self, names: Iterable[str]) -> None:
        """Begin a step in which K and V of the requests ``names`` are replaced."""
        self._step = []  # if the next line raises, nothing is replaced
        self._step = [self._kept[name] for name in names]

    def forget(self, names: Iterable[str]) -> None:
        """Drop the segments of requests that ended."""
        for name in names:
            self._kept.pop(name, None)

    def replace(self, name: str) -> None:
        """Replace K and V in the pages of the layer ``name``, which has just written them."""
        number, layer = self._layers.get(name, (0, None))
        if layer is None:  # it has no pages of its own
            return
        with torch.inference_mode():
            for segments in self._step:
                if segments.replaced is None and number == DEVIATING:
                    k, v = layer.read_slots(segments.slots)
                    segments.choose_deviating(k, v)
                if (where := segments.replaced) is not None:
                    k, v = segments.kv[number]
                    layer.write(k[where], v[where], segments.slots[where])
