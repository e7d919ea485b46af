"""``python -m bench --blend``: prompts that repeat documents in new orders, to the first token.

A llama of transformers with random weights, on the CPU. A prompt is a system prompt of 200 tokens,
eight documents of 300 in an order of its own, and a question of 60. All documents are stored before
the first round. Each round has a prompt, and computes it in each way, in an order of its own:

- ``full``: transformers alone.
- ``prefix``: kvass without blend. It finds what this and an earlier prompt begin with.
- the others: kvass with that blend.

``..._s``: median processor time to the first token, of one core, in seconds: on a machine that has
other work too, the time on the clock says little. ``..._vs_full``: how many times as fast as
``full`` that is, the median of the rounds' ratios. ``..._computed``: how many of the prompt's
tokens were computed, on average.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from statistics import fmean, median
from typing import Any, Final

import torch
import transformers

from bench.engine import rotated
from kvass._version import __version__
from kvass.cli.bench.rig import ratio, say, start_daemon
from kvass.connectors.transformers import CachedModel, connect
from kvass.errors import Unavailable

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
CHUNK: Final = 64
DOCUMENTS: Final = 8
TOKENS: Final = {"system": 200, "document": 300, "question": 60}
BLENDS: Final = ("none", "first_k:16", "kv_dev:0.15")


class FirstToken:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self._prompt = True

    def put(self, _: Any) -> None:
        if not self._prompt and not self.at_s:
            self.at_s = time.process_time()
        self._prompt = False

    def end(self) -> None:
        pass


def words(what: str, number: int) -> list[int]:
    """Random tokens, none of which is special."""
    rng = random.Random(f"{what} {number}")
    return [rng.randrange(4, SIZES["vocab_size"]) for _ in range(TOKENS[what])]


def prompt(number: int) -> list[int]:
    """That of round ``number``."""
    order = random.Random(number).sample(range(DOCUMENTS), DOCUMENTS)
    documents = [token for one in order for token in words("document", one)]
    return words("system", 0) + documents + words("question", number)


class Measured:
    """Of each of the ``ways``, by rounds: seconds to the first token, and tokens computed."""

    def __init__(self, *ways: str) -> None:
        self.times: dict[str, list[float]] = {way: [] for way in ways}
        self._computed: dict[str, list[int]] = {way: [] for way in ways}

    def add(self, way: str, took_s: float, computed: int) -> None:
        """A prompt was computed."""
        self.times[way].append(took_s)
        self._computed[way].append(computed)

    def figures(self) -> dict[str, Any]:
        """By the names in this module's docstring."""
        figures: dict[str, Any] = {"version": __version__, "rounds": len(self.times["full"])}
        figures["prompt_tokens"] = len(prompt(0))
        for way, took in self.times.items():
            figures[f"{way}_s"] = median(took)
            figures[f"{way}_vs_full"] = ratio(took, self.times["full"])
            figures[f"{way}_computed"] = fmean(self._computed[way])
        return figures


def markdown(figures: dict[str, Any]) -> str:
    """The table of ``docs/blend.md``."""
    lines = ["| | tokens computed | to the first token | as fast as a full prefill, times |"]
    lines.append("|---|---|---|---|")
    for way in (name.removesuffix("_computed") for name in figures if name.endswith("_computed")):
        seconds, times = figures[f"{way}_s"], figures[f"{way}_vs_full"]
        name = {"full": "full prefill", "prefix": "prefix reuse only"}.get(way, f"blend `{way}`")
        computed = figures[f"{way}_computed"]
        lines.append(f"| {name} | {computed:,.0f} | {seconds:.1f} s | {times:.1f} |")
    return "\n".join(lines)


def measure_blend(l1_bytes: int, rounds: int) -> dict[str, Any]:
    """All figures, by the names in this module's docstring. Raises ``KvassError``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    measured = Measured("full", "prefix", *BLENDS)
    with ExitStack() as stack:
        daemon = stack.enter_context(start_daemon(l1_bytes))
        terms: dict[str, Any] = {"socket": daemon.socket, "chunk_tokens": CHUNK}
        prefix = stack.enter_context(connect(model, tag="prefix", **terms))
        blend = stack.enter_context(connect(model, blend="none", **terms))
        for cached in (prefix, blend):
            if not cached.wait_connected(30.0):
                raise Unavailable("the daemon did not answer")
        for number in range(DOCUMENTS):
            blend.add(torch.tensor([words("document", number)]))
        prefix.generate(torch.tensor([prompt(-1)]), max_new_tokens=1)
        for number in range(rounds):
            say(f"prompt {number + 1} of {rounds}")
            ids = torch.tensor([prompt(number)])
            for name in rotated(list(measured.times), number):
                one = {"full": None, "prefix": prefix}.get(name, blend)
                measured.add(name, *first_token_s(model, one, name, ids))
    return measured.figures()


def first_token_s(model: Any, cached: CachedModel | None, name: str, ids: Any) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens of the prompt were computed."""
    stream, began_s = FirstToken(), time.process_time()
    if cached is None:
        model.generate(ids, max_new_tokens=1, do_sample=False, streamer=stream)
        return stream.at_s - began_s, ids.shape[1]
    blend = name if name in BLENDS else ""
    cached.generate(ids, blend=blend, max_new_tokens=1, do_sample=False, streamer=stream)
    last = cached.last
    if blend and not last.blended:
        raise Unavailable(f"{name}: no segment was found")
    return stream.at_s - began_s, last.prompt - last.loaded - last.blended + last.recomputed
