"""``python -m bench.shadow``: what shadow mode costs an engine, with kvass on and off in turns.

One real vLLM engine on this machine's CPU (``bench.engine`` has the model). Each round runs the
prompts of a case with kvass and without it, vLLM's own cache empty: four prompts at once until the
last token of the last one, or one prompt until its first token. With kvass every prompt hits. A
figure is the median over rounds of the time with kvass over the time without, in percent above 1.

- ``..._all``: every hit is loaded and compared. ``..._tenth``: one in ten.
- ``off_off``: off against off, so what a difference means here.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.engine import MODELS, SHAPE, switched_engine, words
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.vllm.models import build
from tests.support.vllm.process import OFF, EngineProcess, Prompt

ROUNDS: Final = 7
CASES: Final = {"document": (1, 1500, 1), "crowd": (4, 600, 16)}
"""By case: how many prompts run at once, how many tokens each has, and how many it generates."""
SHARES: Final = {"all": True, "tenth": 0.1}


@contextmanager
def engine(folder: Path, daemon: Daemon, share: float) -> Iterator[EngineProcess]:
    """An engine in shadow mode that can be switched off."""
    log, options = folder / f"engine-{share}.log", {"kvass.shadow": share}
    model = build(MODELS, SHAPE)
    with switched_engine(model, log, daemon.socket, kind="SwitchedShadow", options=options) as one:
        one.one(words(1500, "warm-up"), 2)
        yield one


def seconds(one: EngineProcess, case: str, off: bool) -> float:
    """How long the prompts of ``case`` take."""
    count, tokens, output = CASES[case]
    params = {OFF: "1"} if off else None
    assert one.reset()
    answers = one.generate(
        *(Prompt(words(tokens, (case, n)), output, params=params) for n in range(count))
    )
    assert all(answer.cached == 0 for answer in answers)
    return max(answer.total_s for answer in answers)


def measure() -> dict[str, Any]:
    """All figures."""
    figures: dict[str, Any] = {"rounds": ROUNDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_daemon(folder, l1_size="2GiB") as daemon:
            for share_name, share in SHARES.items():
                with engine(folder, daemon, share) as one:
                    for case in CASES:
                        figures |= measure_case(one, case, share_name)
                    figures[f"shadow_{share_name}"] = daemon.status()["engines"][-1]["shadow"]
    return figures


def measure_case(one: EngineProcess, case: str, share: str) -> dict[str, float]:
    """The ratios of one case."""
    seconds(one, case, off=False)  # stores
    on, off, again = list[float](), list[float](), list[float]()
    for number in range(ROUNDS):
        runs = [(on, False), (off, True), (again, True)]
        for times, is_off in runs[number % 3 :] + runs[: number % 3]:
            times.append(seconds(one, case, is_off))
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    noise = [a / b for a, b in zip(again, off, strict=True)]
    return {
        f"{case}_{share}_percent": round(100 * (median(ratios) - 1), 2),
        f"{case}_{share}_off_off_percent": round(100 * (median(noise) - 1), 2),
        f"{case}_{share}_off_s": round(median(off), 3),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
    print()
