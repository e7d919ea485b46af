"""What the demos ask: two questions about one long text, of a pretrained model; without one, two
prompts of random tokens that begin alike, of random weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.real_model import Words, chat, real_model
from tests.support.vllm.models import Shape, build

ROOT: Final = Path(__file__).parent.parent
CACHE: Final = ROOT / ".cache" / "models"
SHAPE: Final = Shape(vocab=4096, hidden=512, intermediate=1408, layers=6, heads=8, head_dim=64)
PROMPT_TOKENS: Final = 4200
SHARED_TOKENS: Final = 3300
WARM_UP_TOKENS: Final = 700
NEW_TOKENS: Final = 24
"""Of each answer. It goes on behind its end: all of them are compared."""
L1: Final = "1GiB"
"""An engine may write a quarter of it at once, and the text's KV is 200 MB."""
TEXTS: Final = ("LICENSE", "examples/text_about_kvass.txt")
"""Texts that do not change: the model is small, and its answers depend on every word."""
SYSTEM: Final = (
    "You answer questions about the text. Give the sentence of the text that answers the question."
)
QUESTIONS: Final = ("What does vLLM lose when its process ends?", "What is a row?")


class Questions(NamedTuple):
    """``prompts`` begin with the same ``shared`` tokens. ``asked`` and ``words`` are of a model
    that knows any."""

    model: Path
    warm_up: list[int]
    prompts: tuple[list[int], list[int]]
    shared: int
    asked: tuple[str, ...] = ()
    words: Callable[[Sequence[int]], str] | None = None


def questions() -> Questions:
    """About real texts if there is the pretrained model."""
    model = real_model()
    return about_texts(model) if model else of_random_tokens()


def about_texts(model: Path) -> Questions:
    """Two questions about the texts of this repository."""
    text = "\n".join((ROOT / name).read_text() for name in TEXTS)
    words = Words(model)
    first, second = (words.tokens(chat(SYSTEM, f"{text}\n{asked}")) for asked in QUESTIONS)
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    warm_up = words.tokens(chat("", (ROOT / "ARCHITECTURE.md").read_text()))[:WARM_UP_TOKENS]
    return Questions(model, warm_up, (first, second), shared, QUESTIONS, words.text)


def of_random_tokens() -> Questions:
    """Random tokens, of a model with random weights."""
    draw = random.Random(7)
    warm_up, first, other_end = (
        [draw.randrange(4, SHAPE.vocab) for _ in range(n)]
        for n in (WARM_UP_TOKENS, PROMPT_TOKENS, PROMPT_TOKENS - SHARED_TOKENS)
    )
    second = first[:SHARED_TOKENS] + other_end
    return Questions(build(CACHE, SHAPE), warm_up, (first, second), SHARED_TOKENS)
