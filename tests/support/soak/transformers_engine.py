"""A model of transformers of a soak: answers must be those of the model without kvass.

``answers`` has them ready, as of ``vllm_engine``. The model keeps nothing between calls; so what is
found comes from kvass.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch

from kvass.connectors.transformers import connect
from tests.support.hf_models import CHUNK, GREEDY, VOCABULARY, make, plain
from tests.support.soak.engine import Line, Setup, prompts, requests, tell
from tests.support.soak.vllm_engine import MOST_CHUNKS, PROMPTS, Expected, differs
from tests.support.vllm.judge import SAME
from tests.support.vllm.process import Answer


def tokens_of(pieces: list[int]) -> list[int]:
    """As of ``vllm_engine``, in this model's vocabulary."""
    chunks = [Random(piece).choices(range(3, VOCABULARY), k=CHUNK) for piece in pieces]
    return [token for chunk in chunks for token in chunk] + [5]


def answer_of(logits: Any, hit: int = 0) -> Answer:
    """The greedy tokens and their log-probabilities."""
    logprobs, tokens = torch.log_softmax(torch.as_tensor(logits).float(), -1).max(-1)
    return Answer(tokens.tolist(), logprobs.tolist(), 0, hit, 0.0, 0.0)


def write_answers(trace: Path, folder: Path) -> str:
    """Ask a model without kvass; the path of the file. What float32 adds in another order differs
    by less than a hundred times ``SAME``."""
    chosen = [tokens_of(pieces) for pieces in islice(requests(trace, MOST_CHUNKS), PROMPTS)]
    model = make()
    answers = [answer_of(plain(model, torch.tensor([tokens]))) for tokens in chosen]
    file = folder / "transformers-answers.json"
    file.write_bytes(msgspec.json.encode(Expected(chosen, answers, 100 * SAME)))
    return str(file)


def play(setup: Setup) -> None:
    expected = msgspec.json.decode(Path(setup.answers).read_bytes(), type=Expected)
    with connect(make(), socket=setup.socket, chunk_tokens=CHUNK, wait_s=10.0) as kv:
        tell(Line(setup.first))
        for n, _ in prompts(setup):
            number, began_s = n % len(expected.prompts), time.monotonic()
            tokens = expected.prompts[number]
            output = kv.generate(torch.tensor([tokens]), tenant="transformers", **GREEDY)
            answer = answer_of(torch.cat(output.logits), kv.last.loaded)
            hit, asked = kv.last.loaded // CHUNK, len(tokens) // CHUNK
            wrong = differs(answer, expected.answers[number], expected.noise)
            s = round(time.monotonic() - began_s, 3)
            tell(Line(n, asked, hit, hit, s, wrong and f"hit {kv.last.loaded}: {wrong}"))
            if wrong:
                return


if __name__ == "__main__":
    play(msgspec.json.decode(sys.argv[1], type=Setup))
