"""What a day's figures decide, by rules that were written before the day.

A rule says what it compared, so that a page shows it. It decides nothing of a stage that did not
come to its end or lacks a figure, and turns nothing on where bytes or tokens differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Final

from bench.gpu_day.day import MEASURED
from kvass.transfer.staging import FASTER

Stages = dict[str, dict[str, Any]]
"""Of a day, by name: state and figures."""

COPIES: Final = {"store": "store_vs_pinned", "load": "load_vs_pinned", "both": "both_vs_one"}
GOALS: Final = {"store": 0.6, "load": 0.6, "both": 1.4}
"""Of a pinned copy; of one alone."""
LOSS: Final = 1.05
"""What a gain may cost elsewhere: time to the first token, time per token."""
RATIO: Final = "short_staged_vs_short"
TPOT: Final = ("short_tpot_stored_ms", "short_staged_tpot_stored_ms")
LONGEST_IN_STEP: Final = 512
SMALL: Final = re.compile(r"small_(\d+)_decoding_in_step_vs_computed")


def decisions(stages: Stages) -> dict[str, str]:
    """By question: the answer, and why."""
    return {question: rule(stages) for question, rule in RULES.items()}


def _figures(stages: Stages, name: str) -> dict[str, Any]:
    found: dict[str, Any] = stages.get(name, {}).get("figures", {})
    return found


def _unknown(stages: Stages, name: str, needed: Iterable[str]) -> str:
    """Why a stage decides nothing; empty if it does."""
    figures = _figures(stages, name)
    if not figures:
        return f"unknown: stage `{name}` has no figures"
    if (state := stages[name].get("state")) not in MEASURED:
        return f"unknown: stage `{name}` is {state}"
    lacking = [one for one in needed if one not in figures]
    return f"unknown: stage `{name}` lacks {lacking[0]}" if lacking else ""


def _differ(figures: dict[str, Any]) -> bool:
    return any(value is False for value in figures.values())


def stages_on(stages: Stages) -> str:
    """``kvass.gpu_stages`` by default: stages are faster somewhere (an engine's own trial finds out
    where), no byte or token differs, and an engine loses nothing."""
    short, engine = _figures(stages, "short"), _figures(stages, "staged")
    names = [f"gpu_{how}_{what}" for what in COPIES.values() for how in ("plain", "staged")]
    if why := _unknown(stages, "short", [*names, "bytes_equal"]):
        return why
    if not short["bytes_equal"] or _differ(engine):
        return "off: bytes or tokens differ"
    said, faster, reached = [], False, True
    for model in short[names[0]]:
        pairs = {
            word: tuple(float(short[f"gpu_{how}_{what}"][model]) for how in ("plain", "staged"))
            for word, what in COPIES.items()
        }
        copies = [f"{word} {plain:.2f} -> {staged:.2f}" for word, (plain, staged) in pairs.items()]
        said.append(f"{model}: {', '.join(copies)}")
        for kind in ("store", "load"):
            faster = faster or pairs[kind][1] > FASTER * pairs[kind][0]
        reached = reached and all(max(pairs[word]) >= goal for word, goal in GOALS.items())
    said.append("the goals are met" if reached else "a goal is not met")
    ratios = [name for name in engine if name.endswith(RATIO)] or [f"N_{RATIO}"]
    if why := _unknown(stages, "staged", [*ratios, *TPOT]):
        return f"{why}; {'; '.join(said)}"
    losses = _losses(engine)
    answer = "on" if faster and not losses else "off"
    return f"{answer}: {'; '.join([*said, *losses])}"


def _losses(engine: dict[str, Any]) -> list[str]:
    """What an engine with stages loses against one without."""
    losses = [
        f"{name} {value:.2f}"
        for name, value in engine.items()
        if name.endswith(RATIO) and value > LOSS
    ]
    plain, staged = (engine[name] for name in TPOT)
    if staged > LOSS * plain:
        losses.append(f"ms per token beside stores {plain:.2f} -> {staged:.2f}")
    if not engine.get("stage_log"):
        losses.append("the engine did not say what it chose")
    return losses


def in_step_on(stages: Stages) -> str:
    """Small hits inside the step: faster than in the background, the longest one than computing."""
    found = _figures(stages, "in_step")
    names = [SMALL.fullmatch(name) for name in found]
    shortest = min([LONGEST_IN_STEP, *(int(one[1]) for one in names if one)])
    compared = {
        (size, beside): [f"small_{size}_{beside}_{n}_vs_computed" for n in ("plain", "in_step")]
        for size in (shortest, LONGEST_IN_STEP)
        for beside in ("idle", "decoding")
    }
    if why := _unknown(stages, "in_step", chain(*compared.values())):
        return why
    if _differ(found):
        return "off: tokens differ"
    said, better = [], True
    for (size, beside), pair in compared.items():
        plain, inside = (float(found[name]) for name in pair)
        said.append(f"{size} {beside}: {plain:.2f} -> {inside:.2f} of computing")
        better = better and inside < plain and (size < LONGEST_IN_STEP or inside < 1)
    return f"{'on' if better else 'off'}: {'; '.join(said)}"


def fewer_calls(stages: Stages) -> str:
    """One call for a load, or several: what the pipeline gains while the engine rests, against what
    each call costs while it computes."""
    found = _figures(stages, "gil")
    if why := _unknown(stages, "gil", ("gil_wait_ms", "gil_idle_4_vs_1", "gil_busy_4_vs_1")):
        return why
    idle, busy = found["gil_idle_4_vs_1"], found["gil_busy_4_vs_1"]
    answer = "longer first batches" if idle >= 1 / LOSS else "as shipped"
    return (
        f"{answer}: four batches took {idle:.2f} of one, beside Python {busy:.2f}; "
        f"each call waits {found['gil_wait_ms']:.1f} ms there"
    )


RULES: Final[dict[str, Callable[[Stages], str]]] = {
    "`kvass.gpu_stages` on by default": stages_on,
    "small hits inside the step on a GPU": in_step_on,
    "fewer calls for a load": fewer_calls,
}
