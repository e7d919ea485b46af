"""The benchmark of blend: its questions need two documents, and its model answers them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.blend_quality import first_token, model, quality
from bench.blend_quality.plot import plot


@pytest.mark.slow  # it trains a model; tests/engine/test_blend_quality_command.py needs none
def test_the_model_answers_and_blend_without_recompute_does_not() -> None:
    small = model.trained()
    scores = quality.measure(small, quality.cases(small, 5, 7))
    assert scores["full"][0].accuracy >= 0.95
    assert scores["none"][0].accuracy < 0.7
    assert scores["all"][0].accuracy == scores["full"][0].accuracy
    assert scores["all"][0].kl < 1e-6
    assert scores["wrong chunks"][0].accuracy < scores["kv_dev"][quality.CONTROL].accuracy
    for less, more in pairwise(scores["kv_dev"]):
        assert less.ratio < more.ratio


def test_the_race_runs_each_way_and_the_plot_names_each_line() -> None:
    race = first_token.Race(hidden=32, layers=3, length=16)
    took = first_token.measure(race, (0.25,), 1)
    assert set(took) == {"full", "none", "first_k 0.25", "kv_dev 0.25"}
    assert "<polyline" in plot({"a": [(0.0, 0.0), (1.0, 1.0)]}, {"a": "red"})
