"""The ropes of a model: read from the engine's own modules, and measured where it can run.

This code knows no names of models. It lets an HF model compute one token at several positions. Then
the K of a layer differs by its rotation alone. The rope is the description that maps the K
of one position to those of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

import numpy as np
import torch

from kvass.blend.rope import Move, Part, Rope, RopeRefused, Style

_CHANGES = "its frequencies change with the prompt's length"
_REFUSED = {
    "dynamic": ("dynamic NTK", _CHANGES),
    "longrope": ("longrope", _CHANGES),
    "mrope": ("mrope", "its positions have three parts"),
}
_NO_K = "state groups", "it has no K of each token"

MEASURED_AT: Final = np.array([0, 1, 19, 251])
"""The positions at which the token is computed to measure a rope."""
_ERROR = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""The largest error of a right rope, relative to the largest value of the same number of K."""


def ropes_of_model(model: Any) -> tuple[Rope, ...]:
    """The rope of each layer of the HF causal LM ``model``. Runs the model once, on four tokens.

    Raises ``RopeRefused`` with the reason: dynamic NTK, longrope, mrope, state groups, sliding
    windows, a KV cache in fp8, or a layer whose K follows no known rope.
    """
    _refuse_types(model.config.get_text_config().to_dict())
    ids = torch.ones((len(MEASURED_AT), 1), dtype=torch.long, device=model.device)
    places = torch.from_numpy(MEASURED_AT).to(model.device)[:, None]
    with torch.no_grad():
        out = model(ids, position_ids=places, use_cache=True)
    if (cache := getattr(out, "past_key_values", None)) is None:
        raise RopeRefused(*_NO_K)
    found = list(_frequencies(model))
    ropes = tuple(_measured(index, layer, found) for index, layer in enumerate(cache.layers))
    if not any(rope.inv_freq for rope in ropes):
        raise RopeRefused("a model without rotary positions", "no layer's K is rotated")
    return ropes


def _refuse_types(config: Mapping[str, Any]) -> None:
    """Raise for a type of rope by which a token's K depends on more than its position."""
    parameters = config.get("rope_parameters") or {}
    for one in (parameters, *(p for p in parameters.values() if isinstance(p, dict))):
        kind = "mrope" if "mrope_section" in one else one.get("rope_type")
        if kind in _REFUSED:
            raise RopeRefused(*_REFUSED[kind])


def _frequencies(model: Any) -> Iterator[tuple[tuple[float, ...], float]]:
    """The pairs (inv_freq, mscale) that layers may use. The first is for a layer without
    positions."""
    yield (), 1.0
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            kind = name.removesuffix("inv_freq")
            if kind != name and "original" not in kind:
                scale = getattr(module, f"{kind}attention_scaling", 1.0)
                yield tuple(buffer.float().flatten().tolist()), float(scale)
    if dim := getattr(model.config, "rotary_dim", None):  # GPT-J has a table of sines and no buffer
        yield tuple((1.0 / 10_000 ** (torch.arange(0, dim, 2) / dim)).tolist()), 1.0


def _measured(index: int, layer: Any, found: list[tuple[tuple[float, ...], float]]) -> Rope:
    """The rope that explains ``layer``'s K and V [positions, heads, 1, numbers]."""
    if getattr(layer, "keys", None) is None or not torch.is_tensor(layer.keys):
        raise RopeRefused(*_NO_K)
    if getattr(layer, "is_sliding", False):
        raise RopeRefused("sliding windows", "the cache does not keep all tokens of a chunk")
    parts = {name: getattr(layer, name).permute(2, 1, 0, 3) for name in ("keys", "values")}
    best, least = None, _ERROR.get(layer.keys.dtype, 0.0)
    for rope in _descriptions(parts, found):
        error = _error(rope, parts)
        if error < least:
            best, least = rope, error
    if best is None:
        raise RopeRefused(f"layer {index}", "its K follows no rope that kvass knows")
    return best


def _descriptions(
    parts: Mapping[str, torch.Tensor], found: list[tuple[tuple[float, ...], float]]
) -> Iterator[Rope]:
    for inv_freq, mscale in found:
        for part in get_args(Part):
            numbers = parts[part].shape[-1]
            for offset in sorted({0, numbers - 2 * len(inv_freq)}):
                for style in get_args(Style):
                    if offset >= 0:
                        dtype = parts[part].dtype
                        yield Rope(style, inv_freq, dtype, offset, part, mscale=mscale)


def _error(rope: Rope, parts: Mapping[str, torch.Tensor]) -> float:
    """The largest relative error if K and V at the first position are moved to the others.

    An error is relative to the largest value of the same number of the head, or to the median of
    these if that is more. It is not relative to the largest number of all: in some models a few
    numbers of K are hundreds of times the others, and are hardly rotated.
    """
    errors = []
    for name, there in parts.items():
        moved = there[:, :, :1].expand_as(there)
        if name == rope.part:
            moved = Move(
                rope, np.repeat(MEASURED_AT[:1], len(MEASURED_AT)), MEASURED_AT, there.device
            )(moved)
        largest = there.float().abs().amax(2, keepdim=True)
        least = max(float(largest.median()), 1e-9)
        off = (moved.float() - there.float()).abs() / largest.clamp(min=least)
        errors.append(float(off.max()))
    return max(errors)


# ---------------------------------------------------------------- vLLM

_SCALED = ("YaRNScalingRotaryEmbedding", "DeepseekScalingRotaryEmbedding")
_BASED = ("RotaryEmbedding", "LinearScalingRotaryEmbedding", "Llama3RotaryEmbedding")
_VLLM_REFUSED = {
    "DynamicNTKScalingRotaryEmbedding": "dynamic",
    "DynamicNTKAlphaRotaryEmbedding": "dynamic",
    "Phi3LongRoPEScaledRotaryEmbedding": "longrope",
    "MRotaryEmbedding": "mrope",
}


def rope_of_vllm(rotary: Any, dtype: torch.dtype) -> Rope:
    """The rope of a layer group of vLLM, from the module ``rotary`` that its layers call. ``dtype``
    is that of the KV cache. Raises ``RopeRefused`` with the reason, as ``ropes_of_model`` does."""
    name = type(rotary).__name__
    if name in _VLLM_REFUSED:
        raise RopeRefused(*_REFUSED[_VLLM_REFUSED[name]])
    if name not in _SCALED + _BASED:
        raise RopeRefused(name, "kvass does not know what this rope does to K")
    inv_freq = rotary._compute_inv_freq(rotary.scaling_factor if name in _SCALED else rotary.base)
    divisor = 1.0
    if name == "LinearScalingRotaryEmbedding":
        divisor = float(rotary.scaling_factors[0])
    return Rope(
        "neox" if rotary.is_neox_style else "gptj",
        tuple(inv_freq.float().tolist()),
        dtype,
        divisor=divisor,
        mscale=float(getattr(rotary, "mscale", 1.0)),
    )


def rope_that_explains(name: str, layer: Any, keys: torch.Tensor, dtype: torch.dtype) -> Rope:
    """The rope of the attention layer ``name`` of vLLM. Its module ``layer`` computed ``keys``
    [positions, heads, numbers] of one token at the positions ``MEASURED_AT``. Raises
    ``RopeRefused`` as ``rope_of_vllm`` does, and if K follows none of the module's ropes."""
    inside = [module for module in layer.modules() if hasattr(module, "_compute_inv_freq")]
    found = [Rope("neox", (), dtype), *(rope_of_vllm(one, dtype) for one in inside)]
    there = {"keys": keys.transpose(0, 1)[None]}
    best = min(found, key=lambda rope: _error(rope, there))
    if _error(best, there) < _ERROR[keys.dtype]:
        return best
    raise RopeRefused(f"layer {name}", "its K follows no rope that kvass knows")
