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
    """Of each selector and ratio: accuracy, divergence, time to the first token."""
    rows = ["| recomputed | | accuracy | KL, nats | first token |", "|---|---|---|---|---|"]

    def row(name: str, score: quality.Score, way: str = "") -> None:
        time = f"{took[way] / took['full']:.2f}" if way else ""
        shown = f"{score.accuracy:.3f} | {score.kl:.3f} | {time} |"
        rows.append(f"| {100 * score.ratio:.0f} % | {name} | {shown}")

    row("`none`", scores["none"][0], "none")
    for index, ratio in enumerate(quality.RATIOS):
        for name in quality.SELECTORS:
            way = f"{name} {ratio:g}"
            row(
                f"`{name}`" if way in took else name,
                scores[name][index],
                way if way in took else "",
            )
    row("`all`", scores["all"][0])
    row("full prefill", scores["full"][0], "full")
    for name in ("K not moved", "wrong chunks"):
        row(f"`kv_dev`, {name}", scores[name][0])
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
