"""``python -m bench --engine``: what a user of vLLM waits for, with kvass and without.

Real vLLM engines on this machine's CPU, one thread each, with saved random weights of 200 million
parameters; bfloat16, blocks of 32 tokens. ``none`` runs without kvass, ``kvass`` with the default
chunk of 256 tokens, ``blocks`` with ``kvass.chunk_tokens`` 32. One request at a time, the engines
in turn, so that what is compared ran within seconds. Some ten minutes.

What the names mean. Times are to the first token; a ratio is the median over rounds.

- ``document_...``: a prompt of 6,011 tokens that was seen before. ``rag_...``: 2,011 tokens that
  were seen before, and 700 new ones. ``chat_...``: five turns of one chat, 500 tokens and 350 more
  with each; the sum of them.
- ``..._cold_s``: computed by ``none``. ``..._local_vs_cold``: ``none`` with its own prefix cache.
  ``..._kvass_vs_local``, ``..._blocks_vs_local``: loaded from the daemon, the engine's own cache
  empty, against that.
- ``new_kvass_vs_none``: prompts of 1,500 tokens that nobody has seen: what looking up and storing
  costs. ``new_none_vs_none``: the same engine against itself, so what a difference means here.
- ``crowd_none_s``: two times six prompts of 1,500 tokens at once, all seen before, by an engine
  whose own cache is too small for them; until the last token of the last one.
  ``crowd_kvass_vs_none``, ``crowd_blocks_vs_none``: the same with kvass.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from kvass._version import __version__
from kvass.cli.bench.rig import ratio, say, start_daemon
from kvass.errors import Unavailable
from tests.support.vllm.models import Shape, build
from tests.support.vllm.process import EngineProcess, Prompt

MODELS: Final = Path(__file__).parent.parent / ".cache" / "models"
SHAPE: Final = Shape(
    vocab=32_000, hidden=1024, intermediate=2816, layers=12, heads=16, kv_heads=4, head_dim=64
)
BLOCK: Final = 32
ARGS: Final[dict[str, Any]] = {
    "dtype": "bfloat16",
    "block_size": BLOCK,
    "max_model_len": 8192,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 448,
}
ENVIRONMENT: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
}
"""Else vLLM's own buffers are mapped and faulted in anew in each step."""
CHUNKS: Final = {"kvass": 256, "blocks": BLOCK}
SWITCHED: Final = "tests.support.vllm.switched"
Engines = Mapping[str, EngineProcess]


class Workload(NamedTuple):
    """Prompts of a round, one after another. ``seen``: computed once, before the first round.
    ``rounds`` with hits; ``cold``: in how many of them everything is computed as well."""

    name: str
    seen: list[list[int]]
    prompts: Callable[[int], list[list[int]]]
    rounds: int
    cold: int


def words(tokens: int, seed: object) -> list[int]:
    """A random prompt."""
    rng = random.Random(repr(seed))
    return [rng.randrange(4, SHAPE.vocab) for _ in range(tokens)]


def workloads(rounds: int) -> list[Workload]:
    """The three that have hits."""
    document, system = words(6011, "document"), words(2011, "system")

    def rag(number: int) -> list[list[int]]:
        return [system + words(700, number)]

    def chat(number: int) -> list[list[int]]:
        whole = words(500 + 4 * 350, ("chat", number))
        return [whole[:length] for length in range(500, len(whole) + 1, 350)]

    return [
        Workload("document", [document], lambda _: [document], rounds, 1),
        Workload("rag", rag(-1), rag, rounds, 1),
        Workload("chat", [], chat, max(1, rounds // 3), 1),
    ]


def measure_engine(l1_bytes: int, rounds: int) -> dict[str, Any]:
    """All figures, by the names in this module's docstring. Raises ``KvassError``."""
    figures: dict[str, Any] = {"version": __version__, "cores": os.cpu_count(), "rounds": rounds}
    model = build(MODELS, SHAPE)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvass-bench-")))
        daemon = stack.enter_context(start_daemon(l1_bytes))
        say("the start of three engines")
        engines = {
            name: stack.enter_context(
                EngineProcess(
                    model,
                    folder / f"{name}.log",
                    socket=Path(daemon.socket) if name in CHUNKS else None,
                    args=ARGS,
                    options={"kvass.chunk_tokens": CHUNKS[name]} if name in CHUNKS else None,
                    environment=ENVIRONMENT,
                )
            )
            for name in ("none", *CHUNKS)
        }
        for engine in engines.values():
            engine.wait_ready().one(words(1500, "warm-up"), 2)
        for load in workloads(rounds):
            say(f"{load.name}, {load.rounds} rounds")
            figures |= measure_hits(engines, load)
        say(f"new prompts, {rounds} rounds")
        figures |= measure_new(engines, rounds)
        say("six prompts at once")
        figures |= measure_crowd(engines)
    return figures


@contextmanager
def switched_engine(
    model: Path,
    log: Path,
    socket: str,
    *,
    args: Mapping[str, Any] = ARGS,
    kind: str = "SwitchedConnector",
    module: str = SWITCHED,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Iterator[EngineProcess]:
    """An engine in which kvass can be switched off (``tests.support.vllm.switched``). ``kind``: its
    connector in ``module``; ``options``: more of the connector's; ``environment``: more variables.
    """
    transfer = {
        "kv_connector": kind,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kvass.socket": socket,
            "kvass.fixed_weights": True,
            **(options or {}),
        },
    }
    both = {**(ENVIRONMENT or {}), **(environment or {})} or None
    with EngineProcess(
        model, log, transfer=transfer, args=args, environment=both, python=python
    ) as engine:
        yield engine.wait_ready()


def measure_hits(engines: Engines, load: Workload) -> dict[str, float]:
    """``..._cold_s`` and the ratios of a workload. Raises ``Unavailable`` if a hit is missing."""
    for engine in engines.values():
        for prompt in load.seen:
            engine.one(prompt, 1)
    times: dict[str, list[float]] = {name: [] for name in ("cold", "local", *CHUNKS)}
    for number in range(load.rounds):
        prompts = load.prompts(number)
        shared = load.seen or [[]]
        for mode in rotated(["local", *CHUNKS], number):
            times[mode].append(first_tokens_s(engines, mode, prompts, shared[0]))
        if number < load.cold:
            times["cold"].append(first_tokens_s(engines, "cold", prompts, []))
    local, cold = times["local"], times["cold"]
    return {
        f"{load.name}_cold_s": median(cold),
        f"{load.name}_local_vs_cold": median(local) / median(cold),
        **{f"{load.name}_{name}_vs_local": ratio(local, times[name]) for name in CHUNKS},
    }


def rotated(names: list[str], by: int) -> list[str]:
    """Another one comes first in each round."""
    by %= len(names)
    return names[by:] + names[:by]


def first_tokens_s(engines: Engines, mode: str, prompts: list[list[int]], seen: list[int]) -> float:
    """The sum of the times to the first token of ``prompts``. Of each, all that it has in common
    with ``seen``, or with the one before it, must have been found: to the block or chunk."""
    engine, total_s = engines[mode if mode in CHUNKS else "none"], 0.0
    for prompt in prompts:
        if mode in CHUNKS and not engine.reset():
            raise Unavailable("the engine's own cache could not be emptied")
        answer = engine.one(prompt, 1, skip_prefix_cache=mode == "cold")
        total_s += answer.first_token_s
        shared = next(
            (n for n, (a, b) in enumerate(zip(prompt, seen, strict=False)) if a != b), len(seen)
        )
        unit = CHUNKS.get(mode, BLOCK)
        wanted = 0 if mode == "cold" else min(shared, len(prompt) - 1) // unit * unit
        if answer.cached < wanted:
            raise Unavailable(f"{mode}: {answer.cached} of {len(prompt)} tokens hit, not {wanted}")
        if mode != "cold":
            seen = prompt
    return total_s


def measure_new(engines: Engines, rounds: int) -> dict[str, float]:
    """What kvass costs a prompt that has no hit."""
    times: dict[str, list[float]] = {"none": [], "kvass": [], "again": []}
    for number in range(rounds):
        for name in rotated(list(times), number):
            engine = engines["none" if name == "again" else name]
            prompt = words(1500, (name, number))
            times[name].append(engine.one(prompt, 1).first_token_s)
    return {
        "new_kvass_vs_none": ratio(times["none"], times["kvass"]),
        "new_none_vs_none": ratio(times["none"], times["again"]),
    }


def measure_crowd(engines: Engines) -> dict[str, float]:
    """Six at once, twice, in each engine."""
    crowds = [
        [Prompt(words(1500, ("crowd", n, m)), max_tokens=16) for m in range(6)] for n in range(2)
    ]
    total_s = {}
    for engine in engines.values():
        for crowd in crowds:
            engine.generate(*crowd)
    for name, engine in engines.items():
        total_s[name] = sum(
            max(answer.total_s for answer in engine.generate(*crowd)) for crowd in crowds
        )
    none_s = total_s["none"]
    ratios = {f"crowd_{name}_vs_none": total_s[name] / none_s for name in CHUNKS}
    return {"crowd_none_s": none_s} | ratios
