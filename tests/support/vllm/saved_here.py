"""Models that are saved and served by one process, as in a notebook.

``python -m tests.support.vllm.saved_here SOCKET FOLDER`` prints how many rows the daemon at SOCKET
has after each engine: of a model that was just saved; of another one that was saved when the first
engine had ended; and of one of which a file was replaced after the engine's configuration was made.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from kvass import Client
from tests.support.vllm.models import TINY, write_model

PROMPT = {"prompt_token_ids": list(range(4, 604))}


def save(folder: Path, seed: int) -> dict[str, Any]:
    """Save a model; the arguments of its engine."""
    folder.mkdir()
    write_model(folder, TINY, seed)
    return {
        "model": str(folder),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 64,
        "block_size": 32,
        "kv_transfer_config": {
            "kv_connector": "KvassConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kvass.socket": sys.argv[1]},
        },
    }


def rows_after(engine: Any, generate: Any) -> int:
    """The daemon's rows when the engine has ended."""
    generate()
    engine.engine_core.shutdown()
    with Client(sys.argv[1]) as client:
        until_s = time.monotonic() + 60
        while (status := client.status(60))["reservations"]:
            assert time.monotonic() < until_s, status
            time.sleep(0.005)
    return int(status["rows"])


def main() -> None:
    """See the module."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    folder, found = Path(sys.argv[2]), []
    for seed in (1, 2):
        llm = LLM(**save(folder / str(seed), seed))
        found.append(rows_after(llm.llm_engine, lambda: llm.generate([PROMPT], params)))  # noqa: B023
    config = EngineArgs(**save(folder / "3", 3)).create_engine_config()
    weights = folder / "3" / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    engine = LLMEngine.from_vllm_config(config)

    def generate() -> None:
        engine.add_request("r", PROMPT, params)
        while engine.has_unfinished_requests():
            engine.step()

    found.append(rows_after(engine, generate))
    print(*found, file=out, flush=True)


if __name__ == "__main__":
    main()
