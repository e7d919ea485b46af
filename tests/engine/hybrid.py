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
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from kvass.connectors.vllm.contract import release
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.conftest import ARGS, ROOT
from tests.support.vllm import hybrid_models
from tests.support.vllm.fake_vllm import installed, version_of
from tests.support.vllm.models import Blueprint, build
from tests.support.vllm.process import Answer, CacheGroup, EngineProcess, Prompt, Settings

LIKE_LOCAL_HIT: Final = 1e-4
LIKE_COLD: Final = 1e-3
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
    exact: bool = True
    """Computed in float32; else vLLM's own output depends on how a prompt was split over steps."""
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
    exact=not BEFORE_0_31,
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
    exact=False,
    retained=160,
)


class Wrong(AssertionError):
    """An answer is not what vLLM gives without kvass."""


class Pair:
    """Engines ``a`` and ``b`` of one model on one daemon."""

    def __init__(self, model: Model, daemon: Daemon, a: EngineProcess, b: EngineProcess) -> None:
        self.model, self.daemon, self.a, self.b = model, daemon, a, b
        self._salts = count()
        self._rng = random.Random(model.blueprint.name)
        self._spread = 0.0

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that nobody used."""
        return [self._rng.randrange(4, hybrid_models.VOCAB) for _ in range(tokens)]

    def groups(self) -> list[CacheGroup]:
        """vLLM's KV cache groups."""
        return self.b.groups()

    def store(self, tokens: list[int], max_tokens: int = 1) -> Answer:
        """Compute ``tokens`` on ``a`` and wait until all of it is stored."""
        assert self.a.reset()
        answer = self.a.one(tokens, max_tokens)
        self.daemon.wait_until(reservations=0)
        return answer

    def load(self, tokens: list[int], max_tokens: int = 6) -> Answer:
        """``tokens`` on ``b``, which has nothing of its own."""
        assert self.b.reset()
        return self.b.one(tokens, max_tokens)

    def cold(self, tokens: list[int], max_tokens: int = 6) -> Answer:
        """What ``b`` computes from the first token on."""
        answer = self.b.one(tokens, max_tokens, salt=self._salt())
        assert answer.cached == 0
        return answer

    def after_local_hit(self, tokens: list[int], hit: int, max_tokens: int = 6) -> Answer:
        """What ``b`` computes after ``hit`` tokens that vLLM found in its own cache."""
        salt = self._salt()
        # One more: vLLM keeps what a repetition of this prompt can use, and never all of it.
        self.b.one(tokens[: hit + 1], 1, salt=salt)
        answer = self.b.one(tokens, max_tokens, salt=salt)
        assert (answer.local, answer.external) == (hit, 0)
        return answer

    def check(self, tokens: list[int], answer: Answer, *, alike: bool = True) -> None:
        """Raise ``Wrong`` unless ``answer`` is right, whatever of its prompt was cached.

        ``alike``: what was loaded had been computed in steps split as those of a local hit are.
        """
        assert answer.finish_reason == "length"
        many = len(answer.tokens)
        cold = self.cold(tokens, many)
        assert_telling(cold)
        if answer.cached:
            local = self.after_local_hit(tokens, answer.cached, many)
            if alike or self.model.exact:
                _compare(answer, local, LIKE_LOCAL_HIT)
            else:
                _compare_first(answer, local, self.spread())
        if self.model.exact:
            _compare(answer, cold, LIKE_COLD)
        else:
            _compare_first(answer, cold, self.spread())

    def spread(self) -> float:
        """By how much two uncached runs of a prompt can differ in their first token's
        log-probability: three times what is measured, over prompts alone and in company."""
        if self._spread == 0.0:
            apart = [0.01]
            for size in (500, 700, 900, 1100, 1300, 700):
                tokens = self.prompt(size)
                company = (Prompt(t, 2, salt=self._salt()) for t in (self.prompt(200), tokens))
                _, crowded = self.b.generate(*company)
                apart.append(abs(self.cold(tokens, 2).logprobs[0] - crowded.logprobs[0]))
            self._spread = 3 * max(apart)
            assert self._spread < 0.5, "too much noise to prove anything"
        return self._spread

    def spoil(self, group: int | None) -> None:
        """From now on ``b`` zeroes the pages of this group that it loads."""
        self.b.disturb(Settings(spoil_group=group))

    def _salt(self) -> str:
        return f"judge {next(self._salts)}"


def _compare(answer: Answer, right: Answer, within: float) -> None:
    same = answer.tokens == right.tokens
    apart = max(abs(x - y) for x, y in zip(answer.logprobs, right.logprobs, strict=True))
    if not same or not apart <= within:
        raise Wrong(f"{answer} differs from {right} by {apart}")


def _compare_first(answer: Answer, right: Answer, within: float) -> None:
    apart = abs(answer.logprobs[0] - right.logprobs[0])
    if not apart <= within:
        raise Wrong(f"{answer} differs from {right} by {apart}")


def assert_telling(answer: Answer) -> None:
    """Assert that the output is not saturated: a wrong page could not but change it.

    A uniform choice among 1024 tokens has log-probability -6.9, a certain one 0.
    """
    assert -5.0 < statistics.median(answer.logprobs) < -0.5
    assert max(answer.logprobs) - min(answer.logprobs) > 0.1


@contextmanager
def running_pair(
    model: Model, folder: Path, options: dict[str, Any] | None = None, gpus: str = "", **args: Any
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
                    patient=True,
                    late=True,
                    gpu=name in gpus,
                )
                engines.append(engine)
            a, b = (engine.wait_ready() for engine in engines)
            yield Pair(model, daemon, a, b)
        finally:
            for engine in engines:
                engine.kill()


def red(pair: Pair, tokens: list[int], answer: Answer) -> None:
    """Assert that the judge finds ``answer`` wrong."""
    with pytest.raises(Wrong):
        pair.check(tokens, answer)
