"""Rows of one prompt at a daemon, as an engine's scheduler and its worker hold them.

Rows are one shard of ``row_bytes``, noise with a number of its own at its beginning, so that what a
tier gives back can be told from all else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from kvass.cli.bench.copies import CHUNK_TOKENS, PATIENCE_S, WIDTH
from kvass.client.client import Client
from kvass.client.parallel import ParallelStrategy
from kvass.errors import ConfigError, TierDown, Unavailable
from kvass.messages import Commit, Granted, Lookup, Matched, Ping, Release, Reserve, ReserveItem
from kvass.transfer.base import U8Array
from kvass.types import GroupLayout, RankLayout, Slots, U64Array

_STORE_BYTES: Final = 64 << 20
"""Reserved and written at a time."""
_BLOCK_TOKENS: Final = 16


class Rows:
    """A scheduler and a worker of the namespace that ``name`` says. ``ending`` closes them."""

    def __init__(self, socket: str, name: str, row_bytes: int, ending: ExitStack) -> None:
        blocks = CHUNK_TOKENS // _BLOCK_TOKENS
        layout = GroupLayout("full", _BLOCK_TOKENS, ("0",), (row_bytes // blocks,))
        terms, one = (name, {"weights": name}, CHUNK_TOKENS), ParallelStrategy()
        self.row_bytes = row_bytes
        self.worker = Client(
            socket, one.at(0).register(*terms, RankLayout((layout,))), wants_arena=True
        )
        self.scheduler = Client(socket, one.register(*terms))
        for client in (self.worker, self.scheduler):
            ending.enter_context(client).connect(PATIENCE_S)
        session = self.worker.session
        if session is None or session.arena is None:
            raise Unavailable("the daemon went away")
        self._arena: U8Array = session.arena.buffer
        ending.callback(delattr, self, "_arena")
        self._noise: U64Array = np.random.default_rng(0).integers(
            0, 1 << 63, row_bytes // 8, np.uint64
        )

    def store(self, keys: Sequence[bytes], *, write: bool = True) -> None:
        """Make rows READY. ``write=False``: with whatever lies there."""
        step = max(1, _STORE_BYTES // self.row_bytes)
        for first in range(0, len(keys), step):
            end = min(first + step, len(keys))
            digests = b"".join(keys[:end])
            item = ReserveItem(request="store", digests=digests, first=first)
            granted = self.scheduler.call(Reserve(items=[item], width=WIDTH), PATIENCE_S)
            assert isinstance(granted, Granted), granted
            (grant,) = granted.grants
            if grant.chunks != tuple(range(first, end)):
                raise ConfigError(
                    f"granted {len(grant.chunks)} of {end - first} rows of {self.row_bytes} bytes: "
                    "give the daemon more --l1-size"
                )
            if write:
                for key, row in zip(keys[first:end], self._words(grant.slots[0]), strict=True):
                    row[:] = self._noise
                    row[0] = _number(key)
            self.worker.post(Commit(boot=granted.boot, reservation=grant.reservation))
            self.worker.call(Ping(), PATIENCE_S)

    def look_up(self, keys: Sequence[bytes]) -> Matched:
        """One lookup, that waits for the tiers."""
        asked = Lookup(
            request="prompt", digests=b"".join(keys), width=WIDTH, budget_ms=PATIENCE_S * 1000
        )
        matched = self.scheduler.call(asked, PATIENCE_S + 1)
        assert isinstance(matched, Matched), matched
        return matched

    def release(self, matched: Matched) -> None:
        """Give it back; returns once the daemon has taken note."""
        if matched.lease:
            self.worker.post(Release(boot=matched.boot, lease=matched.lease, rank=0))
            self.worker.call(Ping(), PATIENCE_S)

    def holds(self, matched: Matched, keys: Sequence[bytes]) -> bool:
        """Whether every row of the match is the one that was stored."""
        return all(
            row[0] == _number(key) and np.array_equal(row[1:], self._noise[1:])
            for key, row in zip(keys, self._words(matched.slots[0]), strict=True)
        )

    def views(self, matched: Matched) -> list[U8Array]:
        """Where the rows of a match lie."""
        return self._views(matched.slots[0])

    def _views(self, slots: Slots) -> list[U8Array]:
        starts = slots.offsets(0, self.row_bytes).tolist()
        return [self._arena[at : at + self.row_bytes] for at in starts]

    def _words(self, slots: Slots) -> list[U64Array]:
        return [view.view(np.uint64) for view in self._views(slots)]


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
