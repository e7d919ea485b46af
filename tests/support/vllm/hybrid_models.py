"""Tiny random models of several KV cache groups, for ``models.build``.

Names and shapes are those of vLLM's loaders and of Hugging Face's configurations; sizes are the
smallest that vLLM runs on a CPU and that still have every kind of group.

As in ``models``, the KV cache matters for the output: norms that add 1 to their weight are 0 here,
and states forget so little per token that they matter hundreds of tokens later. No output is tied
to the embeddings: such a random model would repeat the last token, whatever its cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tests.support.vllm.models import Blueprint, Tensor, weight

VOCAB: Final = 1024
HIDDEN: Final = 256
MAX_TOKENS: Final = 4096


def _blueprint(
    name: str, architecture: str, config: dict[str, object], tensors: Iterator[Tensor]
) -> Blueprint:
    usual: dict[str, object] = {"architectures": [architecture], "hidden_size": HIDDEN}
    return Blueprint(name, VOCAB, MAX_TOKENS, usual | config, tuple(tensors))


def _model(
    layers: Sequence[Callable[[str], Iterator[Tensor]]], norm: float = 1.0
) -> Iterator[Tensor]:
    """Embeddings, ``layers`` (each told its prefix), a norm of weight ``norm``, and the output."""
    yield weight("model.embed_tokens.weight", VOCAB, HIDDEN)
    for number, layer in enumerate(layers):
        yield from layer(f"model.layers.{number}.")
    yield weight("model.norm.weight", HIDDEN, mean=norm)
    yield weight("lm_head.weight", VOCAB, HIDDEN)


def _attention(at: str, heads: int, kv_heads: int, dim: int, gate: int = 1) -> Iterator[Tensor]:
    """Projections of ``heads`` queries; with ``gate`` 2 they include an output gate."""
    yield weight(f"{at}q_proj.weight", gate * heads * dim, HIDDEN)
    yield weight(f"{at}k_proj.weight", kv_heads * dim, HIDDEN)
    yield weight(f"{at}v_proj.weight", kv_heads * dim, HIDDEN)
    yield weight(f"{at}o_proj.weight", HIDDEN, heads * dim)


def _gated(at: str, width: int) -> Iterator[Tensor]:
    """A gated feed-forward layer."""
    yield weight(f"{at}gate_proj.weight", width, HIDDEN)
    yield weight(f"{at}up_proj.weight", width, HIDDEN)
    yield weight(f"{at}down_proj.weight", HIDDEN, width)


# ---------------------------------------------------------------- gpt-oss


def gpt_oss(layers: int = 4, window: int = 128) -> Blueprint:
    """Alternating sliding and full attention, with sinks and biases; experts."""
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    config: dict[str, object] = {
        "model_type": "gpt_oss",
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "sliding_window": window,
        "layer_types": kinds,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_theta": 150000.0,
        "rope_scaling": None,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    }
    tensors = _model([_gpt_oss_layer] * layers)
    return _blueprint("gpt-oss", "GptOssForCausalLM", config, tensors)


def _gpt_oss_layer(at: str, experts: int = 4, width: int = 128) -> Iterator[Tensor]:
    attention, mlp = f"{at}self_attn.", f"{at}mlp."
    yield weight(f"{attention}sinks", 8, deviation=1.0, mean=0.0)
    yield from _attention(attention, 8, 4, 32)
    for name, size in (("q", 256), ("k", 128), ("v", 128), ("o", 256)):
        yield weight(f"{attention}{name}_proj.bias", size, deviation=0.1, mean=0.0)
    yield weight(f"{mlp}router.weight", experts, HIDDEN)
    yield weight(f"{mlp}router.bias", experts, deviation=0.1, mean=0.0)
    inner, outer = 2.0 / HIDDEN**0.5, 2.0 / width**0.5
    yield weight(f"{mlp}experts.gate_up_proj", experts, HIDDEN, 2 * width, deviation=inner)
    yield weight(f"{mlp}experts.gate_up_proj_bias", experts, 2 * width, deviation=0.1)
    yield weight(f"{mlp}experts.down_proj", experts, width, HIDDEN, deviation=outer)
    yield weight(f"{mlp}experts.down_proj_bias", experts, HIDDEN, deviation=0.1)
    yield weight(f"{at}input_layernorm.weight", HIDDEN)
    yield weight(f"{at}post_attention_layernorm.weight", HIDDEN)


# ---------------------------------------------------------------- Gemma 3


def gemma3(layers: int = 6, window: int = 300) -> Blueprint:
    """Two layers of sliding attention per full one; the window is no multiple of a block."""
    config: dict[str, object] = {
        "model_type": "gemma3_text",
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "sliding_window_pattern": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * (layers // 3),
        "query_pre_attn_scalar": 32,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    tensors = _model([_gemma3_layer] * layers, norm=0.0)
    return _blueprint("gemma3", "Gemma3ForCausalLM", config, tensors)


def _gemma3_layer(at: str) -> Iterator[Tensor]:
    yield from _attention(f"{at}self_attn.", 8, 4, 32)
    for name in ("q_norm", "k_norm"):
        yield weight(f"{at}self_attn.{name}.weight", 32, mean=0.0)
    yield from _gated(f"{at}mlp.", 256)
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        # A branch weighs 4: embeddings are scaled by 16, and would drown it otherwise.
        mean = 3.0 if name.startswith("post") else 0.0
        yield weight(f"{at}{name}_layernorm.weight", HIDDEN, mean=mean)


# ---------------------------------------------------------------- Qwen3-Next


def qwen3_next(layers: int = 4) -> Blueprint:
    """Alternating linear attention (gated delta rule) and full attention; experts."""
    config: dict[str, object] = {
        "model_type": "qwen3_next",
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        # All of them: vLLM computes this model in bfloat16 only, and a choice amplifies its errors.
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.25,
        "layer_types": ["linear_attention", "full_attention"] * (layers // 2),
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    tensors = _model([_qwen3_next_layer(n % 2 == 1) for n in range(layers)], norm=0.0)
    return _blueprint("qwen3-next", "Qwen3NextForCausalLM", config, tensors)


def _qwen3_next_layer(full: bool) -> Callable[[str], Iterator[Tensor]]:
    def layer(at: str) -> Iterator[Tensor]:
        yield from _gated_attention(f"{at}self_attn.") if full else _delta(f"{at}linear_attn.")
        yield weight(f"{at}mlp.gate.weight", 2, HIDDEN)
        for expert in range(2):
            yield from _gated(f"{at}mlp.experts.{expert}.", 64)
        yield from _gated(f"{at}mlp.shared_expert.", 64)
        yield weight(f"{at}mlp.shared_expert_gate.weight", 1, HIDDEN)
        yield weight(f"{at}input_layernorm.weight", HIDDEN, mean=0.0)
        yield weight(f"{at}post_attention_layernorm.weight", HIDDEN, mean=0.0)

    return layer


def _gated_attention(at: str) -> Iterator[Tensor]:
    yield from _attention(at, 4, 2, 64, gate=2)
    yield weight(f"{at}q_norm.weight", 64, mean=0.0)
    yield weight(f"{at}k_norm.weight", 64, mean=0.0)


def _delta(at: str, keys: int = 128, values: int = 256, heads: int = 4) -> Iterator[Tensor]:
    """Two key heads and four value heads of 64; it forgets ``exp(A_log) * softplus(..)``."""
    yield weight(f"{at}A_log", heads, deviation=1.5, mean=-5.0)
    yield weight(f"{at}dt_bias", heads)
    yield weight(f"{at}conv1d.weight", 2 * keys + values, 1, 4)
    yield weight(f"{at}in_proj_qkvz.weight", 2 * keys + 2 * values, HIDDEN)
    yield weight(f"{at}in_proj_ba.weight", 2 * heads, HIDDEN)
    yield weight(f"{at}norm.weight", 64)
    yield weight(f"{at}out_proj.weight", HIDDEN, values)


# ---------------------------------------------------------------- DeepSeek-V4


def deepseek_v4() -> Blueprint:
    """Five kinds of latent pages, compressed by 1, 4 and 128, with an indexer and windows. It has
    no weights: no CPU can compute it, but vLLM lays out its caches (``load_format="dummy"``)."""
    config: dict[str, object] = {
        "hidden_size": 512,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 256,
        "o_lora_rank": 256,
        "o_groups": 2,
        "index_n_heads": 8,
        "index_head_dim": 128,
        "index_topk": 64,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "num_hash_layers": 1,
        "swiglu_limit": 10.0,
        "sliding_window": 128,
        "compress_ratios": [0, 4, 128, 4],
        "compress_rope_theta": 160000.0,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
    }
    return _blueprint("deepseek-v4", "DeepseekV4ForCausalLM", config, iter(()))
