"""Writes models with random weights: configuration and safetensors. Needs numpy only, no torch.

A llama or DeepSeek is made from its sizes; ``hybrid_models`` has models of several KV cache groups.
The same ``(shape, seed)`` gives the same bytes everywhere.

vLLM's ``load_format="dummy"`` would not do: its weights are so small that a zeroed KV cache yields
the same tokens. Here embeddings have deviation 1 and every projection ``2 / sqrt(fan_in)``, so
attention matters and a wrong page changes the output.

``model.safetensors`` is ``u64 little-endian header length`` + JSON header (name -> dtype, shape,
offsets) + raw tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

FORMAT: Final = 2
"""Increase it when the bytes made from a ``Shape`` change; it is part of the folder's name."""

F32Array = npt.NDArray[np.float32]


class Tensor(msgspec.Struct, frozen=True):
    """A weight with Hugging Face's name, drawn from a normal distribution."""

    name: str
    size: tuple[int, ...]
    deviation: float = 0.0
    mean: float = 0.0


class Blueprint(msgspec.Struct, frozen=True):
    """A model of any family (``hybrid_models``). ``name`` begins its folder's name; ``config`` is
    merged into the ``config.json`` that all models have."""

    name: str
    vocab: int
    max_tokens: int
    config: dict[str, object]
    tensors: tuple[Tensor, ...]


class Shape(msgspec.Struct, frozen=True):
    """Sizes of a llama. Weights and KV are float32, so kernels do not differ in greedy choices."""

    vocab: int = 1024
    hidden: int = 256
    intermediate: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    max_tokens: int = 16_384


class LatentShape(msgspec.Struct, frozen=True):
    """Sizes of a DeepSeek-V2 without experts: multi-head latent attention (MLA). All heads share
    one vector of ``latent + rope`` values per token and layer, and so do all ranks."""

    vocab: int = 1024
    hidden: int = 256
    intermediate: int = 512
    layers: int = 2
    heads: int = 4
    latent: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    max_tokens: int = 16_384


Sizes = Shape | LatentShape | Blueprint

TINY: Final = Shape()
"""Computes thousands of tokens a second on one core."""
TINY_LATENT: Final = LatentShape()


def build(folder: Path, shape: Sizes = TINY, seed: int = 0) -> Path:
    """The folder of this model inside ``folder``; written on first use, atomically."""
    target = folder / f"{_name(shape)}-seed{seed}"
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=target.name, dir=folder))
    try:
        write_model(scratch, shape, seed)
        os.rename(scratch, target)
    except OSError:
        if not target.is_dir():  # else another process wrote the same bytes first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _name(shape: Sizes) -> str:
    """The name of the folder; it contains everything that changes the bytes."""
    if isinstance(shape, Blueprint):
        digest = hashlib.sha256(msgspec.json.encode(shape)).hexdigest()[:16]
        return f"{shape.name}-v{FORMAT}-{digest}"
    digest = "-".join(str(field) for field in msgspec.structs.astuple(shape))
    return f"{'llama' if isinstance(shape, Shape) else 'deepseek'}-v{FORMAT}-{digest}"


def write_model(folder: Path, shape: Sizes, seed: int) -> None:
    """Write configuration and weights into an existing ``folder``."""
    _write_json(folder / "config.json", config_of(shape))
    _write_json(
        folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    )
    tensors = shape.tensors if isinstance(shape, Blueprint) else tuple(tensors_of(shape))
    _write_tensors(folder / "model.safetensors", tensors, seed)


def write_lora(folder: Path, shape: Shape, seed: int, rank: int = 8) -> None:
    """Write a LoRA adapter (PEFT's files) of every layer's q and v projections into ``folder``."""
    folder.mkdir(parents=True)
    _write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": ["q_proj", "v_proj"],
            "bias": "none",
        },
    )
    outputs = {"q_proj": shape.heads * shape.head_dim, "v_proj": shape.kv_heads * shape.head_dim}
    tensors: list[Tensor] = []
    for layer in range(shape.layers):
        for name, out in outputs.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors += [weight(f"{at}.lora_A.weight", rank, shape.hidden)]
            tensors += [weight(f"{at}.lora_B.weight", out, rank)]
    _write_tensors(folder / "adapter_model.safetensors", tensors, seed)


def config_of(shape: Sizes) -> dict[str, object]:
    sizes: dict[str, object] = {}
    if not isinstance(shape, Blueprint):
        sizes = {
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
        }
    common: dict[str, object] = {
        "vocab_size": shape.vocab,
        **sizes,
        "max_position_embeddings": shape.max_tokens,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    if isinstance(shape, Blueprint):
        return common | shape.config
    if isinstance(shape, Shape):
        return common | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
        }
    return common | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": shape.heads,
        "kv_lora_rank": shape.latent,
        "q_lora_rank": None,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.value,
        "attention_bias": False,
        "rope_scaling": None,
        # every layer is dense: vLLM reads these and does not use them
        "first_k_dense_replace": shape.layers,
        "moe_intermediate_size": shape.intermediate,
        "moe_layer_freq": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    }


def weight(
    name: str, *size: int, deviation: float | None = None, mean: float | None = None
) -> Tensor:
    """A weight with defaults: a vector is all ones, embeddings have deviation 1, a projection
    ``2 / sqrt(fan_in)``, where ``fan_in`` is its last size."""
    if len(size) == 1:
        return Tensor(name, size, deviation or 0.0, 1.0 if mean is None else mean)
    usual = 1.0 if "embed" in name else 2.0 / float(size[-1]) ** 0.5
    return Tensor(name, size, usual if deviation is None else deviation, mean or 0.0)


def tensors_of(shape: Shape | LatentShape) -> Iterator[Tensor]:
    """Names and shapes as Hugging Face stores them, in file order."""
    yield weight("model.embed_tokens.weight", shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        yield weight(at + "input_layernorm.weight", shape.hidden)
        attention = _heads(shape) if isinstance(shape, Shape) else _latent(shape)
        for name, size in attention:
            yield weight(f"{at}self_attn.{name}.weight", *size)
        yield weight(at + "post_attention_layernorm.weight", shape.hidden)
        yield weight(at + "mlp.gate_proj.weight", shape.intermediate, shape.hidden)
        yield weight(at + "mlp.up_proj.weight", shape.intermediate, shape.hidden)
        yield weight(at + "mlp.down_proj.weight", shape.hidden, shape.intermediate)
    yield weight("model.norm.weight", shape.hidden)
    yield weight("lm_head.weight", shape.vocab, shape.hidden)


def _heads(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "q_proj", (queries, shape.hidden)
    yield "k_proj", (keys, shape.hidden)
    yield "v_proj", (keys, shape.hidden)
    yield "o_proj", (shape.hidden, queries)


def eagle_head(target: Shape = TINY) -> Blueprint:
    """A drafter of one layer for ``target``, as ``EagleLlamaForCausalLM`` reads it. It shares its
    target's embeddings and output."""
    tensors = [weight("fc.weight", target.hidden, 2 * target.hidden)]
    at = "model.layers.0."
    tensors += [
        msgspec.structs.replace(one, name=one.name.removeprefix("model."))
        for one in tensors_of(target)
        if one.name.startswith(at) and "input_layernorm" not in one.name
    ]
    config = config_of(target) | {"num_hidden_layers": 1}
    return Blueprint("eagle", target.vocab, target.max_tokens, config, tuple(tensors))


def _latent(shape: LatentShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "q_proj", (shape.heads * (shape.nope + shape.rope), shape.hidden)
    yield "kv_a_proj_with_mqa", (shape.latent + shape.rope, shape.hidden)
    yield "kv_a_layernorm", (shape.latent,)
    yield "kv_b_proj", (shape.heads * (shape.nope + shape.value), shape.latent)
    yield "o_proj", (shape.hidden, shape.heads * shape.value)


def _draw(tensor: Tensor, rng: np.random.Generator) -> F32Array:
    mean = np.float32(tensor.mean)
    if not tensor.deviation:
        return np.full(tensor.size, mean)
    drawn: F32Array = rng.standard_normal(tensor.size, np.float32)
    return drawn * np.float32(tensor.deviation) + mean


def _write_tensors(path: Path, tensors: Sequence[Tensor], seed: int) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in tensors:
        end = at + 4 * int(np.prod(one.size))
        header[one.name] = {"dtype": "F32", "shape": list(one.size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in tensors:
            file.write(_draw(one, rng).astype("<f4", copy=False).tobytes())


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
