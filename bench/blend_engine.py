"""``python -m bench --engine --blend``: the prompts of ``bench.blend``, in vLLM.

Two real engines with the model of ``bench.engine``, one thread each. The ways, and the names of
figures, are those of ``bench.blend``, but:

- ``full``, ``prefix``: vLLM without kvass, and with its own prefix cache.
- Times are on the clock: run it on a machine that has nothing else to do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench.blend import CHUNK, DOCUMENTS, TOKENS, Measured, prompt, words
from bench.engine import ARGS, ENVIRONMENT, MODELS, SHAPE, rotated
from kvass.cli.bench.rig import say, start_daemon
from kvass.errors import Unavailable
from tests.support.vllm.models import build
from tests.support.vllm.process import EngineProcess

BLENDS: Final = ("none", "first_k:16")
BLENDING: Final = {
    "scheduler_cls": "kvass.connectors.vllm.blend.BlendScheduler",
    "async_scheduling": False,
}
OPTIONS: Final = {"kvass.chunk_tokens": CHUNK, "kvass.blend": "none"}


def measure_blend_engine(l1_bytes: int, rounds: int) -> dict[str, Any]:
    """All figures. Raises ``KvassError``."""
    model = build(MODELS, SHAPE)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvass-bench-")))
        daemon = stack.enter_context(start_daemon(l1_bytes))
        say("the start of two engines")
        ways: dict[str, dict[str, Any]] = {
            "alone": {"args": ARGS},
            "blend": {
                "args": ARGS | BLENDING,
                "options": OPTIONS,
                "socket": Path(daemon.socket),
            },
        }
        engines = {
            name: stack.enter_context(
                EngineProcess(model, folder / f"{name}.log", environment=ENVIRONMENT, **fields)
            )
            for name, fields in ways.items()
        }
        for engine in engines.values():
            engine.wait_ready()
        return measure_prompts(engines, rounds)


def measure_prompts(engines: Mapping[str, EngineProcess], rounds: int) -> dict[str, Any]:
    """All documents are stored, then each round's prompt is computed in each way. Raises
    ``Unavailable`` if one of them is not found, as when the machine was too busy to store it."""
    found = DOCUMENTS * (TOKENS["document"] // CHUNK * CHUNK - 16)
    measured = Measured("full", "prefix", *BLENDS)
    for number in range(DOCUMENTS):
        engines["blend"].one(words("document", number), 1)
    for engine in engines.values():
        engine.one(prompt(-1), 1)
    for number in range(rounds):
        say(f"prompt {number + 1} of {rounds}")
        tokens = prompt(number)
        for name in rotated(list(measured.times), number):
            engine = engines["blend" if name in BLENDS else "alone"]
            if name in BLENDS:
                engine.blend(name)
            answer = engine.one(tokens, 1, salt=f"{number}" if name == "full" else None)
            if name in BLENDS and answer.cached < found:
                raise Unavailable(f"{name}: only {answer.cached} tokens were cached, not {found}")
            measured.add(name, answer.first_token_s, len(tokens) - answer.cached)
    return measured.figures()
