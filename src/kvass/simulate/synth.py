"""Synthetic traces, free to share: chats of many turns, questions about documents, agents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final

from kvass.errors import UsageError
from kvass.simulate.traces import MOONCAKE_TOKENS

KINDS: Final = ("chat", "rag", "agents")
_Turn = tuple[float, int, int, list[int]]
"""A request: seconds, tokens of the prompt, tokens of the answer, ids of the prompt's pieces."""


def write(path: Path, kind: str, requests: int, seed: int, sessions_s: float = 1.0) -> None:
    """Write ``requests`` requests as Mooncake's JSON lines. ``sessions_s``: how many sessions begin
    in a second, on average. Raises ``UsageError``."""
    turns = sorted(_turns(kind, requests, Random(seed), sessions_s), key=lambda turn: turn[0])[
        :requests
    ]
    try:
        with path.open("x", encoding="utf-8") as file:
            for turn in turns:
                file.write(json.dumps(_line(*turn)) + "\n")
    except OSError as error:
        raise UsageError(f"--synth {path}: {error.strerror}") from error


def _line(time_s: float, input_tokens: int, output_tokens: int, ids: list[int]) -> dict[str, Any]:
    return {
        "timestamp": int(time_s * 1000),
        "input_length": input_tokens,
        "output_length": output_tokens,
        "hash_ids": ids,
    }


def _turns(kind: str, requests: int, random: Random, sessions_s: float) -> Iterator[_Turn]:
    """More than ``requests`` turns, in any order."""
    fresh, made, begin_s = count(), 0, 0.0
    systems = [_ids(fresh, random.randint(1, 4)) for _ in range(8)]
    lengths = [random.randint(4, 24) for _ in range(200)]
    stems = dict[tuple[int, int], list[int]]()
    """The ids of a document's pieces by system prompt and document. They depend on the system
    prompt, because an id stands for all tokens before it, too."""
    while made < 2 * requests:
        begin_s += random.expovariate(sessions_s)
        system, at_s = random.randrange(len(systems)), begin_s
        prompt = list(systems[system])
        if kind == "rag":  # a popular document is asked for more often
            document = int(len(lengths) * random.random() ** 2)
            if (system, document) not in stems:
                stems[system, document] = _ids(fresh, lengths[document])
            prompt += stems[system, document]
        turns = {"chat": random.randint(1, 8), "rag": random.randint(1, 3)}.get(kind, 20)
        for _ in range(turns):
            prompt = prompt + _ids(fresh, random.randint(1, 6 if kind == "agents" else 2))
            output_tokens = random.randint(20, 400)
            input_tokens = len(prompt) * MOONCAKE_TOKENS + random.randrange(MOONCAKE_TOKENS)
            yield at_s, input_tokens, output_tokens, prompt
            made += 1
            at_s += random.expovariate(1 / (5.0 if kind == "agents" else 60.0))


def _ids(fresh: count[int], pieces: int) -> list[int]:
    return [next(fresh) for _ in range(pieces)]
