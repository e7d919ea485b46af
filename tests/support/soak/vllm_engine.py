"""A real vLLM engine of a soak: answers must be those of an engine without kvass.

``answers`` has them ready, so a run needs no second engine. It drops vLLM's own prefix cache before
each request; so what is found comes from kvass.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from tests.support.soak.engine import Line, Setup, prompts, requests, tell
from tests.support.vllm.judge import Judge, apart
from tests.support.vllm.models import TINY, Sizes, build
from tests.support.vllm.process import Answer, EngineProcess

CHUNK_TOKENS: Final = 64
MOST_CHUNKS: Final = 10
PROMPTS: Final = 40
"""The first of the trace; they are played again and again."""
ANSWER_TOKENS: Final = 6


class Expected(msgspec.Struct):
    """Prompts and what an engine without kvass says. ``noise``: how far it is from itself."""

    prompts: list[list[int]]
    answers: list[Answer]
    noise: float


def tokens_of(pieces: list[int]) -> list[int]:
    """The tokens of a prompt: a chunk for each piece, and one token more."""
    chunks = [Random(piece).choices(range(4, TINY.vocab), k=CHUNK_TOKENS) for piece in pieces]
    return [token for chunk in chunks for token in chunk] + [5]


ARGS: Final = {"max_model_len": 1024, "num_gpu_blocks_override": 128}


@contextmanager
def _engine(
    folder: Path, name: str, model: Sizes, socket: Path | None = None
) -> Iterator[EngineProcess]:
    with EngineProcess(
        build(folder / "models", model),
        folder / f"{name}.log",
        socket=socket,
        args=ARGS,
        options={"kvass.chunk_tokens": CHUNK_TOKENS},
    ) as engine:
        yield engine.wait_ready()


def write_answers(
    trace: Path, folder: Path, model: Sizes = TINY, name: str = "answers.json"
) -> str:
    """Ask an engine without kvass; the path of the file."""
    chosen = [tokens_of(pieces) for pieces in islice(requests(trace, MOST_CHUNKS), PROMPTS)]
    with _engine(folder, "plain", model) as plain:
        judge = Judge(plain)
        answers = [judge.cold(tokens, ANSWER_TOKENS) for tokens in chosen]
        expected = Expected(chosen, answers, judge.noise())
    file = folder / name
    file.write_bytes(msgspec.json.encode(expected))
    return str(file)


def differs(answer: Answer, right: Answer, noise: float) -> str:
    """How it is wrong; empty: it is not."""
    worst = apart(answer, right)
    return f"{answer.tokens}, not {right.tokens}: {worst:g} apart" if worst > noise else ""


def play(
    setup: Setup,
    model: Sizes = TINY,
    start: Callable[..., AbstractContextManager[EngineProcess]] = _engine,
) -> None:
    """``start``: as ``_engine``."""
    file = Path(setup.answers)
    expected = msgspec.json.decode(file.read_bytes(), type=Expected)
    with start(file.parent, f"vllm-{setup.number}", model, Path(setup.socket)) as engine:
        tell(Line(setup.first))
        for n, _ in prompts(setup):
            number, began_s = n % len(expected.prompts), time.monotonic()
            tokens = expected.prompts[number]
            engine.reset()
            answer = engine.one(tokens, ANSWER_TOKENS)
            hit = answer.external // CHUNK_TOKENS
            wrong = differs(answer, expected.answers[number], expected.noise)
            asked_chunks, s = len(tokens) // CHUNK_TOKENS, round(time.monotonic() - began_s, 3)
            tell(Line(n, asked_chunks, hit, hit, s, wrong and f"hit {answer.external}: {wrong}"))
            if wrong:
                return


if __name__ == "__main__":
    play(msgspec.json.decode(sys.argv[1], type=Setup))
