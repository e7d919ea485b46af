"""A ``SchedulerClient`` without a daemon: rows in a set, and the answers that a test chooses.

It checks its caller: a lease that was taken is handed over or released exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from kvass.client.lookups import PENDING, Found, Match, Pending
from kvass.client.scheduler import Prefetching, Reserving
from kvass.messages import (
    NO_CONTEXT,
    Grant,
    Granted,
    LookupNote,
    LookupResult,
    Register,
    RequestContext,
    ReserveItem,
    ShadowReport,
)
from kvass.types import Slots


class FakeClient:
    """``rows`` are the hashes held. Settings:

    - ``silent``: no reserve is answered. ``late``: each is answered so many steps later. After
      ``patience`` steps without an answer the client gives up.
    - ``missing``: a reserve gets no answer that counts. ``refuse``: grants are empty.
      ``most_items``: all items but the first so many are put off.
    - ``deaf``: ``handed_over`` fails. ``pending``: so many lookups are told to ask again.
    - ``deadline_s``: until when granted rows may be written.
    - ``promotes_ahead``: there are tiers. A prefetch is open until its request is in ``promoted``.
    - ``tails``: hits may end inside of a chunk, and tails are stored (``SchedulerHarness``).
    """

    def __init__(
        self, socket: str = "", registration: Register | None = None, *, tails: bool = False
    ) -> None:
        self.tails = tails
        self.registration = registration
        self.connected = True
        self.owes = False
        self.rows: set[bytes] = set()
        self.boot = b"boot"
        self.deadline_s = 1e12
        self.pending = self.late = 0
        self.most_items = 1 << 30
        self.patience = 5
        self.awaited: list[Reserving] = []
        self.given_up = 0
        self.silent_s = 0.0
        self.silent = self.missing = self.refuse = self.deaf = self._overdue = False
        self.reserves: list[list[ReserveItem]] = []
        self.waits: list[bool] = []
        """Of the reserves, which may be waited for."""
        self.lookups: list[tuple[str, int]] = []
        self.hashes: dict[str, list[bytes]] = {}
        """Of the last lookup of each request."""
        self.promotes_ahead = False
        self.prefetches: list[tuple[str, list[bytes], int]] = []
        """Each request, the hashes and the first chunk."""
        self.promoted: set[str] = set()
        self.left: list[str] = []
        self.ended_early: list[str] = []
        self.contexts: dict[str, RequestContext] = {}
        """Of the last lookup of each request."""
        self.notes: list[LookupNote] = []
        self.results: list[LookupResult] = []
        self.kept_chunks = 0
        self.ended: list[tuple[int, str]] = []
        """The sessions that ended, and their tenants."""
        self.writing: dict[int, list[bytes]] = {}
        self.held: dict[str, Match] = {}
        self.taken: dict[int, str] = {}
        self.released: list[int] = []
        self.handed: list[int] = []
        self.steps = self.generations = 0
        self.uncached = ""
        """What ``tell_uncached`` was told."""
        self.counters: Counter[str] = Counter()
        self.shadow: ShadowReport | None = None
        """The last report of shadow mode."""
        self._next = 0

    def start(self) -> None:
        """Nothing to connect to."""

    def complete(self, identity: Mapping[str, str]) -> None:
        """Nothing to connect to."""

    def close(self) -> None:
        """Nothing to end."""

    def new_step(self) -> None:
        """Count steps."""
        self.steps += 1
        self._overdue = self._overdue and self.silent

    @property
    def answering(self) -> bool:
        """Whether a daemon is there, and no answer overdue."""
        return self.connected and not self._overdue

    def end_session(self, context: RequestContext) -> bool:
        """Note that it ended."""
        self.ended.append((context.session, context.tenant))
        return True

    def look_up(
        self,
        request: str,
        digests: bytes,
        width: int,
        first: int,
        context: RequestContext = NO_CONTEXT,
        blocks: object = None,
    ) -> Found:
        """The longest run of held rows from ``first``."""
        found = self.find(request, split(digests, width), first, context)
        boot = self.boot if self.connected else b""
        return Found(found, self.ended_by(request), self.kept_chunks, boot)

    def match(self, *lookup: Any) -> Match | Pending | None:
        """What ``look_up`` finds."""
        return self.look_up(*lookup).match

    def find(
        self, request: str, hashes: Sequence[bytes], first: int, context: RequestContext
    ) -> Match | Pending | None:
        """What a lookup finds; the test may have another one."""
        held = self.held.get(request)
        if held is not None and held.first == first:
            return held
        self.give_back(request)
        self.lookups.append((request, first))
        self.hashes[request] = [*hashes]
        self.contexts[request] = context
        if self.pending:
            self.pending -= 1
            return PENDING
        chunks = self.longest(hashes, first)
        if chunks == first:
            return None
        self.held[request] = Match(
            lease=self._number(),
            boot=self.boot,
            first=first,
            chunks=chunks,
            given_s=1e9,
            deadline_s=1e12,
            slots=self.matched_slots(first, chunks),
        )
        return self.held[request]

    def prefetch(
        self, request: str, digests: bytes, width: int, first: int, context: RequestContext
    ) -> Prefetching:
        """Note what is asked for."""
        self.prefetches.append((request, split(digests, width), first))
        self.contexts[request] = context
        return Prefetching(request, len(self.prefetches), cast(Any, None))

    def prefetched(self, one: Prefetching) -> bool:
        return one.request in self.promoted

    def leave_prefetch(self, one: Prefetching) -> None:
        self.left.append(one.request)

    def end_prefetch(self, one: Prefetching) -> None:
        self.ended_early.append(one.request)

    def ended_by(self, request: str) -> str:
        """Of a match that is held, its end; else what the daemon would say."""
        return "" if request in self.held else "absent"

    def longest(self, hashes: Sequence[bytes], first: int) -> int:
        """The chunk at which a match from ``first`` ends."""
        chunks = first
        while chunks < len(hashes) and hashes[chunks] in self.rows:
            chunks += 1
        return chunks

    def matched_slots(self, first: int, chunks: int) -> tuple[Slots, ...]:
        """The slots of a match of chunks ``[first, chunks)``, by group."""
        return (slots_of(chunks - first),)

    def note_lookups(self, notes: Sequence[LookupNote]) -> bool:
        """Keep the notes."""
        if self.connected:
            self.notes += notes
        return self.connected

    def take(self, request: str) -> Match | None:
        """Ownership passes to the caller."""
        match = self.held.pop(request, None)
        if match is not None:
            self.taken[match.lease] = request
        return match

    def give_back(self, request: str) -> None:
        """Give back what is held for ``request``."""
        if match := self.held.pop(request, None):
            self.released.append(match.lease)

    def release(self, boot: bytes, lease: int) -> None:
        """A lease taken, but not handed over."""
        del self.taken[lease]
        self.released.append(lease)

    def abort(self, boot: bytes, reservation: int) -> None:
        """A reservation granted, but not handed over."""
        del self.writing[reservation]

    def begin_reserve(
        self, items: Sequence[ReserveItem], width: int, wait: bool = True
    ) -> Reserving | None:
        """Keep the request."""
        assert self.answering
        self.reserves.append(list(items))
        self.waits.append(wait)
        self.awaited.append(Reserving(len(self.reserves), width, self.steps, 0.0))
        return self.awaited[-1]

    def granted(self, reserving: Reserving) -> Granted | Pending | None:
        """Grant every chunk that is neither held nor being written, once it is time."""
        waited = self.steps - reserving.asked_s
        if self.connected and (self.silent or waited < self.late):
            if waited < self.patience:
                return PENDING
            self._overdue = self.silent
            self.give_up(reserving)
            return None
        self.awaited.remove(reserving)
        if self.missing or not self.connected:
            return None
        return self._grant(self.reserves[reserving.seq - 1], reserving.items)

    def give_up(self, reserving: Reserving) -> None:
        """A grant that comes later is aborted."""
        self.awaited.remove(reserving)
        self.given_up += 1

    def _grant(self, items: Sequence[ReserveItem], width: int) -> Granted:
        grants = []
        for item in items[: self.most_items]:
            busy = {hash_ for rows in self.writing.values() for hash_ in rows} | self.rows
            grants.append(self.grant_item(item, split(item.digests, width), busy))
        grants += [Grant(later=item.first) for item in items[self.most_items :]]
        return Granted(boot=self.boot, given_s=1e9, deadline_s=self.deadline_s, grants=grants)

    def grant_item(self, item: ReserveItem, hashes: Sequence[bytes], busy: set[bytes]) -> Grant:
        """Grant what is not ``busy`` of one item."""
        wanted = range(item.first, len(hashes))
        chunks = [] if self.refuse else [c for c in wanted if hashes[c] not in busy]
        number = self.write([hashes[c] for c in chunks])
        return Grant(number, tuple(chunks), (slots_of(len(chunks)),))

    def write(self, rows: list[bytes]) -> int:
        """The reservation of ``rows``; 0 if there are none."""
        number = self._number() if rows else 0
        if rows:
            self.writing[number] = rows
        return number

    def handed_over(self, leases: Sequence[int], reservations: Sequence[int], boot: bytes) -> bool:
        """From now on the ranks settle."""
        if self.deaf:
            return False
        for lease in leases:
            del self.taken[lease]
        assert all(reservation in self.writing for reservation in reservations)
        self.handed += [*leases, *reservations]
        return True

    def report(self, result: LookupResult, boot: bytes) -> None:
        """Keep the result."""
        assert boot == self.boot
        self.results.append(result)

    def report_all(self) -> None:
        """Nothing is kept back."""

    def speed(self, tokens_s: float) -> None:
        """Nothing to tell."""

    def report_shadow(self, report: ShadowReport) -> bool:
        """Keep the report."""
        self.shadow = report
        return self.connected

    def clear(self, timeout_s: float) -> bool:
        """Forget every row, and give back every match."""
        for request in [*self.held]:
            self.give_back(request)
        self.rows.clear()
        return self.connected

    def tell_uncached(self, why: str) -> None:
        self.uncached = why

    def new_generation(self) -> None:
        """The rows held belong to the old namespace."""
        self.generations += 1
        self.rows.clear()
        self.writing = {reservation: [] for reservation in self.writing}

    def commit(self, reservations: Iterable[int]) -> None:
        """As the workers do: the rows of ``reservations`` are held from now on."""
        for reservation in reservations:
            self.rows.update(self.writing.pop(reservation))

    def _number(self) -> int:
        self._next += 1
        return self._next


def split(digests: bytes, width: int) -> list[bytes]:
    """The single hashes of a blob."""
    return [digests[i : i + width] for i in range(0, len(digests), width)]


def slots_of(rows: int) -> Slots:
    """Any slots of so many rows."""
    return Slots(((0,),), b"\0\0" * rows, b"".join(i.to_bytes(4, "little") for i in range(rows)))
