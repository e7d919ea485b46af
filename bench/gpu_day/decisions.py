"""What a day's figures decide, by rules that were written before the day.

A rule says what it compared, so that a page shows it. It decides nothing of a day that lacks its
figures, or has wrong bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from kvass.transfer.staging import FASTER

Figures = dict[str, dict[str, Any]]
"""By stage."""

COPIES: Final = {"store": "store_vs_pinned", "load": "load_vs_pinned", "both": "both_vs_one"}
GOALS: Final = {"store": 0.6, "load": 0.6, "both": 1.4}
"""Of a pinned copy; of one alone."""
LOSS: Final = 1.05
"""What a gain may cost elsewhere: time to the first token, time per token."""
LONGEST_IN_STEP: Final = 512
SMALL: Final = re.compile(r"small_(\d+)_decoding_in_step_vs_computed")


def decisions(stages: dict[str, dict[str, Any]]) -> dict[str, str]:
    """By question: the answer, and why."""
    figures = {name: one.get("figures", {}) for name, one in stages.items()}
    return {question: rule(figures) for question, rule in RULES.items()}


def stages_on(figures: Figures) -> str:
    """``kvass.gpu_stages`` by default: stages are faster somewhere (an engine's own trial finds out
    where), no byte or token differs, and an engine loses nothing."""
    short, engine = figures.get("short", {}), figures.get("staged", {})
    names = [f"gpu_{how}_{what}" for what in COPIES.values() for how in ("plain", "staged")]
    if any(name not in short for name in names):
        return UNKNOWN.format("short")
    if not short.get("bytes_equal") or any(value is False for value in engine.values()):
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
    if not engine:
        return f"{UNKNOWN.format('staged')}; {'; '.join(said)}"
    losses = _losses(engine)
    answer = "on" if faster and not losses else "off"
    return f"{answer}: {'; '.join([*said, *losses])}"


def _losses(engine: dict[str, Any]) -> list[str]:
    """What an engine with stages loses against one without."""
    losses = [
        f"{name} {value:.2f}"
        for name, value in engine.items()
        if name.endswith("short_staged_vs_short") and value > LOSS
    ]
    plain, staged = (engine.get(f"{one}_tpot_stored_ms", 0.0) for one in ("short", "short_staged"))
    if staged > LOSS * plain:
        losses.append(f"ms per token beside stores {plain:.2f} -> {staged:.2f}")
    if not engine.get("stage_log"):
        losses.append("the engine did not say what it chose")
    return losses


def in_step_on(figures: Figures) -> str:
    """Small hits inside the step: faster than in the background, the longest one than computing."""
    found = figures.get("in_step", {})
    names = [SMALL.fullmatch(name) for name in found]
    sizes = sorted(size for one in names if one and (size := int(one[1])) <= LONGEST_IN_STEP)
    if not sizes:
        return UNKNOWN.format("in_step")
    said, better = [], True
    for size in dict.fromkeys((sizes[0], sizes[-1])):
        for beside in ("idle", "decoding"):
            at = f"small_{size}_{beside}"
            plain, inside = (float(found[f"{at}_{n}_vs_computed"]) for n in ("plain", "in_step"))
            said.append(f"{size} {beside}: {plain:.2f} -> {inside:.2f} of computing")
            better = better and inside < plain and (size < sizes[-1] or inside < 1)
    return f"{'on' if better else 'off'}: {'; '.join(said)}"


def fewer_calls(figures: Figures) -> str:
    """One call for a load, or several: what the pipeline gains while the engine rests, against what
    each call costs while it computes."""
    found = figures.get("gil", {})
    if "gil_wait_ms" not in found:
        return UNKNOWN.format("gil")
    idle, busy = found["gil_idle_4_vs_1"], found["gil_busy_4_vs_1"]
    answer = "longer first batches" if idle >= 1 / LOSS else "as shipped"
    return (
        f"{answer}: four batches took {idle:.2f} of one, beside Python {busy:.2f}; "
        f"each call waits {found['gil_wait_ms']:.1f} ms there"
    )


UNKNOWN: Final = "unknown: stage `{}` has no figures"
RULES: Final[dict[str, Callable[[Figures], str]]] = {
    "`kvass.gpu_stages` on by default": stages_on,
    "small hits inside the step on a GPU": in_step_on,
    "fewer calls for a load": fewer_calls,
}
