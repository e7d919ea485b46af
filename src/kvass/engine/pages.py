"""``PageStore``: for engines whose unit of storage is a page with a key. No torch, no scheduler.

Laws of this file:

- No failure of kvass leaves a call: it is a miss, counted in ``counters``. Only the constructor
  raises.
- Every wait has a bound. A daemon that hangs costs a load its ``lookup_budget_ms`` and a store
  ``ANSWER_S``, and later calls nothing until it answers. One that is gone costs nothing. A load
  waits for tiers and for other writers no longer than computing its tokens takes.
- A page counts as loaded only if every byte of it was there before the lease's deadline, and if
  the weights are still those with which the call began (laws 5 and 10).
- When a call has returned, nothing reads or writes the caller's pages.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final

import numpy as np

from kvass.client.pages import PageClient
from kvass.client.parallel import ParallelStrategy
from kvass.client.worker import ArenaLease
from kvass.engine.boundary import Boundary
from kvass.errors import UsageError
from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.messages import PRESENT, Grant, Granted, RequestContext
from kvass.transfer.base import Kind, U8Array
from kvass.transfer.page_rows import PageRows
from kvass.types import GroupLayout, RankLayout, Slots

__all__ = ["PageStore", "Plane", "Put"]

MOST_PRESENT: Final = 8192
"""The most keys of one ``Present``."""


class Put(IntEnum):
    """What became of a page that was to be stored. False only if it is not stored."""

    REFUSED = 0
    """There was no room, no daemon, or no time."""
    STORED = 1
    HELD = 2
    """The daemon has the page already, or somebody else is storing it now."""


class PageStore:
    """A store of pages in the daemon at ``socket`` (by default that of ``KVASS_SOCKET``).

    Page ``p`` is the bytes ``regions[plane.region][plane.base + p * plane.block_stride :][:
    plane.run]`` of each of ``planes``, in their order. ``regions`` are flat uint8 arrays of the
    caller's memory. ``pages``: how many pages they have, from page 0 on. ``page_tokens``: how many
    tokens a page has; it is for figures, and 1 is fine. In the daemon a page takes ``row_bytes``:
    its bytes, rounded up to 4 KiB.

    ``fields``: texts that name all that changes the bytes of a page: weights, settings, versions.
    Stores share pages if they have equal fields, planes of equal ``run``s and equal
    ``page_tokens``. ``name``: the model's, for people. ``tenant``: who pays for stored pages,
    unless a call names another one. ``daemon_uid``: the daemon's user, if that is another one.

    A key names a page's contents: 8 to 32 bytes, all of one width, such as a digest of all tokens
    up to the page's end. ``before``: the keys of the pages before those of a call in their prompt.
    They are marked as used, so that no prompt loses its beginning first.

    Any number of threads may call at once. Calls hold no page of the caller afterwards. Raises
    ``UsageError`` if the arguments describe no memory.
    """

    def __init__(
        self,
        socket: str,
        fields: Mapping[str, str],
        planes: Sequence[Plane],
        regions: Sequence[U8Array],
        page_tokens: int,
        pages: int,
        *,
        name: str = "",
        tenant: str = "",
        boundary: Boundary | None = None,
        daemon_uid: int | None = None,
    ) -> None:
        runs = tuple(plane.run for plane in planes)
        if not runs or not fields:
            raise UsageError("give at least one plane, and fields that name the weights")
        if page_tokens < 1:
            raise UsageError(f"page_tokens {page_tokens}: a page has at least one token")
        names = tuple(f"plane {number}" for number in range(len(runs)))
        layout = RankLayout((GroupLayout("full", page_tokens, names, runs),))
        self._planes = GroupPlanes(0, tuple(planes), pages, 1)
        self._rows = PageRows(regions, self._planes)
        self._regions = tuple(regions)  # it keeps the memory
        self._tenant, self._boundary = tenant, boundary or Boundary()
        self._counters: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._writing = threading.Lock()
        """Held for one piece of a ``put``: two of them would take each other's share."""
        path = socket or os.environ.get("KVASS_SOCKET", "")
        one, instance = ParallelStrategy(), f"pages-{uuid.uuid4().hex}"
        scheduler = one.register(instance, fields, page_tokens, model=name)
        rank = one.at(0).register(instance, fields, page_tokens, layout, model=name)
        self._client = PageClient(path, scheduler, [rank], daemon_uid=daemon_uid)

    @property
    def row_bytes(self) -> int:
        """The bytes that a page takes in the daemon."""
        return self._planes.shard_bytes

    @property
    def counters(self) -> Counter[str]:
        """Pages by what became of them: ``stored``, ``held``, ``refused``, ``loaded``, ``missed``,
        ``late``; and calls that failed, by name."""
        with self._counting:
            return self._counters + self._boundary.counters

    @property
    def connected(self) -> bool:
        return self._client.connected

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for the daemon. Without it calls are misses until it comes."""
        return self._client.wait_connected(timeout_s)

    def close(self) -> None:
        """End the connections. Calls after it are misses. Idempotent."""
        self._boundary.run(None, self._client.close)

    # ------------------------------------------------------------ pages

    def put(
        self,
        keys: Sequence[bytes],
        pages: Sequence[int],
        before: Sequence[bytes] = (),
        *,
        tenant: str = "",
    ) -> list[Put]:
        """Store ``pages`` under ``keys``; what became of each. What has a key already is not
        written again."""
        became = [Put.REFUSED] * len(keys)
        self._boundary.run(None, self._put, keys, pages, before, self._context(tenant), became)
        for each in became:
            self._count(each.name.lower())
        return became

    def get(
        self,
        keys: Sequence[bytes],
        pages: Sequence[int],
        before: Sequence[bytes] = (),
        *,
        tenant: str = "",
    ) -> int:
        """Load ``pages`` from ``keys``; how many from the first on were loaded whole, in time. The
        others may have any bytes. Each page may be named once."""
        loaded = self._boundary.run(0, self._get, keys, pages, before, self._context(tenant))
        self._count("loaded", loaded)
        self._count("missed", len(keys) - loaded)
        return loaded

    def has(self, keys: Sequence[bytes], before: Sequence[bytes] = (), *, tenant: str = "") -> int:
        """How many of ``keys`` from the first on can be loaded. Those in tiers are loaded into
        shared memory meanwhile."""
        return self._boundary.run(0, self._has, keys, before, self._context(tenant))

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of ``keys`` the daemon has, in shared memory or in a tier. Nothing is loaded or
        marked as used. An older daemon says how many from the first on it has."""
        return self._boundary.run([False] * len(keys), self._present, keys)

    # ------------------------------------------------------------ resets

    def new_generation(self, token: bytes = b"") -> None:
        """The weights may have been replaced: nothing that was stored before is loaded again by
        this store. ``token``: stores with equal fields that give the same token share pages
        again; empty: it shares with nobody. Waits for the daemon for ``ANSWER_S`` at most. Nothing
        is loaded or stored until it has confirmed it."""
        name = hashlib.sha256(token).digest() if token else b""
        if self._boundary.run(None, self._client.new_generation, name) is None:
            self.close()  # it failed, so old pages cannot be told from new ones any more

    def clear(self, timeout_s: float = 5.0) -> bool:
        """Forget all pages of stores that share with this one, in tiers too. False: it was not
        confirmed in time. Nothing is loaded or stored until it is."""
        return self._boundary.run(False, self._client.clear, timeout_s)

    # ------------------------------------------------------------ inside

    def _context(self, tenant: str) -> RequestContext:
        return RequestContext(tenant=tenant or self._tenant)

    def _count(self, name: str, pages: int = 1) -> None:
        with self._counting:
            self._counters[name] += pages

    def _named(
        self, keys: Sequence[bytes], before: Sequence[bytes]
    ) -> tuple[list[bytes], int, int]:
        """The keys of one message; how many of them are of ``before``; how many of ``keys``."""
        most = self._client.most_keys
        first = min(len(before), most // 2)
        count = min(len(keys), most - first)
        named = [*before[:first], *keys[:count]]
        if len(widths := {len(key) for key in named}) > 1:
            raise UsageError(f"keys of {sorted(widths)} bytes: give keys of one width")
        return named, first, count

    def _get(
        self,
        keys: Sequence[bytes],
        pages: Sequence[int],
        before: Sequence[bytes],
        context: RequestContext,
    ) -> int:
        generation = self._client.generation
        self._check(keys, pages)
        named, first, count = self._named(keys, before)
        if not count:
            return 0
        with self._client.read(named, first, context, generation) as given:
            if given is None:
                return 0
            match, arena = given
            found = match.chunks - match.first
            self._copy("load", match.slots[0], pages[:found], arena)
        if time.monotonic() >= match.deadline_s:
            self._count("late", found)
            return 0
        return found if generation == self._client.generation else 0

    def _has(self, keys: Sequence[bytes], before: Sequence[bytes], context: RequestContext) -> int:
        generation, there = self._client.generation, 0
        while there < len(keys):
            named, first, count = self._named(keys[there:], () if there else before)
            found = self._client.count(named, first, context, generation) if count else 0
            there += found
            if found < count or not count:
                break
        return there

    def _present(self, keys: Sequence[bytes]) -> list[bool]:
        if PRESENT not in self._client.features:
            there = self._has(keys, (), self._context(""))
            return [number < there for number in range(len(keys))]
        generation, held = self._client.generation, [False] * len(keys)
        for tiers in (False, True) if self._client.has_tiers else (False,):
            asked = [number for number, there in enumerate(held) if not there]
            most = max(1, min(MOST_PRESENT, self._client.most_keys))
            for at in range(0, len(asked), most):
                part = asked[at : at + most]
                named = self._named([keys[number] for number in part], ())[0]
                found = self._client.present(named, tiers, generation) if named else None
                for number, there in zip(part, found or (), strict=False):
                    held[number] = there
        return held if generation == self._client.generation else [False] * len(keys)

    def _put(
        self,
        keys: Sequence[bytes],
        pages: Sequence[int],
        before: Sequence[bytes],
        context: RequestContext,
        became: list[Put],
    ) -> None:
        """Store in pieces: a message has so many keys, and one engine may be writing a share of the
        memory only."""
        self._check(keys, pages)
        generation, first = self._client.generation, 0
        while first < len(keys):
            named, skipped, count = self._named(keys[first:], [*before, *keys[:first]])
            if not count:
                return
            with self._writing:
                given = self._client.reserve(named, skipped, context, generation)
                if given is None:
                    return
                granted, arena = given
                grant, base = granted.grants[0], first - skipped
                stored = [base + chunk for chunk in grant.chunks]
                written = arena is not None and self._write(
                    granted, [pages[at] for at in stored], arena
                )
            if generation != self._client.generation or (stored and not written):
                return
            end = first + count if grant.later < 0 else base + grant.later
            for at in self._held(keys[:end], first, stored, grant, base, context):
                became[at] = Put.HELD
            for at in stored:
                became[at] = Put.STORED
            if grant.refused and not stored:
                return
            first = base + grant.refused[0] if grant.refused else end

    def _held(
        self,
        keys: Sequence[bytes],
        first: int,
        stored: list[int],
        grant: Grant,
        base: int,
        context: RequestContext,
    ) -> set[int]:
        """The numbers from ``first`` on of the keys that the daemon had before the grant."""
        if grant.refused is None:  # an older daemon: what is not granted may be held or refused
            end = first + self._has(keys[first:], keys[:first], context)
            return set(range(first, end)).difference(stored)
        refused = {base + chunk for chunk in grant.refused}
        end = max(refused) + 1 if refused and not stored else len(keys)
        return set(range(first, end)).difference(stored, refused)

    def _write(self, granted: Granted, pages: Sequence[int], arena: ArenaLease) -> bool:
        """Copy ``pages`` into the granted rows. Returns whether they can be loaded now."""
        copied = False
        try:
            with arena:
                self._copy("store", granted.grants[0].slots[0], pages, arena)
                copied = True
        finally:
            there = self._client.end_write(granted, copied)
        return there

    def _check(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Raise ``UsageError`` unless each key has a page."""
        if len(keys) != len(pages):
            raise UsageError(f"{len(keys)} keys and {len(pages)} pages: give a page for each key")

    def _copy(self, kind: Kind, slots: Slots, pages: Sequence[int], arena: ArenaLease) -> None:
        """Copy these pages. Raises ``UsageError`` for impossible pages, ``OSError`` if there is no
        memory for the slots."""
        blocks = np.asarray(pages, np.int64).reshape(-1, 1)
        offsets = slots.offsets(0, self.row_bytes)
        plan = plan_copy(self._planes, blocks, offsets, null_block=False)
        if kind == "load" and not plan.distinct:
            raise UsageError("two keys would be loaded into one page: name each page once")
        if kind == "store" and plan.end > arena.populated:
            for row in plan.rows:
                arena.prepare(row.slot, row.slot + self.row_bytes)
        self._rows.copy(kind, plan, arena.buffer)
