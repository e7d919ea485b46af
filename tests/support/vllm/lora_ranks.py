"""The LoRA adapters of workers, without workers: what vLLM's would hold after each step.

An adapter's weights are here the bytes of its file ``adapter_model.safetensors``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvass.connectors.vllm import lora
from kvass.engine.boundary import Boundary
from kvass.engine.held_adapters import HeldAdapters, News


class Weights:
    """An adapter that a rank holds."""

    def __init__(self, content: str) -> None:
        self.content = content


class LoraManager:
    """As vLLM's: keeps ``capacity`` adapters, the last used ones, and loads one that is needed and
    not held, or that is to be loaded in place."""

    def __init__(self, capacity: int = 1000) -> None:
        self.held: dict[int, Weights] = {}
        self.capacity = capacity
        self._adapter_manager = self

    def list_adapters(self) -> dict[int, Weights]:
        """By id."""
        return dict(self.held)

    def _load_adapter(self, lora: Any) -> Weights:
        return self.read(Path(lora.lora_path))

    def use(self, lora: Any) -> None:
        """vLLM's ``add_adapter`` of this ``LoRARequest``."""
        held, name = self.held, lora.lora_int_id
        if name not in held or lora.load_inplace:
            held[name] = self._load_adapter(lora)
        held[name] = held.pop(name)
        while len(held) > self.capacity:
            held.pop(next(iter(held)))

    def read(self, folder: Path) -> Weights:
        """What it finds there."""
        file = folder / "adapter_model.safetensors"
        return Weights(file.read_bytes().hex() if file.exists() else str(folder))


class LoraRanks:
    """The managers of an engine, and what each rank's half of the connector says of them."""

    def __init__(self, ranks: int = 1, capacity: int = 1000) -> None:
        self._number = 0
        self.managers = [LoraManager(capacity) for _ in range(ranks)]
        self.seen = [
            HeldAdapters(
                rank, manager.list_adapters, lora.digest, lora.sources(manager, Boundary())
            )
            for rank, manager in enumerate(self.managers)
        ]

    def compute(self, loras: Iterable[Any], number: int) -> dict[int, News]:
        """Step ``number`` computes requests of these adapters; what the ranks report."""
        for one in loras:
            for manager in self.managers:
                manager.use(one)
        self._number = number
        for seen in self.seen:
            seen.look(number)
        found = {one.rank: one.news() for one in self.seen}
        return {rank: news for rank, news in found.items() if news}

    def may_load(self, load: Any) -> bool:
        """Whether no rank refuses ``load`` in the next step; they look first."""
        for seen in self.seen:
            seen.look(self._number + 1)
        return load.adapter is None or all(one.may_load(load.adapter) for one in self.seen)

    def may_store(self, store: Any) -> bool:
        """Whether no rank refuses ``store``."""
        steps = store.first_step, store.computed
        return store.adapter is None or all(
            one.computed(store.adapter, *steps) for one in self.seen
        )
