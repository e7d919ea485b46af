"""``kvass blend quality``: what blend costs the answers of a model, and saves, on given texts.

A prompt has segments of several texts in random order, and then the words that follow one of them
in its text. Each segment was computed alone, as a document that was added. Compared is along two
continuations, both given token by token, so that no early difference decides what comes later: the
answer of a full prefill, and what really follows in the text.

No daemon is asked: K and V are moved and computed again as for prompts that a daemon has parts of.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from kvass.blend.plan import PlacedSegment, Prompt, parse
from kvass.connectors.transformers.blending import Blender
from kvass.connectors.transformers.documents import load
from kvass.connectors.transformers.model import filled, probe, tensors_of
from kvass.connectors.transformers.rows import KV
from kvass.errors import ConfigError

OPENING: Final = "Read these texts, and then continue one of them.\n\n"
QUESTION_TOKENS: Final = 16
"""Of what follows a segment in its text, at the end of the prompt."""
FULL: Final = "full prefill"
WITHOUT: Final = "no segments"
"""The control: the prompt without its segments."""


class Shape(NamedTuple):
    """Of the prompts: how many, their segments, the tokens of a segment and of an answer."""

    prompts: int
    segments: int
    segment_tokens: int
    answer_tokens: int


class Case(NamedTuple):
    """A prompt. ``stored``: K and V of each segment, computed alone. ``answers``: what follows, by
    a full prefill's choice and in the text. ``scores``: log probabilities [tokens, vocabulary] of a
    full prefill along both."""

    tokens: list[int]
    opening: int
    stored: list[KV]
    answers: tuple[list[int], list[int]]
    scores: tuple[Any, Any]
    full_s: float


@dataclass
class QualityLine:
    """Of one way to compute prompts, a value for each prompt. ``times``: of computing the prompt,
    as shares of a full prefill's. ``kls``: nats per token of the answer; ``losses``: of the
    text."""

    computed: list[float] = field(default_factory=list)
    first_kls: list[float] = field(default_factory=list)
    kls: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


def measure(
    path: str,
    loading: Mapping[str, Any],
    texts: Mapping[str, str],
    blends: Sequence[str],
    shape: Shape,
    seed: int = 0,
) -> Iterator[dict[str, QualityLine]]:
    """The lines so far, by the name of the way, after each prompt. Raises ``ConfigError`` for a
    model that cannot be loaded or texts that are too few, ``UsageError`` for a model that cannot be
    blended or a selector that is none."""
    selections = {name: parse(name) for name in blends}
    tokenizer, model = load(path, loading)
    probe(model)
    named = {OPENING: OPENING, **texts}
    ids = {n: tokenizer(t, add_special_tokens=False).input_ids for n, t in named.items()}
    trial = Trial(model, ids.pop(OPENING), ids)
    trial.check(shape)
    lines = {name: QualityLine() for name in (FULL, *blends, WITHOUT)}
    draw = random.Random(seed)
    for _ in range(shape.prompts):
        case = trial.case(shape, draw)
        trial.score(case, lines[FULL], case.scores, 1.0, 1.0)
        for name, selection in selections.items():
            trial.blend(case, lines[name], selection)
        trial.without(case, lines[WITHOUT])
        yield lines


class Trial:
    """``opening`` begins all prompts; ``texts`` are token ids by name."""

    def __init__(self, model: Any, opening: list[int], texts: Mapping[str, list[int]]) -> None:
        self._model, self._opening, self._texts = model, opening, texts
        self._blender = Blender(model)

    def check(self, shape: Shape) -> None:
        """Raises ``ConfigError`` for prompts that are longer than the model can read."""
        tokens = len(self._opening) + shape.segments * shape.segment_tokens
        tokens += QUESTION_TOKENS + shape.answer_tokens
        config = self._model.config.get_text_config(decoder=True)
        most = getattr(config, "max_position_embeddings", tokens)
        if tokens > most:
            raise ConfigError(
                f"a prompt with its answer has {tokens} tokens, and the model reads {most}: give "
                "fewer or shorter segments"
            )

    def case(self, shape: Shape, draw: random.Random) -> Case:
        """Another prompt, by full prefill."""
        size, answer = shape.segment_tokens, shape.answer_tokens
        behind = QUESTION_TOKENS + answer
        starts = [
            (name, start)
            for name, tokens in sorted(self._texts.items())
            for start in range(0, len(tokens) - size - behind + 1, size)
        ]
        if len(starts) < shape.segments:
            raise ConfigError(
                f"the texts have {len(starts)} segments of {size} tokens with {behind} behind, and "
                f"a prompt takes {shape.segments}: give more or longer texts, or shorter segments"
            )
        chosen = draw.sample(starts, shape.segments)
        parts = [self._texts[name][start : start + size] for name, start in chosen]
        name, start = draw.choice(chosen)
        rest = self._texts[name][start + size : start + size + behind]
        tokens = [*self._opening, *(t for part in parts for t in part), *rest[:QUESTION_TOKENS]]
        began_s = self._clock()
        kv = self._computed(tokens[:-1])
        full_s = self._clock() - began_s
        answers = self._greedy(tokens, kv, answer), rest[QUESTION_TOKENS:]
        scores = tuple(self._along(tokens, kv, each) for each in answers)
        stored = [self._computed(part) for part in parts]
        return Case(tokens, len(self._opening), stored, answers, scores, full_s)

    def blend(self, case: Case, line: QualityLine, selection: Any) -> None:
        """Score ``case`` with its segments moved, and of them computed again what is selected."""
        length = case.stored[0][0].shape[2]
        segments = tuple(
            PlacedSegment(case.opening + index * length, 0, length, b"", bytes([1 + index % 255]))
            for index in range(len(case.stored))
        )
        prompt = Prompt(len(case.tokens), 0, segments)
        ids = torch.tensor([case.tokens], device=self._model.device)
        kv = self._joined(case)
        began_s = self._clock()
        self._blender.move(kv, segments)
        again = self._blender.recompute(ids, kv, prompt, selection)
        took_s = self._clock() - began_s
        scores = tuple(self._along(case.tokens, kv, each) for each in case.answers)
        share = again / (len(segments) * length)
        self.score(case, line, scores, share, took_s / case.full_s)

    def without(self, case: Case, line: QualityLine) -> None:
        tokens = case.tokens[: case.opening] + case.tokens[-QUESTION_TOKENS:]
        kv = self._computed(tokens[:-1])
        scores = tuple(self._along(tokens, kv, each) for each in case.answers)
        self.score(case, line, scores, 0.0, 0.0)

    def score(
        self, case: Case, line: QualityLine, scores: tuple[Any, ...], share: float, took: float
    ) -> None:
        """Compare ``scores`` with those of a full prefill. ``took``: as a share of its time."""
        (full, _), (ours, text) = case.scores, scores
        kl = (full.exp() * (full - ours)).sum(-1)
        line.computed.append(share)
        line.first_kls.append(float(kl[0]))
        line.kls.append(float(kl.mean()))
        line.same.append(float((ours.argmax(-1) == full.argmax(-1)).float().mean()))
        following = torch.tensor(case.answers[1], device=text.device)[:, None]
        line.losses.append(-float(text.gather(1, following).mean()))
        line.times.append(took)

    def _clock(self) -> float:
        """Of a CPU the processor's time, which other processes do not lengthen."""
        if self._model.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self._model.device)
        return time.monotonic()

    def _computed(self, tokens: list[int]) -> KV:
        with torch.no_grad():
            ids = torch.tensor([tokens], device=self._model.device)
            out = self._model(ids, use_cache=True, logits_to_keep=1)
        return tensors_of(out.past_key_values)

    def _joined(self, case: Case) -> KV:
        """K and V of all tokens but the last; of what is in no segment, zeros."""
        ends = [case.opening, len(case.tokens) - 1]
        ends[1] -= case.opening + sum(kv[0].shape[2] for kv in case.stored)
        one = [torch.zeros_like(tensor[:, :, :1]) for tensor in case.stored[0]]
        zeros = [[tensor.expand(-1, -1, end, -1) for tensor in one] for end in ends]
        parts = [zeros[0], *case.stored, zeros[1]]
        return [torch.cat(tensors, 2) for tensors in zip(*parts, strict=True)]

    def _greedy(self, tokens: list[int], kv: KV, count: int) -> list[int]:
        """``count`` tokens, also behind the end of an answer."""
        cache, found = filled(self._model, kv), [tokens[-1]]
        while len(found) <= count:
            with torch.no_grad():
                ids = torch.tensor([found[-1:]], device=self._model.device)
                logits = self._model(ids, past_key_values=cache, use_cache=True).logits
            found.append(int(logits[0, -1].argmax()))
        return found[1:]

    def _along(self, tokens: list[int], kv: KV, answer: list[int]) -> Any:
        """Log probabilities at each token of ``answer``, which stands behind ``tokens``."""
        with torch.no_grad():
            ids = torch.tensor([[tokens[-1], *answer[:-1]]], device=self._model.device)
            out = self._model(ids, past_key_values=filled(self._model, kv), use_cache=True)
        return out.logits[0].float().log_softmax(-1)


def table(lines: Mapping[str, QualityLine]) -> str:
    """Of each way the means over all prompts, in Markdown."""
    rows = [
        "| computed again | share of the segments | KL, answer | KL, its first token | "
        "same token | perplexity of the text | time |",
        "|---" * 7 + "|",
    ]
    for name, line in lines.items():
        computed, first, kl, same, loss, took = (
            float(np.mean(values)) for values in vars(line).values()
        )
        shown = name if name in (FULL, WITHOUT) else f"`{name}`"
        time_shown = "-" if name == WITHOUT else f"{took:.2f}"
        rows.append(
            f"| {shown} | {100 * computed:.1f} % | {abs(kl):.3f} | {abs(first):.3f} | "
            f"{100 * same:.1f} % | {np.exp(loss):.2f} | {time_shown} |"
        )
    return "\n".join(rows)
