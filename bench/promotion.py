"""From Lookup to Matched, when every row lies in a tier and none in L1."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from bench.rows import Rows, tier_status
from kvass.cli.bench.rig import PATIENCE_S, ratio, seconds
from kvass.errors import Unavailable
from kvass.messages import Matched
from kvass.tiers.base import Buffer


def measure_promotion(
    rows: Rows, keys: Sequence[bytes], raw_read: Callable[[Sequence[Buffer]], object], rounds: int
) -> dict[str, Any]:
    """Ratio and rate of promoting ``keys`` over and over, against ``raw_read`` of as many bytes.

    The daemon drops promoted rows when they are released, so that each time all of them come from
    the tier; that they did is counted. What is read raw goes to where they lay: how scattered
    memory is decides how fast a device fills it. Nobody else uses this daemon.
    """
    _, lay, same = promote(rows, keys)  # warms up
    times: dict[str, list[float]] = {"ours": [], "raw": []}
    for number in range(rounds):
        for who in ("raw", "ours")[:: -1 if number % 2 else 1]:
            if who == "raw":
                took_s = seconds(partial(raw_read, lay))
            else:
                took_s, lay, right = promote(rows, keys)
                same = same and right
            times[who].append(took_s)
    size = len(keys) * rows.row_bytes
    return {
        f"promote_{len(keys)}_rows_vs_raw_read": ratio(times["ours"], times["raw"]),
        f"promote_{len(keys)}_rows_gbps": size / median(times["ours"]) / 1e9,
        f"promote_{len(keys)}_rows_raw_read_gbps": size / median(times["raw"]) / 1e9,
        "bytes_equal": same,
    }


def promote(rows: Rows, keys: Sequence[bytes]) -> tuple[float, list[Buffer], bool]:
    """Seconds from a lookup to its match of all ``keys``; where they lay, and whether they are
    right. They are released."""
    before = tier_status(rows.scheduler).get("loaded_rows", 0)
    took_s, matched = find(rows, keys)
    right = rows.holds(matched, keys)
    rows.release(matched)
    loaded = tier_status(rows.scheduler).get("loaded_rows", 0) - before
    if loaded != len(keys):
        raise Unavailable(f"promoted {loaded} of {len(keys)} rows: L1 had some; is it in use?")
    return took_s, rows.views(matched.slots[0]), right


def find(rows: Rows, keys: Sequence[bytes]) -> tuple[float, Matched]:
    """Look up until all is found: a daemon that just began does not know its tier's epoch yet."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        began_s = time.perf_counter()
        matched = rows.find(keys)
        took_s = time.perf_counter() - began_s
        if matched.chunks == len(keys):
            return took_s, matched
        rows.release(matched)
        time.sleep(0.02)
    raise Unavailable(f"the tier gives back {matched.chunks} of {len(keys)} rows")
