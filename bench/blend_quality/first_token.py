"""Time to the first token with a model of random weights and more size, by selector and ratio."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch

from bench.blend_quality.model import llama
from bench.blend_quality.quality import compute, cut, joined
from kvass.blend.plan import FirstK, PlacedSegment, Prompt, Selection, none
from kvass.connectors.transformers.blending import Blender
from kvass.types import I64Array

DOCUMENTS, LENGTH, QUESTION = 8, 256, 32
"""Documents of so many tokens in another order, and new tokens behind them."""


class Race:
    """One prompt, and the KV of its documents from another one."""

    def __init__(self, hidden: int = 512, layers: int = 8, length: int = LENGTH) -> None:
        torch.manual_seed(0)
        random = np.random.default_rng(0)
        self.length = length
        self.model = llama(hidden, layers, 1000)
        self.blender = Blender(self.model)
        documents = random.integers(0, 1000, (DOCUMENTS, length))
        question = random.integers(0, 1000, QUESTION)
        order = random.permutation(DOCUMENTS)
        _, kv = compute(self.model, documents.reshape(-1))
        self.stored = [cut(kv, int(i) * length, int(i + 1) * length) for i in order]
        self.tokens: I64Array = np.concatenate([documents[order].reshape(-1), question])
        segments = (
            PlacedSegment(at * length, int(i) * length, length) for at, i in enumerate(order)
        )
        self.prompt = Prompt(DOCUMENTS * length + 1, 0, tuple(segments))

    def full(self) -> None:
        compute(self.model, self.tokens)

    def blend(self, selection: Selection) -> None:
        """Move K, choose, compute: all that stands between loaded chunks and the first token."""
        end = DOCUMENTS * self.length
        kv = joined(self.stored)
        self.blender.move(kv, self.prompt.segments)
        ids = torch.from_numpy(self.tokens)[None, : end + 1]
        self.blender.recompute(ids, kv, self.prompt, selection)
        compute(self.model, self.tokens[end:], kv)


def measure(race: Race, ratios: tuple[float, ...], rounds: int) -> dict[str, float]:
    """Median seconds of ``rounds``, all ways in turn, by name and ratio, like ``first_k 0.2``."""
    ways: dict[str, Callable[[], None]] = {
        "full": race.full,
        "none": partial(race.blend, none),
    }
    for ratio in ratios:
        ways[f"first_k {ratio:g}"] = partial(race.blend, FirstK(round(ratio * race.length)))
        ways[f"kv_dev {ratio:g}"] = partial(race.blend, ratio)
    took: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            began = time.perf_counter()
            call()
            took[way].append(time.perf_counter() - began)
    return {way: median(seconds) for way, seconds in took.items()}
