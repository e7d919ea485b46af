"""The tiny random-weight model of the recipes, and how vLLM runs it on two CPU cores."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvass.testing.daemon import running_daemon
from tests.support.vllm.models import TINY, build

PATIENT_MS: Final = 2000
"""``lookup_budget_ms`` of the recipes: how long a request waits for rows that are still being
stored, at least. On a busy machine that may take longer than this tiny model takes to compute."""
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE: Final[dict[str, Any]] = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 512,
    "enforce_eager": True,
    "skip_tokenizer_init": True,  # it has none: prompts are token ids
}


def model() -> Path:
    """The model's folder."""
    return build(Path(__file__).parent.parent / ".cache" / "models")


def some_prompt(tokens: int, seed: int) -> list[int]:
    """A prompt of random token ids."""
    words = random.Random(seed)
    return [words.randrange(4, TINY.vocab) for _ in range(tokens)]


def whole_blocks(tokens: int) -> int:
    """How many of a prompt's tokens another engine finds in the cache: the last is computed."""
    block: int = ENGINE["block_size"]
    return (tokens - 1) // block * block


def transfer_config(socket: str, **options: Any) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config``; ``options`` are the connector's without their ``kvass.``."""
    return {
        "kv_connector": "KvassConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvass.socket": socket}
        | {f"kvass.{name}": value for name, value in options.items()},
    }


@contextmanager
def daemon_at(socket: str | None) -> Iterator[str]:
    """The socket of a daemon: ``socket``, or that of one which is started here and ends."""
    if socket:
        yield socket
        return
    with (
        tempfile.TemporaryDirectory(prefix="kvass-recipe-") as folder,
        running_daemon(Path(folder), l1_size="256MiB", lookup_budget_ms=PATIENT_MS) as daemon,
    ):
        yield daemon.socket


def engine_here(socket: str, **options: Any) -> Any:
    """A ``vllm.LLM`` in this process, which prints no warnings."""
    here = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    for name, value in (ENVIRONMENT | here).items():
        os.environ.setdefault(name, value)
    from vllm import LLM  # reads the environment

    return LLM(model=str(model()), kv_transfer_config=transfer_config(socket, **options), **ENGINE)


def greedy(max_tokens: int = 16, **fields: Any) -> Any:
    """vLLM's ``SamplingParams``; the tiny model never ends by itself."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **fields
    )
