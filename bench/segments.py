"""How long the matcher of segments takes, in the bench's own process, in processor time.

A third of each prompt of 128k tokens stands for itself; the rest are runs of one to three of the
indexed chunks at odd offsets. ``segments_found``: whether exactly these were found. ``of one
token``: a prompt that repeats one token, all of whose offsets match. ``add``: 512 chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np

from kvass.blend.match import ChunkMatcher, Chunks, Run
from kvass.types import KEY_WORDS, U32Array, U64Array

K: Final = 256
PROMPT: Final = 131_072
VOCABULARY: Final = 128_256
_AT_ONCE: Final = 512
_SPACE: Final[U64Array] = np.zeros(KEY_WORDS, np.uint64)


def measure_segments(
    sizes: tuple[int, ...] = (100_000, 1_000_000), rounds: int = 21
) -> dict[str, Any]:
    """``segments_ms``: medians over ``rounds``, by what is done; ``segments_found``."""
    figures, right = dict[str, float](), True
    for size in sizes:
        right &= _measure(size, rounds, figures)
    return {"segments_ms": figures, "segments_found": right}


def _measure(size: int, rounds: int, figures: dict[str, float]) -> bool:
    rng = np.random.default_rng(0)
    matcher, name = ChunkMatcher(K, size + _AT_ONCE, b"bench"), f"{size // 1000}k"
    docs = rng.integers(0, VOCABULARY, (size, K), dtype=np.uint32)
    adds = [_ms(partial(_add, matcher, docs, at))[0] for at in range(0, size, _AT_ONCE)]
    figures[f"add to {name}"] = median(adds)
    prompt, planted = _prompt(rng, docs)
    ms, runs = zip(*(_ms(lambda: _find(matcher, prompt)) for _ in range(rounds)), strict=True)
    figures[f"find among {name}"] = median(ms)
    found = [(run.new_start + i * K, id_) for run in runs[0] for i, id_ in enumerate(run.ids)]
    same = np.zeros(PROMPT, np.uint32)
    _add(matcher, same[:K][None], size)
    times = [_ms(lambda: _find(matcher, same))[0] for _ in range(rounds)]
    figures[f"find among {name}, of one token"] = median(times)
    return found == planted


def _prompt(rng: np.random.Generator, docs: U32Array) -> tuple[U32Array, list[tuple[int, int]]]:
    """A prompt, and where in it stand which entries: their ids are those of ``docs``, plus 1."""
    prompt = rng.integers(0, VOCABULARY, PROMPT, dtype=np.uint32)
    planted, at = [], 37
    while at + 3 * K < PROMPT:
        count = int(rng.integers(1, 4))
        first = int(rng.integers(0, len(docs) - count))
        prompt[at : at + count * K] = docs[first : first + count].reshape(-1)
        planted += [(at + i * K, first + i + 1) for i in range(count)]
        at += count * K + int(rng.integers(50, 400))
    return prompt, planted


def _add(matcher: ChunkMatcher, docs: U32Array, at: int) -> None:
    tokens = docs[at : at + _AT_ONCE] if at < len(docs) else docs
    keys = np.zeros((len(tokens) + 1, KEY_WORDS), np.uint64)
    keys[:, 0] = at + np.arange(len(tokens) + 1)
    starts = K * np.arange(len(tokens))
    matcher.add(1, _SPACE, Chunks(tokens, keys[1:], keys[:-1], starts))


def _find(matcher: ChunkMatcher, prompt: U32Array) -> list[Run]:
    return matcher.find(1, _SPACE, prompt, 0, lambda ids: np.ones(len(ids), np.bool_))


def _ms(do: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.thread_time()
    done = do()
    return (time.thread_time() - began_s) * 1e3, done
