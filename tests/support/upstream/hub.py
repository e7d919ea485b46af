"""Models that vLLM's tests name, as a cache of Hugging Face's hub: a configuration and a tokenizer
without weights. They are smaller than the real ones, and need no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

REVISION: Final = "0" * 40
OPT: Final[dict[str, Any]] = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 50272,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "do_layer_norm_before": True,
    "activation_function": "relu",
}
MODELS: Final = {"facebook/opt-125m": OPT}
SPECIAL: Final = ("<s>", "<pad>", "</s>", "<unk>")


def write_hub(folder: Path) -> None:
    """Write ``MODELS`` into ``folder``, which is to be ``HF_HOME``."""
    for name, config in MODELS.items():
        model = folder / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(REVISION)
        (snapshot / "config.json").write_text(json.dumps(config))
        (snapshot / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
        _write_tokenizer(snapshot, int(config["vocab_size"]))


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Every word is a token: ``w4``, ``w5`` and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(SPECIAL)}
    words |= {f"w{number}": number for number in range(len(SPECIAL), vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[3]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ("bos_token", "pad_token", "eos_token", "unk_token")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(zip(names, SPECIAL, strict=True)),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
