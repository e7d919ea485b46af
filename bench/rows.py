"""Rows of noise that a tier gives back, and what the daemon tells of its tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from kvass.cli.bench.rig import CHUNK_TOKENS, PATIENCE_S, EngineConnections
from kvass.client.client import Client
from kvass.errors import TierDown, Unavailable
from kvass.messages import Matched
from kvass.transfer.base import U8Array
from kvass.types import GroupLayout, Slots, U64Array

_STORE_BYTES: Final = 64 << 20
"""Reserved and written at a time."""
_BLOCK_TOKENS: Final = 16


class Rows(EngineConnections):
    """An engine of one rank with rows of ``row_bytes``, in the namespace that ``name`` says.

    A row is noise with a number of its own at the beginning, so that it can be told from all else.
    """

    def __init__(
        self, socket: str, name: str, row_bytes: int, ending: ExitStack, *, populate: bool = True
    ) -> None:
        page_bytes = row_bytes * _BLOCK_TOKENS // CHUNK_TOKENS
        layout = GroupLayout("full", _BLOCK_TOKENS, ("0",), (page_bytes,))
        super().__init__(socket, (layout,), ending, name=name, populate=populate)
        self._noise: U64Array = np.random.default_rng(0).integers(
            0, 1 << 63, row_bytes // 8, np.uint64
        )

    def store(self, keys: Sequence[bytes], *, write: bool = True, session: int = 0) -> None:
        """Make rows READY. ``write=False``: with whatever lies there. ``session``: the tag of the
        client's session that stores them."""
        step = max(1, _STORE_BYTES // self.row_bytes)
        for first in range(0, len(keys), step):
            end = min(first + step, len(keys))
            granted = self.reserve(b"".join(keys[:end]), first, session)
            if write:
                slots = granted.grants[0].slots[0]
                for key, row in zip(keys[first:end], self._words(slots), strict=True):
                    row[:] = self._noise
                    row[0] = _number(key)
            self.commit(granted)

    def find(self, keys: Sequence[bytes]) -> Matched:
        """One lookup, that waits for the tiers and may find less than all."""
        return self.ask(b"".join(keys))

    def holds(self, matched: Matched, keys: Sequence[bytes]) -> bool:
        """Whether every row of the match is the one that was stored."""
        return all(
            row[0] == _number(key) and np.array_equal(row[1:], self._noise[1:])
            for key, row in zip(keys, self._words(matched.slots[0]), strict=True)
        )

    def views(self, slots: Slots) -> list[U8Array]:
        """Where these rows lie."""
        starts = slots.offsets(0, self.row_bytes).tolist()
        return [self.arena[at : at + self.row_bytes] for at in starts]

    def _words(self, slots: Slots) -> list[U64Array]:
        return [view.view(np.uint64) for view in self.views(slots)]


def _number(key: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(key[:8], "little"))


def tier_status(client: Client) -> dict[str, Any]:
    """What the daemon tells of its only tier."""
    (tier,) = client.status(PATIENCE_S)["tiers"]
    if not tier.get("up", True):
        raise TierDown(f"{tier['tier']}: {tier['trouble']}")
    return dict(tier)


def wait_tier(client: Client, true: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """Ask until it is so. Raises ``Unavailable`` after a while without any progress, ``TierDown``
    if the tier is."""
    seen: dict[str, Any] = {}
    since = time.monotonic()
    while not true(tier := tier_status(client)):
        moved = {name: tier.get(name) for name in ("stored_rows", "loaded_rows", "records")}
        if moved != seen:
            seen, since = moved, time.monotonic()
        if time.monotonic() - since > PATIENCE_S:
            raise Unavailable(f"waited {PATIENCE_S:.0f} s in vain for {what}")
        time.sleep(0.02)
    return tier


def flushed(rows: int) -> Callable[[dict[str, Any]], bool]:
    """Whether a tier has got that many rows, and nothing is on its way."""

    def done(tier: dict[str, Any]) -> bool:
        if failed := tier.get("store_failures", 0):
            raise TierDown(f"{tier['tier']}: {failed} rows were not stored")
        idle = not tier["flush_queue_rows"] and not tier["storing_bytes"]
        return idle and tier.get("stored_rows", 0) >= rows

    return done
