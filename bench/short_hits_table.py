"""``python -m bench.short_hits --table``: whether a hit is worth it and a miss costs nothing, in a
few lines, for a comparison of two versions of kvass.

Two figures come from ``bench.short_hits``: the worst ratios, and a hit of 512 tokens against one in
vLLM's own cache. The others are of one engine with the model of ``bench.engine``, in which kvass is
on and off in turns.

- ``document_kvass_vs_own``: the first token of a prompt of 6,011 tokens that kvass has, against the
  same in vLLM's own cache. Which of them comes first changes from round to round.
- ``cost_percent``: what kvass costs prompts that nobody has seen, until the last token of the last
  one, by shape: prompts at once, tokens of each, tokens of each answer. ``bench.peers`` has more
  rounds of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.engine import BLOCK, MODELS, SHAPE, switched_engine, words
from bench.peers.engines import L1_BYTES, SWITCHED, measure_switched
from bench.peers.results import Row, attempt
from bench.short_hits import BESIDE, SWITCHED_OFF, shown, spread
from kvass.cli.bench.rig import say, start_daemon
from kvass.errors import Unavailable
from tests.support.vllm.models import build
from tests.support.vllm.process import EngineProcess

DOCUMENT: Final = 6011
SHARES: Final = (0.5, 0.4, 1.2)
"""Of the rounds, for each of ``SWITCHED``: some take long, the last one differs most."""
HIT: Final = "512"


def measure_document_and_cost(rounds: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one engine. Raises ``KvassError``."""
    say("the start of an engine with a larger model")
    with (
        tempfile.TemporaryDirectory(prefix="kvass-bench-") as folder,
        start_daemon(L1_BYTES) as daemon,
        switched_engine(
            build(MODELS, SHAPE), Path(folder) / "engine.log", daemon.socket, options=options
        ) as engine,
    ):
        say(f"a prompt of {DOCUMENT:,} tokens")
        figures: dict[str, Any] = measure_document(engine, rounds)
        say("new prompts")
        costs = {}
        for shape, share in zip(SWITCHED, SHARES, strict=True):
            row = Row("new", "", "", "%", more=False)
            with attempt("kvass", row):
                measure_switched(engine, max(2, round(share * rounds)), shape, row)
            if len(row.samples.get("kvass", ())) > 1:
                costs["{} x {:,} + {}".format(*shape)] = spread(row.samples["kvass"])
    return figures | {"cost_percent": costs}


def measure_document(engine: EngineProcess, rounds: int) -> dict[str, Any]:
    """``document_..._ms`` and ``document_kvass_vs_own``. Raises ``Unavailable`` if a hit is
    missing."""
    prompt, times = words(DOCUMENT, "document"), dict[str, list[float]](kvass=[], own=[])
    engine.one(prompt, 1)
    for number in range(-2, rounds):
        for mode in ("own", "kvass") if number % 2 else ("kvass", "own"):
            if mode == "kvass" and not engine.reset():
                raise Unavailable("vLLM's own cache could not be emptied")
            params = None if mode == "kvass" else SWITCHED_OFF
            answer = engine.one(prompt, 1, params=params)
            found = answer.external if mode == "kvass" else answer.local
            if found < (DOCUMENT - 1) // BLOCK * BLOCK:
                raise Unavailable(f"{mode}: {found} of {DOCUMENT} tokens hit")
            times[mode] += [answer.first_token_s] if number >= 0 else []
    ratios = [a / b for a, b in zip(times["kvass"], times["own"], strict=True)]
    figures = {f"document_{mode}_ms": spread([1000 * s for s in times[mode]]) for mode in times}
    return figures | {"document_kvass_vs_own": spread(ratios)}


def markdown(figures: Mapping[str, Any]) -> str:
    """A line for each figure."""
    lines = [("figure", "goal", "median (quartiles)"), ("---", "---", "---")]
    for name in BESIDE:
        one = figures[name]
        text = f"{one['worst']:.2f} ({one['worst_by_chance']:.2f} by chance)"
        what = f"a hit against computing, {name}: worst ratio of all H"
        lines.append((what, "1.00", f"{text}; above 1 at {one['slower_at']}"))
    if HIT in figures["idle"]:
        ratio = shown(figures["idle"][HIT]["kvass_vs_own"])
        lines.append((f"a hit of {HIT} tokens against vLLM's own, idle", "1.10", ratio))
    ratio = shown(figures["document_kvass_vs_own"])
    lines.append((f"a hit of {DOCUMENT:,} tokens against vLLM's own", "1.05", ratio))
    for name, cost in figures["cost_percent"].items():
        lines.append((f"cost of {name} new tokens, in percent", "1.00", shown(cost)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
