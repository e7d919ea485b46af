"""A tiny Whisper with random weights, whose engine answers one request.

``python -m tests.support.vllm.whisper FOLDER`` makes the model in FOLDER and prints the tokens.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

END: Final = 256
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 300,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": 50,
    "max_target_positions": 64,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "decoder_start_token_id": END + 1,
} | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), END)


def build(folder: Path) -> None:
    """Write the model, what prepares one second of sound, and a tokenizer of bytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.WhisperConfig(**SIZES)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    features = transformers.WhisperFeatureExtractor(chunk_length=1).to_dict()
    features["processor_class"] = "WhisperProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps(features))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(letters)}, merges=[]))
    tokens.add_special_tokens(["<|endoftext|>", "<|startoftranscript|>"])
    tokens.save(str(folder / "tokenizer.json"))
    names = dict.fromkeys(("eos_token", "bos_token", "unk_token", "pad_token"), "<|endoftext|>")
    names["tokenizer_class"] = "WhisperTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def main() -> None:
    """See the module."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    folder = Path(sys.argv[1])
    build(folder)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=1,
        num_gpu_blocks_override=64,
        limit_mm_per_prompt={"audio": 1},
    )
    sound = np.sin(np.arange(16_000) / 5).astype(np.float32)
    spoken = {"prompt": "", "multi_modal_data": {"audio": (sound, 16_000)}}
    asked: Any = {"encoder_prompt": spoken, "decoder_prompt": "<|startoftranscript|>"}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (answer,) = llm.generate([asked], params)
    print(*answer.outputs[0].token_ids, file=out, flush=True)


if __name__ == "__main__":
    main()
