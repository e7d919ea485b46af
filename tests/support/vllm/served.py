"""The child's half of ``process.ServedEngine``: an ``LLM`` whose core is a process of its own."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any, Final

from tests.support.vllm import instruments

RESET_S: Final = 30.0


class Served:
    """vLLM's public calls, and the utilities that its API server calls."""

    def __init__(self, config: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # of the function in ``update``
        from vllm import LLM

        if config.get("fork_ranks"):
            instruments.fork_ranks()
        transfer: dict[str, Any] = {}
        if "connector" in config:
            transfer["kv_transfer_config"] = instruments.transfer_config(config)
        own = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
        more = {"block_size": 32, "max_num_seqs": 8, "seed": 0, **config["args"], **transfer}
        self.llm = LLM(model=config["model"], **own, **more)
        self._core: Any = self.llm.llm_engine.engine_core

    def run(self, tokens: list[int]) -> tuple[list[int], int]:
        """The answer to a prompt, and how much of it was found cached."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        (output,) = self.llm.generate([{"prompt_token_ids": tokens}], greedy, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    def update(self, folder: str) -> None:
        """Replace the weights by those in ``folder``, by vLLM's own code."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    def update_by_function(self, by: int) -> None:
        """Replace weights in place (``instruments.replace_weights``), by code of ours."""
        self.llm.collective_rpc(instruments.replace_weights, args=(by,))

    def reset(self) -> None:
        """Empty vLLM's own cache. Blocks are held until stores have ended."""
        until = time.monotonic() + RESET_S
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > until:
                raise TimeoutError(f"a block was still held after {RESET_S:g} s")

    def pause(self) -> None:
        """As the API server before an update: the caches are emptied."""
        self._core.call_utility("pause_scheduler", "abort", True)

    def resume(self) -> None:
        """As the API server after an update."""
        self._core.call_utility("resume_scheduler")


def main() -> int:
    """Entry point: ``python -m tests.support.vllm.served '{"model": ...}'``."""
    wire = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints; stdout belongs to the protocol
    try:
        served = Served(json.loads(sys.argv[1]))
        wire.write(json.dumps({"ok": "ready"}) + "\n")
        for line in sys.stdin:
            fields = json.loads(line)
            result = getattr(served, fields.pop("op"))(**fields)
            wire.write(json.dumps({"ok": result}) + "\n")
        served.llm.llm_engine.engine_core.shutdown()
    except Exception as error:  # noqa: BLE001 - the parent is told
        traceback.print_exc()
        wire.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
