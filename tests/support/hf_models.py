"""Tiny models of transformers with random weights, whose tokens depend on every page of the cache.

``python -m tests.support.hf_models SOCKET FOLDER`` is a process that computes ``PROMPT`` with each
of ``FAMILIES`` through kvass and leaves its logits in ``FOLDER``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from kvass.connectors.transformers import CachedModel, connect
from kvass.testing.daemon import Daemon, running_daemon

torch.set_num_threads(1)  # models this small take ten times as long with two

CHUNK: Final = 64
VOCABULARY: Final = 512
SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LATENT: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("Llama", {}),
    "qwen": ("Qwen3", {"head_dim": 16}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "deepseek": ("DeepseekV3", LATENT),
}
GREEDY: Final[dict[str, Any]] = {
    "max_new_tokens": 4,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def prompt(tokens: int, seed: int = 1) -> Any:
    """Random tokens, shape ``(1, tokens)``, none of which is special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, tokens), generator=generator)


PROMPT: Final = prompt(3 * CHUNK + 27)


def make(family: str = "llama", seed: int = 0, **settings: Any) -> Any:
    """The same weights for the same arguments, in every process."""
    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(SIZES | own | settings))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=2 / parameter.shape[-1] ** 0.5)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    return model.eval()


CLOSE: Final[dict[str, Any]] = {"rtol": 1e-4, "atol": 1e-4}
"""Of logits that were computed in steps of the same sizes."""


def wait_for_answers(patch: pytest.MonkeyPatch) -> None:
    """Else what a busy machine answers late is a miss, as it should be."""
    for name in ("client.segments.SEARCH_S", "client.scheduler.LATE_S"):
        patch.setattr(f"kvass.{name}", 30.0)
    patch.setattr("kvass.client.pages.ANSWER_S", 30.0)


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a module of tests that imports it."""
    wait_for_answers(monkeypatch)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    with running_daemon(folder, l1_size="64MiB", lookup_budget_ms=10_000) as one:
        yield one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, with a tokenizer of one token per word, ``word0`` and so on."""
    path = tmp_path_factory.mktemp("model")
    names = {f"word{number}": number for number in range(VOCABULARY)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="word3"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    make().save_pretrained(path)
    return path


def make_late(cached: CachedModel, patch: pytest.MonkeyPatch) -> None:
    """The deadline of each lease that ``cached`` takes from now on is over."""
    take = cached._store._scheduler.take

    def late(name: str) -> Any:
        match = take(name)
        return match and msgspec.structs.replace(match, deadline_s=0.0)

    patch.setattr(cached._store._scheduler, "take", late)


def join(model: Any, socket: str, **options: Any) -> CachedModel:
    """Connected, whatever the machine has to do."""
    cached = connect(model, socket=socket, chunk_tokens=CHUNK, wait_s=30.0, **options)
    assert cached.wait_connected(30.0)
    return cached


def logits(output: Any) -> Any:
    """Of all generated tokens, shape ``(tokens, vocabulary)``."""
    return torch.cat(output.logits).numpy()


def plain(model: Any, ids: Any) -> Any:
    """The logits of a model without kvass, which computes everything."""
    return logits(model.generate(ids, **GREEDY))


def after_own_hit(model: Any, ids: Any, hit: int, stored: Any = None) -> Any:
    """The logits of a model without kvass that has ``hit`` tokens in its own cache: it computed
    ``stored`` (by default ``ids``) in one step and kept its beginning."""
    cache = transformers.DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        model(ids if stored is None else stored, past_key_values=cache)
    cache.crop(hit)
    return logits(model.generate(ids, past_key_values=cache, **GREEDY))


def main(socket: str, folder: str) -> None:
    wait_for_answers(pytest.MonkeyPatch())
    for family in FAMILIES:
        with join(make(family), socket) as cached:
            np.save(Path(folder, family), logits(cached.generate(PROMPT, **GREEDY)))


if __name__ == "__main__":
    main(*sys.argv[1:])
