"""What the tests of models with several KV cache groups share: engines, and a judge among them.

``Pair`` is two engine processes of one model on one daemon. The second is its own judge: under a
salt that nobody else uses it can hit nothing but what itself computed under that salt.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from kvass.connectors.vllm.contract import release
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.conftest import ARGS, ROOT
from tests.support.vllm import hybrid_models
from tests.support.vllm.fake_vllm import installed, version_of
from tests.support.vllm.judge import Judge, Wrong
from tests.support.vllm.models import Blueprint, build
from tests.support.vllm.process import Answer, CacheGroup, EngineProcess, Prompt, Settings

DELAYED: Final = ("-m", "tests.support.wire.delayed_daemon", "0.005")
BEFORE_0_31: Final = release(version_of(installed())) < (0, 31)
"""vLLM 0.30 fails on a CPU with gpt-oss in float32 (not in bfloat16), and with drafters."""


@dataclass(frozen=True)
class Model:
    """A model to test with. ``chunk`` tokens are what kvass must choose; ``groups`` the spec and
    block size of each of vLLM's groups; ``around`` the prompt lengths at whose edges it may err."""

    blueprint: Blueprint
    chunk: int
    groups: list[tuple[str, int]]
    around: tuple[int, ...]
    args: dict[str, Any] = field(default_factory=dict)
    retained: int | None = None
    """Every so many tokens of a prompt are a boundary at which a hit may end; None: all chunks."""

    def hit(self, tokens: int, stored: int | None = None) -> int:
        """How much of a prompt is found if a prompt of ``stored`` tokens that begins alike (by
        default the same) was stored: never all of it."""
        stored = tokens if stored is None else stored
        if self.retained is None:
            return min(tokens - 1, stored) // self.chunk * self.chunk
        left = (stored - 1) // self.chunk * self.chunk
        return left if left < tokens else 0

    @property
    def sizes(self) -> list[int]:
        """The edges, one token before, at and after."""
        return sorted({edge + by for edge in self.around for by in (-1, 0, 1)})


GPT_OSS: Final = Model(
    hybrid_models.gpt_oss(),
    256,
    [("SlidingWindowSpec", 32), ("FullAttentionSpec", 32)],
    (128, 256, 416, 512 + 128),
    {"dtype": "bfloat16"} if BEFORE_0_31 else {},
)
GEMMA3: Final = Model(
    hybrid_models.gemma3(),
    256,
    [("SlidingWindowSpec", 32), ("SlidingWindowSpec", 32), ("FullAttentionSpec", 32)],
    (256, 512 + 300),
)
QWEN3_NEXT: Final = Model(
    hybrid_models.qwen3_next(),
    160,
    [("MambaSpec", 160), ("FullAttentionSpec", 160)],
    (160, 480),
    # vLLM takes other states, and so other blocks, where a CPU computes in bfloat16 (AVX512).
    {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"},
    retained=160,
)


class Pair:
    """Engines ``a`` and ``b`` of one model on one daemon. ``beyond``: of ``b``'s judge. It is one
    token: vLLM keeps what a repetition of a prompt can use, and that is never all of it."""

    def __init__(
        self, model: Model, daemon: Daemon, a: EngineProcess, b: EngineProcess, beyond: int = 1
    ) -> None:
        self.model, self.daemon, self.a, self.b = model, daemon, a, b
        self.judge, self._beyond = Judge(b, beyond), beyond
        self._rng = random.Random(model.blueprint.name)

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that nobody used."""
        return [self._rng.randrange(4, hybrid_models.VOCAB) for _ in range(tokens)]

    def groups(self) -> list[CacheGroup]:
        """vLLM's KV cache groups."""
        return self.b.groups()

    def store(self, tokens: list[int], max_tokens: int = 1) -> Answer:
        """Compute ``tokens`` on ``a`` and wait until all of it is stored."""
        assert self.a.reset()
        return self.a.store(Prompt(tokens, max_tokens))[0]

    def load(self, tokens: list[int], max_tokens: int = 6) -> Answer:
        """``tokens`` on ``b``, which has nothing of its own."""
        assert self.b.reset()
        return self.b.one(tokens, max_tokens)

    def check(self, tokens: list[int], answer: Answer) -> None:
        """:raises Wrong: unless ``answer`` is as near to what vLLM says after a hit of its own as
        vLLM is to itself. vLLM keeps the ends of a prompt alone, so the prompt that leaves this hit
        is shorter than the one that was stored, and its steps have other sizes."""
        assert_telling(self.judge.cold(tokens, len(answer.tokens)))
        left = answer.cached + self._beyond
        self.judge.check(tokens, answer, alike=False, stored=left)

    def spoil(self, group: int | None) -> None:
        """From now on ``b`` zeroes the pages of this group that it loads."""
        self.b.disturb(Settings(spoil_group=group))


def assert_telling(answer: Answer) -> None:
    """Assert that the output is not saturated: a wrong page could not but change it.

    A uniform choice among 1024 tokens has log-probability -6.9, a certain one 0.
    """
    assert -5.0 < statistics.median(answer.logprobs) < -0.5
    assert max(answer.logprobs) - min(answer.logprobs) > 0.1


@contextmanager
def running_pair(
    model: Model,
    folder: Path,
    options: dict[str, Any] | None = None,
    gpus: str = "",
    beyond: int = 1,
    **args: Any,
) -> Iterator[Pair]:
    """Two engines of ``model``, started side by side on a daemon of their own, with ``options``;
    the pages of those named in ``gpus`` are on fake GPUs. The daemon's grants come steps late."""
    path = build(ROOT / ".cache" / "models", model.blueprint)
    engines: list[EngineProcess] = []
    options = {"l1_size": "256MiB", "lookup_budget_ms": 10_000, **(options or {})}
    with running_daemon(folder, program=DELAYED, **options) as daemon:
        try:
            for name in "ab":
                engine = EngineProcess(
                    path,
                    folder / f"{name}.log",
                    socket=Path(daemon.socket),
                    args={**ARGS, **model.args, **args},
                    # gpt-oss has a reasoning parser: "auto" would not store its answers
                    options={"kvass.generated": "on"},
                    patient=True,
                    late=True,
                    gpu=name in gpus,
                )
                engines.append(engine)
            a, b = (engine.wait_ready() for engine in engines)
            yield Pair(model, daemon, a, b, beyond)
        finally:
            for engine in engines:
                engine.kill()


def red(pair: Pair, tokens: list[int], answer: Answer) -> None:
    """Assert that the judge finds ``answer`` wrong."""
    with pytest.raises(Wrong):
        pair.check(tokens, answer)
