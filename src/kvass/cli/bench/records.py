"""A tier alone: storing and loading records, against the same bytes without it.

Law of this file: both sides take turns in every round, the one that begins too; every record is of
new bytes, under a key of its own; every byte loaded is compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, Final, TypeAlias

import numpy as np

from kvass.cli.bench.copies import WIDTH, seconds
from kvass.cli.bench.counterparts import Counterpart
from kvass.errors import TierDown
from kvass.tiers.base import Buffer, Tier
from kvass.transfer.base import U8Array
from kvass.types import PAGE

Steps: TypeAlias = list[tuple[str, Callable[[], object]]]

WARM_UP: Final = 3
"""Rounds after which a disk's places have all been written once, and are written over."""


def measure_records(
    tier: Tier, other: Counterpart, memory: U8Array, size: int, count: int, rounds: int
) -> dict[str, Any]:
    """The ratios of ``other.names``, and rates. ``memory`` holds ``2 * count`` records.

    Raises ``TierDown`` if the tier did not take all, or did not give it back.
    """
    buffers = [memory[i * size : (i + 1) * size] for i in range(2 * count)]
    source, target = buffers[:count], buffers[count:]
    pages = memory[: count * size].view(np.uint64)[:: PAGE // 8]
    memory[: count * size].view(np.uint64)[:] = np.random.default_rng(0).integers(
        0, 1 << 63, count * size // 8, np.uint64
    )
    times: dict[str, list[float]] = {}
    same = True
    for number in range(rounds + WARM_UP):
        keys = [os.urandom(WIDTH) for _ in range(count)]
        pages += np.uint64(1)  # other bytes in every page than last time
        puts: Steps = [
            ("put", partial(_store, tier, keys, source)),
            ("their put", partial(other.put, source)),
        ]
        gets: Steps = [
            ("get", partial(_load, tier, keys, target)),
            ("their get", partial(other.get, target)),
        ]
        for steps in (puts, gets):
            for name, step in steps[:: -1 if number % 2 else 1]:
                if name == "get":
                    memory[count * size : 2 * count * size] = 0
                took_s = seconds(step)
                if number >= WARM_UP:
                    times.setdefault(name, []).append(took_s)
                if name == "get":
                    same = same and _equal(source, target)
        if not other.evicts:
            tier.delete(keys)
        other.forget()
    return _figures(other.names, times, count * size) | {"bytes_equal": same}


def _store(tier: Tier, keys: Sequence[bytes], data: Sequence[Buffer]) -> None:
    kept = sum(tier.store(keys, [[one] for one in data]))
    if kept != len(keys):
        raise TierDown(f"the tier kept {kept} of {len(keys)} records")


def _load(tier: Tier, keys: Sequence[bytes], into: Sequence[Buffer]) -> None:
    found = sum(tier.load(keys, [[one] for one in into]))
    if found != len(keys):
        raise TierDown(f"the tier gave back {found} of {len(keys)} records")


def _equal(source: Sequence[Buffer], target: Sequence[Buffer]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(source, target, strict=True))


def _figures(names: tuple[str, str], times: dict[str, list[float]], size: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, ours in zip(names, ("put", "get"), strict=True):
        theirs = f"their {ours}"
        ratios = [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
        what, _, whom = name.partition("_vs_")
        figures[name] = median(ratios)
        figures[f"{what}_gbps"] = size / median(times[ours]) / 1e9
        figures[f"{what}_{whom}_gbps"] = size / median(times[theirs]) / 1e9
    return figures
