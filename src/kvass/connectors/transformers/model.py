"""The checks of models and calls. An unsupported one is refused with its reason before it runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.nn.modules import module as all_modules
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvass.connectors.transformers.identity import attention, is_known
from kvass.connectors.transformers.rows import KV
from kvass.errors import UsageError
from kvass.transfer import DEVICES

HARMLESS: Final = frozenset(
    {
        "attention_mask",
        "logits_processor",
        "stopping_criteria",
        "prefix_allowed_tokens_fn",
        "streamer",
        "tokenizer",
    }
)
"""Arguments of ``generate`` that are no settings of generation and change no KV."""
LENGTHS: Final = frozenset({"dynamic", "longrope"})
"""Kinds of rope whose K of a token depends on how long the prompt is."""
SETTINGS: Final = {
    "cache_implementation": "with a cache of another kind",
    "prefill_chunk_size": "with a prefill in pieces, which expects an empty cache",
    "guidance_scale": "with guidance, which has a second cache",
    "token_healing": "which changes the prompt",
    "output_attentions": "which has none of what is loaded",
    "output_hidden_states": "which has none of what is loaded",
}


def new_cache(model: Any) -> Any:
    """An empty cache, as ``generate`` would make it."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def tensors_of(cache: Any) -> KV:
    """The tensors of a cache, as ``rows`` names them."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def filled(model: Any, kv: KV) -> Any:
    cache = new_cache(model)
    for layer, keys, values in zip(cache.layers, kv[::2], kv[1::2], strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return cache


# ---------------------------------------------------------------- models


def probe(model: Any) -> KV:
    """The K and V of a prompt of four tokens. Raises ``UsageError`` for a model that cannot be
    served, with the reason."""
    if reason := next(_unsupported(model), ""):
        raise UsageError(f"kvass cannot cache this model: {reason}")
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    one, other = ([1 % vocabulary] * 3 + [last % vocabulary] for last in (2, 3))
    kv, changed = _compute(model, one), _compute(model, other)
    if len({(t.dtype, t.device) for t in kv}) > 1 or any(t.shape[2] != 4 for t in kv):
        raise UsageError("kvass cannot cache this model: its layers' K and V differ in kind")
    for a, b in zip(kv, changed, strict=True):
        if not torch.allclose(a[:, :, :3], b[:, :, :3], rtol=1e-2, atol=1e-2):
            raise UsageError(
                "kvass cannot cache this model: its KV of a token depends on later tokens"
            )
    return kv


def _compute(model: Any, tokens: list[int]) -> KV:
    cache = new_cache(model)
    with torch.no_grad():
        ids = torch.tensor([tokens], device=model.device)
        found = model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values
    if found is not cache:
        raise UsageError("kvass cannot cache this model: it does not use the cache it is given")
    return tensors_of(cache)


def _unsupported(model: Any) -> Iterator[str]:
    """Why a model cannot be served."""
    config = model.config
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        yield "an encoder-decoder has two caches"
    if text is not config:
        yield "it takes more than text, and positions may depend on an earlier call: not tested"
    if getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache():
        yield "it has states besides K and V"
    kinds = {type(layer) for layer in new_cache(model).layers} - {DynamicLayer}
    if kinds:
        yield f"its cache has layers of kind {min(kind.__name__ for kind in kinds)}"
    if getattr(model, "hf_quantizer", None) is not None:
        yield "its weights are quantised"
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        yield "it has adapters of PEFT: merge them into the weights (merge_and_unload)"
    if ropes := LENGTHS & _rope_types(text):
        yield f"its K depends on the prompt's length (rope {min(ropes)!r})"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        yield f"its weights are on several devices: {', '.join(sorted(map(str, devices)))}"
    kind = next(iter(devices)).type
    if kind not in DEVICES:
        yield f"device {kind!r} is not supported; supported: {', '.join(sorted(DEVICES))}"
    if changed := passing_state(model):
        yield changed


def _rope_types(config: Any) -> set[str]:
    """The kinds of rope that a configuration names, of one or of several kinds of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    return {str(one.get("rope_type", "default")) for one in each}


def passing_state(model: Any) -> str:
    """Why a model that is supported computes something else just now; empty if it does not."""
    if model.training:
        return "it is in training mode: call model.eval()"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast changes the precision"
    hooks = all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks
    if any(hooks) or any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return "a hook on one of its modules may change what it computes"
    if any("forward" in vars(module) for module in model.modules()):
        return "the forward of one of its modules was replaced, and may compute something else"
    name = attention(model)
    for registered in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        if name in registered and not is_known(registered[name]):
            return f"other code than transformers' was registered as attention {name!r}"
    return ""


# ---------------------------------------------------------------- calls


def check_call(model: Any, ids: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for a call of ``generate`` that cannot be served, with the reason."""
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise UsageError("input_ids: give a tensor of token ids, of shape (1, tokens)")
    if ids.shape[0] != 1 or ids.shape[1] == 0:
        raise UsageError(
            f"input_ids of shape {tuple(ids.shape)}: give one prompt of a token or more; "
            "call generate once for each prompt"
        )
    if reason := next(_uncachable(model, ids, dict(arguments)), ""):
        raise UsageError(f"kvass cannot serve generate {reason}: call model.generate for that")


def _uncachable(model: Any, ids: Any, arguments: dict[str, Any]) -> Iterator[str]:
    settings = copy.deepcopy(model.generation_config)
    if (given := arguments.pop("generation_config", None)) is not None:
        settings.update(**{k: v for k, v in given.to_dict().items() if v is not None})
    unused = settings.update(**arguments)
    if unknown := sorted(unused.keys() - HARMLESS):
        yield f"with {unknown[0]}"
    mask = unused.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        yield "with padding in attention_mask"
    pads = {settings.pad_token_id, model.generation_config.pad_token_id} - {None}
    if mask is None and any(bool((ids == pad).any()) for pad in pads):
        yield "with the padding token in a prompt without attention_mask, which hides it"
    if settings.use_cache is False:
        yield "without use_cache"
    for name, why in SETTINGS.items():
        if getattr(settings, name, None) not in (None, False):
            yield f"with {name}, {why}"
    mode = settings.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        yield f"as {mode.value}"
    if (settings.num_return_sequences or 1) > 1:
        yield "with num_return_sequences"
