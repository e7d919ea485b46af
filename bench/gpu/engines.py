"""``python -m bench --gpu --engine``: what a hit saves in vLLM engines on one GPU.

Three engines in processes of their own, with saved random weights in bfloat16: ``kvass``;
``blocks``, which is kvass with ``kvass.kv_layout`` "blocks"; and ``native``, vLLM's own
``OffloadingConnector`` with as much host memory. They take turns. Each first serves as many hits as
kvass verifies after a start. Needs vLLM for this GPU, and 40 GiB of device and host memory.

What the names mean. Times are to the first token of prompts of ``N`` tokens, in milliseconds, the
median over rounds, each of which has another prompt:

- ``N_..._cold_ms``: nobody has seen it. ``N_..._local_ms``: at once again, so by vLLM's own prefix
  cache. ``N_..._hit_ms``: again after that cache was emptied, so from host memory.
- ``N_kvass_vs_native``, ``N_blocks_vs_native``: the ratio of the medians of hits.
- ``same_tokens``: whether every hit gave the four tokens that vLLM's own cache gave.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from kvass._version import __version__
from kvass.cli.bench.rig import say, start_daemon
from kvass.errors import Unavailable
from tests.support.vllm.models import Shape, config_of, tensors_of
from tests.support.vllm.process import Answer, EngineProcess

SHAPE: Final = Shape(
    vocab=32_000,
    hidden=3072,
    intermediate=8192,
    layers=28,
    heads=24,
    kv_heads=8,
    head_dim=128,
    max_tokens=65_536,
)
"""Llama-3.2-3B, but for its vocabulary: 112 KiB of KV per token."""
GIB: Final = 1 << 30
BLOCK: Final = 16
LENGTHS: Final = (2049, 8193, 32_001)
"""A multiple of the block and one more: all find as much, and compute one token."""
VERIFIED: Final = 18
HOST_BYTES: Final = 16 * GIB
ARGS: Final[dict[str, Any]] = {
    "dtype": "bfloat16",
    "block_size": BLOCK,
    "max_model_len": 34_000,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 6 * GIB,
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
}
NATIVE: Final[dict[str, Any]] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES},
}


def measure_engines(rounds: int) -> dict[str, Any]:
    """All figures, by the names in this module's docstring. Raises ``KvassError``."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        say("a model of random weights")
        write_model(folder)
        daemon = stack.enter_context(start_daemon(HOST_BYTES))
        say("the start of three engines")
        transfers = {
            "kvass": _kvass(daemon.socket),
            "blocks": _kvass(daemon.socket, **{"kvass.kv_layout": "blocks"}),
            "native": NATIVE,
        }
        engines = {
            name: stack.enter_context(
                EngineProcess(folder, folder / f"{name}.log", args=ARGS, transfer=transfer)
            )
            for name, transfer in transfers.items()
        }
        for engine in engines.values():
            _warm_up(engine.wait_ready())
        figures: dict[str, Any] = {"version": __version__, "rounds": rounds, "same_tokens": True}
        for length in LENGTHS:
            say(f"prompts of {length} tokens, {rounds} rounds")
            figures |= _measure(engines, length, rounds, figures)
        return figures


def _kvass(socket: str, **options: str) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config``. ``reset`` must leave what the daemon has."""
    extra = {"kvass.socket": socket, "kvass.fixed_weights": True, **options}
    return {
        "kv_connector": "KvassConnector",
        "kv_connector_module_path": "kvass.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def _warm_up(engine: EngineProcess) -> None:
    """Compile and capture, pin, and verify."""
    for length in (3000, 9000):
        engine.one(_words(length, "warm-up"), 4)
    for number in range(VERIFIED):
        prompt = _words(300, ("verified", number))
        engine.one(prompt, 1)
        _hit(engine, prompt, 1)


def _measure(
    engines: dict[str, EngineProcess], length: int, rounds: int, so_far: dict[str, Any]
) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    same = so_far["same_tokens"]
    for number in range(rounds + 1):  # the first warms up
        for name, engine in engines.items():
            prompt = _words(length, (name, length, number))
            cold, local = engine.one(prompt, 4), engine.one(prompt, 4)
            time.sleep(0.2)  # a store ends
            hit = _hit(engine, prompt, 4)
            if hit.external < length - 1:
                raise Unavailable(f"{name}: {hit.external} of {length} tokens hit")
            same = same and hit.tokens == local.tokens
            if number:
                for what, answer in (("cold", cold), ("local", local), ("hit", hit)):
                    times.setdefault(f"{name}_{what}", []).append(answer.first_token_s)
    found = {f"{length}_{name}_ms": 1e3 * median(took) for name, took in times.items()}
    ratios = {
        f"{length}_{name}_vs_native": median(times[f"{name}_hit"]) / median(times["native_hit"])
        for name in ("kvass", "blocks")
    }
    return found | ratios | {"same_tokens": same}


def _hit(engine: EngineProcess, prompt: list[int], tokens: int) -> Answer:
    """The prompt without vLLM's own cache."""
    if not engine.reset():
        raise Unavailable("the engine's own cache could not be emptied")
    return engine.one(prompt, tokens)


def _words(count: int, seed: object) -> list[int]:
    rng = random.Random(repr(seed))
    return [rng.randrange(4, SHAPE.vocab) for _ in range(count)]


def write_model(folder: Path, shape: Shape = SHAPE) -> None:
    """A model in bfloat16, drawn by torch on the GPU: numpy would take minutes."""
    import torch
    from safetensors.torch import save_file

    config = config_of(shape) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    weights = {
        one.name: (torch.randn(one.size, device=device) * one.deviation + one.mean)
        .to(torch.bfloat16)
        .cpu()
        for one in tensors_of(shape)
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    torch.cuda.empty_cache()
