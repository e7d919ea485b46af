"""Real vLLM engines on a GPU: what one of them computed is right in another one.

"Right" means equal log probabilities, to the last bit, where the engine that computed the prompt
finds as many tokens in its own prefix cache. Else the engines compute another number of tokens, and
kernels round otherwise.
"""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from kvass.testing.daemon import Daemon, running_daemon
from tests.gpu.conftest import NEEDS_GPU
from tests.support.vllm import hybrid_models
from tests.support.vllm.models import LatentShape, Shape, Sizes, build
from tests.support.vllm.process import Answer, EngineProcess, Settings

HAS_VLLM: Final = importlib.util.find_spec("vllm") is not None
pytestmark = [*NEEDS_GPU, pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM for this GPU")]

MODELS: Final = Path(__file__).parents[2] / ".cache" / "models"
BLOCK: Final = 16
CHUNK: Final = 256
COMMON: Final[dict[str, Any]] = {
    "dtype": "bfloat16",
    "block_size": BLOCK,
    "max_model_len": 4096,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 30,
}
GRAPHS: Final = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
ROUNDING: Final = 0.1
STATES: Final = {
    "block_size": None,
    "mamba_cache_mode": "align",
    "gdn_prefill_backend": "triton",  # FlashInfer's is the default, and may not be there
}
EXACT: Final = {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
DENSE: Final = Shape(
    vocab=4096, hidden=1024, intermediate=2816, layers=8, heads=16, kv_heads=8, head_dim=64
)


@dataclass(frozen=True)
class Case:
    """A model, and how it runs."""

    name: str
    shape: Sizes
    args: dict[str, Any]
    options: dict[str, Any]


CASES: Final = (  # by worth: a GPU is at hand for minutes (bench.gpu_day)
    Case("graphs", DENSE, GRAPHS, {}),
    Case("states", hybrid_models.qwen3_next(), STATES, {}),
    Case("experts", hybrid_models.gpt_oss(), EXACT, {}),
    Case("blocks outermost", DENSE, {}, {"kvass.kv_layout": "blocks"}),
    Case("mla", LatentShape(), {"attention_backend": "TRITON_MLA"}, {}),
    Case("windows", hybrid_models.gemma3(), EXACT, {}),
    Case("float32", DENSE, EXACT, {}),
    Case("fp8", DENSE, {"attention_backend": "TRITON_ATTN", "kv_cache_dtype": "fp8"}, {}),
)


@dataclass
class Pair:
    """Two engines of one model, and their daemon."""

    case: Case
    a: EngineProcess
    b: EngineProcess
    daemon: Daemon
    rng: random.Random

    def prompt(self, count: int) -> list[int]:
        return [self.rng.randrange(4, hybrid_models.VOCAB) for _ in range(count)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name.replace(" ", "_"))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    case: Case = request.param
    folder = tmp_path_factory.mktemp("pair")
    args = {name: value for name, value in (COMMON | case.args).items() if value is not None}
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon(folder, "2GiB"))
        a, b = (
            stack.enter_context(
                EngineProcess(
                    build(MODELS, case.shape),
                    folder / f"{name}.log",
                    socket=Path(daemon.socket),
                    args=args,
                    options=case.options,
                    patient=True,
                )
            )
            for name in "ab"
        )
        yield Pair(case, a.wait_ready(), b.wait_ready(), daemon, random.Random(case.name))


def stored(pair: Pair, tokens: list[int], count: int = 16) -> Answer:
    """``a`` computes a prompt, and the daemon has it."""
    answer = pair.a.one(tokens, count)
    pair.daemon.wait_until(reservations=0)
    return answer


def test_what_is_loaded_is_what_was_computed(pair: Pair) -> None:
    for count in (700, 1500, 3000):
        tokens = pair.prompt(count)
        stored(pair, tokens)
        local, found = pair.a.one(tokens, 16), pair.b.one(tokens, 16)
        assert found.external >= CHUNK
        if found.external == local.local:
            assert (found.tokens, found.logprobs) == (local.tokens, local.logprobs)
        else:  # a whole chunk of a model with windows or states
            assert abs(found.logprobs[0] - local.logprobs[0]) < ROUNDING
        assert pair.b.reset()


@pytest.mark.parametrize("kind", ["load", "store"])
def test_one_flipped_byte_ends_the_cache(pair: Pair, kind: str) -> None:
    """The control of verification, and of what the test above compares."""
    chunk = CHUNK if pair.case.name != "states" else 1024
    right, other = pair.prompt(chunk + 1), pair.prompt(chunk + 1)
    expected = stored(pair, right)
    stored(pair, other, 1)
    if kind == "store":
        pair.daemon.restart()
        time.sleep(3)  # engines connect again
    assert pair.b.reset()
    pair.b.verify_again()
    pair.b.disturb(Settings(flip=kind))
    answer = pair.b.one(right, 16)
    pair.b.one(other, 2)
    pair.b.disturb(Settings())
    assert f"rank 0: a {kind} in layer group 0 (" in pair.b.log()
    assert answer.external == 0
    assert answer.tokens == expected.tokens
    pair.b.verify_again()


def test_a_killed_daemon_costs_hits_alone(pair: Pair) -> None:
    tokens = pair.prompt(3 * CHUNK + 1)
    expected = stored(pair, tokens)
    pair.daemon.kill()
    assert pair.b.reset()
    answer = pair.b.one(tokens, 16)
    assert answer.external == 0
    assert answer.tokens == expected.tokens
    pair.daemon.start()
    time.sleep(3)
    assert pair.a.reset()
    stored(pair, tokens)
    assert pair.b.reset()
    assert pair.b.one(tokens, 16).external > 0
