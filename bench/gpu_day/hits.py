"""What hits are worth in vLLM engines, and what stores cost: stages b, f and h.

``kvass``; ``blocks``: with ``kvass.kv_layout`` "blocks"; ``native``: vLLM's own offloading with as
much host memory; ``native_in_step``: with ``sync_load_budget_bytes`` (vLLM 0.33). An engine that
does not start costs its own figures only (``X_did_not_start``). ``short``: of a model whose pages
have 8 KiB; ``short_staged``: the same with ``kvass.gpu_stages``. The engines take turns, and each
round has other prompts. Figures of ``N`` tokens:

- ``N_..._cold_ms``: to the first token, nobody has seen it. ``N_..._local_ms``: at once again, from
  vLLM's own cache. ``N_..._hit_ms``: after that was emptied, from host memory. ``N_..._found``: the
  fewest tokens of the prompt that a hit found. ``N_..._vs_native``, ``N_..._vs_short``: the ratio
  of hits.
- ``crowd_N_...``: the same of many at once. ``_last_ms``, ``_mean_ms``: of their first tokens.
  ``_steps``: of the engine, until the last first token.
- ``small_N_...``: N seen tokens and 16 new ones, ``idle`` or while others are ``decoding``:
  ``_computed_ms``, without a hit; ``_local_ms``, ``_hit_ms`` as above; ``_vs_computed``: the ratio
  of the hit and computing. ``plain`` loads in the background, ``in_step`` waits for each copy
  inside the step (``in_step_connector.py``), both however long it is.
- ``tpot_..._ms``: time per token of a batch that decodes: ``alone``; while new prompts are
  ``computed`` and not stored; while they are ``stored``, too. ``short_tpot_...``: of ``short``.
- ``stage_log``: what ``short_staged`` measured at its start, and chose.
- ``two_..._alone_ms``, ``two_..._both_ms``: the last first token of hits, of one engine and at once
  with the other one. ``two_found``: what ``second`` found of prompts of ``kvass``. ``two_equal``:
  the share of first tokens that were those of computing; kernels round otherwise, so not all are.
- ``..._same_tokens``: whether a hit gave the tokens that the engine's own cache gave, if it found
  as many and nothing else ran.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, Final

from bench.engine import rotated
from bench.gpu_day.scene import Scene
from bench.gpu_day.stages import Note
from tests.support.vllm.process import Answer, EngineProcess, Prompt

NEW: Final = 16
BESIDE: Final = {"idle": 0, "decoding": 3}
JOINS: Final = 6
"""The measured request comes when others have generated so many tokens."""
UNSTORED: Final[dict[str, Any]] = {"max_offload_tokens": 0}
UNLOADED: Final[dict[str, Any]] = {"max_load_tokens": 0, **UNSTORED}
MEASURED: Final = re.compile(r"(?:stores|loads) of .* KiB pieces: .*|short pieces .*")
Times = defaultdict[str, list[float]]


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in times.items()}


def hits(scene: Scene, note: Note) -> None:
    """Stage b."""
    engines = scene.those_that_start(*scene.sizes.kinds)
    for length in scene.sizes.lengths:
        _idle(scene, note, engines, length, "native")
    for length in scene.sizes.crowds:
        _crowd(scene, note, engines, length)


def staged(scene: Scene, note: Note) -> None:
    """Stage a: stages for short pieces, in engines."""
    engines = scene.engines("short", "short_staged")
    note(stage_log="; ".join(MEASURED.findall(engines["short_staged"].log())))
    for length in scene.sizes.short_lengths:
        _idle(scene, note, engines, length, "short")
    _crowd(scene, note, engines, scene.sizes.short_lengths[0])
    _decode(scene, note, engines)


def _idle(
    scene: Scene, note: Note, engines: dict[str, EngineProcess], length: int, against: str
) -> None:
    times, found, same = Times(list), dict.fromkeys(engines, length), True
    for number in range(scene.sizes.rounds):
        for name in rotated(list(engines), number):
            engine, prompt = engines[name], scene.words(length, (name, length, number))
            cold, local = engine.one(prompt, 4), engine.one(prompt, 4)
            hit = scene.hit(engine, prompt)
            found[name] = min(found[name], hit.external)
            same = same and (hit.external != local.local or hit.tokens == local.tokens)
            for what, answer in (("cold", cold), ("local", local), ("hit", hit)):
                times[f"{length}_{name}_{what}_ms"].append(1000 * answer.first_token_s)
    figures = medians(times)
    for name in engines:
        figures[f"{length}_{name}_found"] = found[name]
        if against in engines:
            ratio = figures[f"{length}_{name}_hit_ms"] / figures[f"{length}_{against}_hit_ms"]
            figures[f"{length}_{name}_vs_{against}"] = ratio
    note(**figures, **{f"{length}_same_tokens": same})


def _crowd(scene: Scene, note: Note, engines: dict[str, EngineProcess], length: int) -> None:
    times, found = Times(list), dict[str, int]()
    for number in range(scene.sizes.rounds):
        for name in rotated(list(engines), number):
            engine, at = engines[name], f"crowd_{length}_{name}"
            crowd = _prompts(scene, length, (name, number))
            for what in ("cold", "hit"):
                scene.empty(engine)
                answers = engine.generate(*crowd)
                scene.stored()
                firsts = [1000 * one.first_token_s for one in answers]
                times[f"{at}_{what}_last_ms"].append(max(firsts))
                times[f"{at}_{what}_mean_ms"].append(fmean(firsts))
            times[f"{at}_steps"].append(max(one.first_token_steps for one in answers))
            least = min(one.external for one in answers)
            found[f"{at}_found"] = min(least, found.get(f"{at}_found", length))
    note(**medians(times), **found)


def _prompts(scene: Scene, length: int, seed: object) -> list[Prompt]:
    return [Prompt(scene.words(length, (seed, n)), 4) for n in range(scene.sizes.crowd)]


def in_step(scene: Scene, note: Note) -> None:
    """Stage b: small hits."""
    engines = scene.engines("plain", "in_step")
    engines["in_step"].load_in_steps(at_most=0)
    for size in scene.sizes.small:
        times, same = Times(list), True
        for number in range(scene.sizes.rounds):
            for beside, others in BESIDE.items():
                for name in rotated(list(engines), number):
                    at, engine = f"small_{size}_{beside}_{name}", engines[name]
                    prompt = scene.words(size + NEW, (at, number))
                    computed = _beside(scene, engine, prompt, others, UNLOADED)
                    scene.empty(engine)
                    engine.one(prompt[:size], 1)
                    local = _beside(scene, engine, prompt, others)
                    scene.stored()
                    scene.empty(engine)
                    hit = _beside(scene, engine, prompt, others)
                    alike = not others and hit.cached == local.cached
                    same = same and (hit.tokens == local.tokens or not alike)
                    for what, one in (("computed", computed), ("local", local), ("hit", hit)):
                        times[f"{at}_{what}_ms"].append(1000 * one.first_token_s)
                    ratio = hit.first_token_s / computed.first_token_s
                    times[f"{at}_vs_computed"].append(ratio)
                    times[f"{at}_steps"].append(hit.first_token_steps)
                    times[f"{at}_found"].append(hit.external)
        note(**medians(times), **{f"small_{size}_same_tokens": same})


def _beside(
    scene: Scene,
    engine: EngineProcess,
    prompt: list[int],
    others: int,
    params: dict[str, Any] = UNSTORED,
) -> Answer:
    """Its answer, while others generate tokens. Neither is stored."""
    answer = JOINS + NEW
    decoders = [Prompt(scene.words(64, n), answer, params=UNSTORED) for n in range(others)]
    return engine.generate(*decoders, Prompt(prompt, 4, joins=JOINS, params=params))[-1]


def decode(scene: Scene, note: Note) -> None:
    """Stage f."""
    _decode(scene, note, scene.engines("kvass"))


def _decode(scene: Scene, note: Note, engines: dict[str, EngineProcess]) -> None:
    sizes, times = scene.sizes, Times(list)
    at = {name: "tpot" if name == "kvass" else f"{name}_tpot" for name in engines}
    for number in range(sizes.rounds):
        for mode in rotated(["alone", "computed", "stored"], number):
            for name in rotated(list(engines), number):
                seed = (name, mode, number)
                times[f"{at[name]}_{mode}_ms"] += _per_token(scene, engines[name], mode, seed)
    figures = medians(times)
    for one in at.values():
        ratio = figures[f"{one}_stored_ms"] / figures[f"{one}_computed_ms"]
        figures[f"{one}_stored_vs_computed"] = ratio
    note(**figures)


def _per_token(scene: Scene, engine: EngineProcess, mode: str, seed: object) -> list[float]:
    """Milliseconds, of each request that decodes."""
    sizes = scene.sizes
    params = UNSTORED if mode == "computed" else None
    old = [
        Prompt(scene.words(64, (seed, n)), sizes.answer, params=UNSTORED)
        for n in range(sizes.decoders)
    ]
    new = [
        Prompt(
            scene.words(sizes.newcomer, ("new", seed, n)),
            1,
            joins=(n + 1) * sizes.answer // (sizes.decoders + 1),
            params=params,
        )
        for n in range(sizes.decoders * (mode != "alone"))
    ]
    answers = engine.generate(*old, *new)[: len(old)]
    scene.stored()
    return [1000 * (one.total_s - one.first_token_s) / (sizes.answer - 1) for one in answers]


def two(scene: Scene, note: Note) -> None:
    """Stage h."""
    engines = scene.engines("kvass", "second")
    length = scene.sizes.usual
    times, equal, found = Times(list), list[bool](), length
    for number in range(scene.sizes.rounds):
        crowds = {name: _prompts(scene, length, ("two", name, number)) for name in engines}
        cold = {name: engine.generate(*crowds[name]) for name, engine in engines.items()}
        for how in ("alone", "both"):
            scene.stored()
            for engine in engines.values():
                scene.empty(engine)
            answers = {}
            for name, engine in engines.items():
                engine.submit(*crowds[name])
                if how == "alone":
                    answers[name] = engine.answers()
            for name, engine in engines.items():
                if how == "both":
                    answers[name] = engine.answers()
                last = max(one.first_token_s for one in answers[name])
                times[f"two_{name}_{how}_ms"].append(1000 * last)
                pairs = zip(answers[name], cold[name], strict=True)
                equal += [a.tokens[0] == b.tokens[0] for a, b in pairs]
        answer = scene.hit(engines["second"], crowds["kvass"][0].tokens)
        found = min(found, answer.external)
    note(**medians(times), two_found=found, two_equal=fmean(equal))
