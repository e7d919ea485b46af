"""An adapter that a worker holds is named by all that is in it, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

from kvass.connectors.vllm import lora
from kvass.engine.held_adapters import UNKNOWN


def adapter(number: int = 1) -> LoRAModel:
    """An adapter of a packed and a plain layer."""
    torch.manual_seed(0)

    def layer(name: str) -> LoRALayerWeights:
        a, b = torch.randn(4, 16).bfloat16(), torch.randn(32, 4).bfloat16()
        return LoRALayerWeights(name, 4, 8, a, b)

    packed = PackedLoRALayerWeights.pack([layer("q"), None, layer("v")])
    return LoRAModel(number, 4, {"qkv": packed, "o": layer("o")})


def test_equal_adapters_of_any_id_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = lora.digest(adapter(1))
    assert lora.digest(adapter(7)) == name
    monkeypatch.setattr(lora, "LARGE_BYTES", 0)
    assert lora.digest(adapter()) == name, "by several threads"
    turned = adapter()
    turned.loras["o"].lora_a = turned.loras["o"].lora_a.t().contiguous().t()
    assert lora.digest(turned) == name, "the elements count, not how they lie in memory"


def _set(path: str, value: Any) -> Callable[[LoRAModel], None]:
    def change(model: LoRAModel) -> None:
        layer, _, name = path.rpartition(".")
        setattr(model.loras[layer] if layer else model, name, value)

    return change


def _one_bit(model: LoRAModel) -> None:
    model.loras["qkv"].lora_b[2].view(torch.int16)[31, 3] ^= 1


def _swapped(model: LoRAModel) -> None:
    first, none, last = model.loras["qkv"].lora_a
    model.loras["qkv"].lora_a = [last, none, first]


@pytest.mark.parametrize(
    "change",
    [
        _one_bit,
        _swapped,
        _set("rank", 8),
        _set("is_3d_lora_weight", True),
        _set("o.scaling", 1.0),
        _set("o.lora_alpha", 4),
        _set("o.lora_a", torch.zeros(4, 16, dtype=torch.bfloat16)),
        _set("o.lora_b", torch.zeros(32, 4, dtype=torch.float16)),
        _set("o.something_new", 1),
        lambda model: model.loras.pop("o"),
        _set("modules_to_save", {"head": torch.ones(2)}),
    ],
)
def test_another_adapter_has_another_name(change: Callable[[LoRAModel], object]) -> None:
    model = adapter()
    before = lora.digest(model)
    change(model)
    assert lora.digest(model) not in (before, UNKNOWN)


def test_what_cannot_be_read_has_no_name() -> None:
    model = adapter()
    model.loras["o"].kernel = object()
    assert lora.digest(model) == UNKNOWN
