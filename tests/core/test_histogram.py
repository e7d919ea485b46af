"""A histogram counts each value once."""

from __future__ import annotations

from kvass.core.histogram import BOUNDS, Histogram


def test_a_histogram_counts_each_value_once_at_its_bound() -> None:
    histogram = Histogram()
    for value in (0.0, BOUNDS[0], 0.0015, 1e9):
        histogram.observe(value, 2)
    assert sum(histogram.fields()["counts"]) == 8
    assert histogram.counts[0] == 4
    assert histogram.counts[BOUNDS.index(0.002)] == histogram.counts[-1] == 2
