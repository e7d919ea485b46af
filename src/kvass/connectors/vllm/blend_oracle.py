"""An instrument: the answers of blend while the whole prompt is computed (``kvass.blend_oracle``).

A file of vLLM's version (see ``adapt.py``). Facts relied on: a layer writes K and V of the tokens
that a step computes to their pages; then it calls ``wait_for_layer_load``; then attention reads K
and V from the pages alone.

Law of this file: between the write and attention, K and V of the tokens that blend would not
compute are replaced by those that it would load. So any other token is computed as blend would
compute it. What is computed of the replaced tokens is read by nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch

from kvass.blend.plan import Choice, KvDev, Prompt, plan
from kvass.types import I64Array

DEVIATING: Final = 1
"""The layer whose K and V are compared for ``kv_dev``: the first that depends on other tokens. So
what the layers before it have in their pages does not depend on the choice."""


class Pages(Protocol):
    """Those of a layer: ``blend_pages.LayerPages``."""

    name: str

    def read_slots(self, slots: Any) -> tuple[Any, Any]:
        """K and V in ``slots`` [tokens]."""

    def write(self, k: Any, v: Any, slots: Any) -> None:
        """Write K and V to ``slots`` [tokens]."""


@dataclass
class KeptSegments:
    """The segments of a request: the moved K and V ``kv`` by layer, of the tokens ``at`` [tokens],
    which belong to ``slots``. ``stays``: indices of those that blend would not compute; None: they
    are chosen in layer ``DEVIATING``."""

    prompt: Prompt
    choice: Choice
    at: I64Array
    slots: Any
    kv: Sequence[tuple[Any, Any]]
    stays: Any = None

    def __post_init__(self) -> None:
        if callable(self.choice):
            self.choose(plan(self.prompt, self.choice))

    def choose(self, computed: I64Array) -> None:
        """Blend would compute the tokens ``computed``."""
        self.stays = torch.from_numpy(np.flatnonzero(~np.isin(self.at, computed)))

    def choose_deviating(self, k: Any, v: Any) -> None:
        """Blend would compute the ratio ``choice`` of tokens, those whose ``k`` and ``v`` differ
        most."""
        off = np.zeros(self.prompt.tokens)
        for fresh, stored in zip((k, v), self.kv[DEVIATING], strict=True):
            off[self.at] += (fresh.double() - stored.double()).square().sum((1, 2)).numpy()
        assert isinstance(self.choice, float)
        self.choose(plan(self.prompt, KvDev(self.choice, lambda _: off)))


class Oracle:
    """Replaces K and V in the pages ``layers`` of one rank. Used from the engine's thread."""

    def __init__(self, layers: Sequence[Pages]) -> None:
        self._layers = {layer.name: (number, layer) for number, layer in enumerate(layers)}
        self._kept: dict[str, KeptSegments] = {}
        self._step: list[KeptSegments] = []

    def keep(self, name: str, segments: KeptSegments) -> None:
        """The request ``name`` has them."""
        self._kept[name] = segments

    def begin(self, names: Iterable[str]) -> None:
        """A step computes tokens of the requests ``names``, which are in their blocks."""
        self._step = []  # nothing, if this raises
        self._step = [self._kept[name] for name in names]

    def forget(self, names: Iterable[str]) -> None:
        """These requests ended."""
        for name in names:
            self._kept.pop(name, None)

    def replace(self, name: str) -> None:
        """The layer ``name`` wrote what it computed."""
        number, layer = self._layers.get(name, (0, None))
        if layer is None:  # it has no pages of its own
            return
        with torch.inference_mode():
            for one in self._step:
                if one.stays is None and number == DEVIATING:
                    one.choose_deviating(*layer.read_slots(one.slots))
                if one.stays is not None:
                    k, v = one.kv[number]
                    layer.write(k[one.stays], v[one.stays], one.slots[one.stays])
