"""``python -m bench.blend_quality``: see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

import torch

from bench.blend_quality import first_token, model, quality
from bench.blend_quality.plot import plot
from kvass.cli.bench.rig import say

GATE: Final = 0.95
"""Accuracy that a full prefill must reach, or no figure means anything."""
COLOURS: Final = {
    "kv_dev": "#1f6feb",
    "first_k": "#d1242f",
    "last k": "#bf8700",
    "random": "#57606a",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.blend_quality", description="What blend costs answers."
    )
    parser.add_argument("--train", action="store_true", help="train the model again")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7, help="of the time to the first token")
    parser.add_argument("--plot", type=Path, help="write the plot, as SVG")
    args = parser.parse_args()
    torch.set_num_threads(1)
    small = model.train() if args.train else model.trained()
    say(f"answers of {args.prompts} prompts")
    scores = quality.measure(small, quality.cases(small, args.prompts, 1))
    full, nothing = scores["full"][0].accuracy, scores["none"][0].accuracy
    if full < GATE or nothing > GATE - 0.2:
        print(f"no table: a full prefill is right in {full:.3f}, no recompute in {nothing:.3f}")
        return 1
    say(f"time to the first token, {args.rounds} rounds")
    took = first_token.measure(first_token.Race(), quality.RATIOS, args.rounds)
    print(table(scores, took))
    if args.plot:
        lines = {
            name: [(0.0, nothing), *((s.ratio, s.accuracy) for s in scores[name]), (1.0, full)]
            for name in quality.SELECTORS
        }
        args.plot.write_text(plot(lines, COLOURS))
    return 0


def table(scores: dict[str, list[quality.Score]], took: dict[str, float]) -> str:
    """Accuracy, and in brackets the divergence in nats, of each selector by ratio; then what the
    first token takes, as a share of a full prefill."""
    timed = [name for name in quality.SELECTORS if f"{name} {quality.RATIOS[0]:g}" in took]
    names = [*quality.SELECTORS, *(f"first token, {name}" for name in timed)]
    rows = [f"| computed again | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for index, ratio in enumerate(quality.RATIOS):
        cells = [shown(scores[name][index]) for name in quality.SELECTORS]
        cells += [f"{took[f'{name} {ratio:g}'] / took['full']:.2f}" for name in timed]
        rows.append(f"| {100 * ratio:g} % | {' | '.join(cells)} |")
    single = ("full", "all", "none", "K not moved", "wrong chunks")
    rows += [f"{name}: {shown(scores[name][0])}" for name in single]
    return "\n".join([*rows, f"none, first token: {took['none'] / took['full']:.2f}"])


def shown(score: quality.Score) -> str:
    return f"{score.accuracy:.3f} ({abs(score.kl):.2f})"


if __name__ == "__main__":
    sys.exit(main())
