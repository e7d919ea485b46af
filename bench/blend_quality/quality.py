"""Accuracy and divergence of blended prompts, by selector and recompute ratio.

Each document's KV comes from another prompt, where it stood elsewhere, after other documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from bench.blend_quality import task
from kvass.blend.plan import FirstK, PlacedSegment, Prompt, Selection, Selector, all_tokens, none
from kvass.connectors.transformers.blending import Blender
from kvass.connectors.transformers.model import filled, tensors_of
from kvass.connectors.transformers.rows import KV
from kvass.types import I64Array

RATIOS: Final = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75)
CONTROL: Final = RATIOS.index(0.2)
"""The ratio of the controls."""
BODY: Final = task.TOKENS - task.QUESTIONS


def compute(model: Any, tokens: I64Array, kv: KV | None = None) -> tuple[torch.Tensor, KV]:
    """Logits [tokens, vocabulary] of ``tokens``, which stand after those of ``kv``, and all KV."""
    cache = None if kv is None else filled(model, kv)
    with torch.no_grad():
        out = model(torch.from_numpy(tokens)[None], past_key_values=cache, use_cache=True)
    return out.logits[0], tensors_of(out.past_key_values)


def cut(kv: KV, start: int, end: int) -> KV:
    return [tensor[:, :, start:end] for tensor in kv]


def joined(parts: Sequence[KV]) -> KV:
    return [torch.cat(tensors, 2) for tensors in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Case:
    """A prompt up to its questions, its exact prefix's KV, and of each document the KV that another
    prompt left. ``logits`` [QUESTIONS, vocabulary] are those of a full prefill."""

    asked: task.Asked
    prompt: Prompt
    prefix: KV
    stored: list[KV]
    logits: torch.Tensor


def cases(model: Any, count: int, seed: int) -> list[Case]:
    random = np.random.default_rng(seed)
    return [_case(model, random) for _ in range(count)]


def _case(model: Any, random: np.random.Generator) -> Case:
    slots = [int(slot) for slot in random.permutation(task.DOCUMENTS)]
    mine = {slot: task.document(random, slot) for slot in slots}
    asked = task.ask(random, [task.prefix(random), *(mine[slot] for slot in slots)], True)
    segments, stored = [], []
    for index, slot in enumerate(slots):
        order = [int(other) for other in random.permutation(task.DOCUMENTS)]
        parts = [mine[slot] if other == slot else task.document(random, other) for other in order]
        elsewhere = task.ask(random, [task.prefix(random), *parts], False)
        new, old = (task.PREFIX + i * task.LENGTH for i in (index, order.index(slot)))
        segments.append(PlacedSegment(new, old, task.LENGTH, b"other", bytes([slot])))
        stored.append(cut(compute(model, elsewhere.tokens)[1], old, old + task.LENGTH))
    logits, kv = compute(model, asked.tokens)
    prompt = Prompt(BODY + 1, task.PREFIX, tuple(segments))
    return Case(asked, prompt, cut(kv, 0, task.PREFIX), stored, logits[BODY:])


@dataclass
class Score:
    """Sums over questions."""

    questions: int = 0
    right: int = 0
    divergence: float = 0.0
    recomputed: int = 0
    reused: int = 0

    def add(self, case: Case, logits: torch.Tensor, recomputed: int) -> None:
        labels = torch.from_numpy(case.asked.labels[BODY:])
        full, ours = case.logits.log_softmax(-1), logits.log_softmax(-1)
        self.questions += len(labels)
        self.right += int((logits.argmax(-1) == labels).sum())
        self.divergence += float((full.exp() * (full - ours)).sum())
        self.recomputed += recomputed
        self.reused += BODY - task.PREFIX

    @property
    def accuracy(self) -> float:
        return self.right / self.questions

    @property
    def kl(self) -> float:
        """KL(full || blended), nats per question."""
        return self.divergence / self.questions

    @property
    def ratio(self) -> float:
        return self.recomputed / self.reused


def last_k(ratio: float) -> Selector:
    k = round(ratio * task.LENGTH)
    return lambda prompt: np.concatenate(
        [np.arange(s.new_end - k, s.new_end) for s in prompt.segments]
    )


def at_random(ratio: float) -> Selector:
    """The same tokens each time for a prompt of the same segments."""

    def select(prompt: Prompt) -> I64Array:
        inside = np.flatnonzero(prompt.in_segments())
        seed = [segment.old_start for segment in prompt.segments]
        chosen: I64Array = np.random.default_rng(seed).permutation(inside)
        return chosen[: round(ratio * len(inside))]

    return select


SELECTORS: Mapping[str, Callable[[float], Selection]] = {
    "kv_dev": float,
    "first_k": lambda ratio: FirstK(round(ratio * task.LENGTH)),
    "last k": last_k,
    "random": at_random,
}


def measure(model: Any, found: list[Case]) -> dict[str, list[Score]]:
    """By name, a score for each ratio; of ``full``, ``none``, ``all`` and the controls one each.
    The controls recompute as ``kv_dev`` does."""
    blender = Blender(model)
    scores: dict[str, list[Score]] = {name: [Score() for _ in RATIOS] for name in SELECTORS}
    for name in ("full", "none", "all", "K not moved", "wrong chunks"):
        scores[name] = [Score()]

    def run(
        score: Score, case: Case, stored: list[KV], selection: Selection, moved: bool = True
    ) -> None:
        kv = joined([case.prefix, *stored])
        if moved:
            blender.move(kv, case.prompt.segments)
        ids = torch.from_numpy(case.asked.tokens)[None, : BODY + 1]
        recomputed = blender.recompute(ids, kv, case.prompt, selection)
        score.add(case, compute(model, case.asked.tokens[BODY:], kv)[0], recomputed)

    for index, case in enumerate(found):
        scores["full"][0].add(case, case.logits, BODY - task.PREFIX)
        run(scores["none"][0], case, case.stored, none)
        run(scores["all"][0], case, case.stored, all_tokens)
        for name, choose in SELECTORS.items():
            for score, ratio in zip(scores[name], RATIOS, strict=True):
                run(score, case, case.stored, choose(ratio))
        run(scores["K not moved"][0], case, case.stored, RATIOS[CONTROL], moved=False)
        run(scores["wrong chunks"][0], case, found[index - 1].stored, RATIOS[CONTROL])
    return scores
