"""A tier in this process, against the library of its server."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, Final, Protocol

import numpy as np

from kvass.cli.bench.rig import WIDTH, ratio, seconds
from kvass.errors import TierDown
from kvass.tiers.base import Buffer, Tier
from kvass.transfer.base import U8Array
from kvass.types import PAGE

Sizes = Sequence[tuple[str, int, int]]
"""What ends the figures' names, bytes of a record, how many records."""
WARM_UP: Final = 3


class Counterpart(Protocol):
    """What a tier is compared with: a store of the last records that were put.

    ``names``: of the ratios of a put and a get, ``X_vs_Y``. ``get`` may leave ``into`` alone if the
    library itself says where.
    """

    names: tuple[str, str]

    def put(self, data: Sequence[Buffer]) -> None: ...

    def get(self, into: Sequence[Buffer]) -> None: ...


def measure_records(
    tier: Tier,
    other: Counterpart,
    memory: U8Array,
    size: int,
    rounds: int,
    after_round: Callable[[list[bytes]], object] = len,
) -> dict[str, Any]:
    """The ratios of ``other.names``, and rates. ``memory``: of all records, twice.

    Both sides take turns in every round, the one that begins too; every record is of new bytes,
    under a key of its own; every byte loaded is compared. ``after_round`` gets the keys. Raises
    ``TierDown`` if the tier did not take all, or did not give it back.
    """
    source, target = memory.reshape(2, -1, size)
    words = source.reshape(-1).view(np.uint64)
    words[:] = np.random.default_rng(0).integers(0, 1 << 63, len(words), np.uint64)
    times: dict[str, list[float]] = {}
    same = True
    for number in range(rounds + WARM_UP):
        keys = [os.urandom(WIDTH) for _ in source]
        words[:: PAGE // 8] += np.uint64(1)  # other bytes in every page than last time
        steps: dict[str, Callable[[], object]] = {
            "put": partial(_move, tier.store, keys, source),
            "their put": partial(other.put, [*source]),
            "get": partial(_move, tier.load, keys, target),
            "their get": partial(other.get, [*target]),
        }
        turn = -1 if number % 2 else 1
        for name in (*["put", "their put"][::turn], *["get", "their get"][::turn]):
            if name == "get":
                target[:] = 0
            took_s = seconds(steps[name])
            if number >= WARM_UP:
                times.setdefault(name, []).append(took_s)
            if name == "get":
                same = same and np.array_equal(source, target)
        after_round(keys)
    figures: dict[str, Any] = {"bytes_equal": same}
    for name, ours in zip(other.names, ("put", "get"), strict=True):
        theirs, (what, _, whom) = times[f"their {ours}"], name.partition("_vs_")
        figures[name] = ratio(times[ours], theirs)
        figures[f"{what}_gbps"] = source.nbytes / median(times[ours]) / 1e9
        figures[f"{what}_{whom}_gbps"] = source.nbytes / median(theirs) / 1e9
    return figures


def _move(move: Callable[..., Sequence[bool]], keys: Sequence[bytes], records: U8Array) -> None:
    """Store or load all of them."""
    moved = sum(move(keys, [[record] for record in records]))
    if moved != len(keys):
        raise TierDown(f"the tier took or gave back {moved} of {len(keys)} records")
