"""Rows of a session out of a daemon and into another one, as an engine of their namespace reads and
stores them.

Laws of this file:

- The daemon gives nothing here that it does not give to every engine: it is registered, and what it
  says its fields are must make the very namespace of the rows.
- A row is written to the file only if all of it was read under a lease, by a rank that has been
  registered since (laws 3 and 5).
- A row is published only after the file's reader has checked all of it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Final, NamedTuple, Self

from kvass.client.carried_file import (
    BrokenFile,
    CarryError,
    Reader,
    What,
    Writer,
    registers,
    shard_bytes,
)
from kvass.client.client import Client
from kvass.client.lookups import Match
from kvass.client.pages import PageClient
from kvass.client.worker import ArenaLease
from kvass.messages import Grant, Granted, Registered, RequestContext, SessionIs
from kvass.tiers.base import Shards
from kvass.types import Slots, session_tag

MOST_ENDS: Final = 16
"""At how many ends a hit may be had in the other daemon, if a hit needs windows or states: the last
ones that there are here. Next requests repeat a little less than all, or look at chunks beyond."""
LOOKUP_S: Final = 30.0
"""How long a lookup waits for tiers."""
CONNECT_S: Final = 10.0
BATCH_BYTES: Final = 64 << 20
BATCH_ROWS: Final = 512
TRIES: Final = 20
"""How often nothing can be stored, one time after the other, before that is an error."""
AGAIN_S: Final = 0.1

Place = tuple[int, int]
"""Of a row: its group, and the number of its chunk."""


class Carried(NamedTuple):
    """``hit_chunks``: the hit of the session's prompt, of ``chunks``. ``rows``: how many the file
    has, and ``held``: how many of them the daemon had already."""

    hit_chunks: int
    chunks: int
    chunk_tokens: int
    rows: int
    held: int = 0


class RowClient(PageClient):
    """An engine of the namespace of ``what``. Raises what ``Endpoint.connect`` raises, and
    ``CarryError`` if ``what`` contradicts itself."""

    def __init__(self, socket: str, what: What, daemon_uid: int | None) -> None:
        scheduler, ranks = registers(what.engine, f"carry-{uuid.uuid4().hex}")
        layouts = [rank.layout for rank in ranks if rank.layout is not None]
        self.whole = all(group.rules.whole for layout in layouts for group in layout.groups)
        """Whether a hit needs all rows of all groups."""
        super().__init__(socket, scheduler, ranks, budget_s=LOOKUP_S, daemon_uid=daemon_uid)
        with ExitStack() as failing:
            failing.callback(self.close)
            for each in self._every:
                each.connect(CONNECT_S)
            registered = self._scheduler.call(scheduler, CONNECT_S)
            assert isinstance(registered, Registered)
            if registered.namespace != what.namespace:
                raise CarryError("its fields and its namespace contradict each other")
            self.shard_bytes = shard_bytes(what.engine, ranks)  # which the daemon has checked
            failing.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def views(self, arena: ArenaLease, group: int, slots: Slots, write: bool) -> Iterator[Shards]:
        """The shards of each row, where they lie."""
        sizes = self.shard_bytes[group]
        offsets = [slots.offsets(shard, size).tolist() for shard, size in enumerate(sizes)]
        for row in zip(*offsets, strict=True):
            places = list(zip(row, sizes, strict=True))
            for at, size in places if write else ():
                arena.prepare(at, at + size)
            yield [arena.buffer[at : at + size] for at, size in places]

    def still_there(self, match: Match) -> bool:
        """Whether what was read of the match until now counts."""
        arena = self._rank.arena(match.boot, match.given_s)
        if arena is not None:
            arena.close()
        return arena is not None and time.monotonic() < match.deadline_s


# ---------------------------------------------------------------- out of a daemon


def session_keys(client: Client, session: str, tenant: str) -> What:
    """What is to be carried of a session. Raises ``CarryError``, and what ``ask_session``
    raises."""
    said = client.ask_session(session, tenant, keys=True)
    if not said.chunks:
        raise CarryError(f"session {session!r}: the daemon knows no prompt of it")
    if not said.digests:
        raise CarryError("the daemon is older than this command: restart it")
    shown = client.status(terms_of=[said.namespace.hex()])["namespaces"]
    fields = next((ns for ns in shown if "terms" in ns), None)
    if said.engine is None or fields is None:
        raise CarryError(_unknown(said, bool(fields and fields["private"])))
    return What(session, said.namespace, fields["terms"], said.engine, said.digests)


def _unknown(said: SessionIs, private: bool) -> str:
    name = f"namespace {said.namespace.hex()[:8]}"
    if private:
        return f"{name}: its engine may have replaced weights in place, so nobody shares its rows"
    return (
        f"{name}: the daemon does not know how its engines register; "
        "an engine must have connected since the daemon started"
    )


def promote(client: Client, what: What) -> None:
    """Have rows loaded from tiers, as far as there is room and it makes progress."""
    before = -1
    while (chunks := client.prefetch(what.namespace, what.digests, budget_s=LOOKUP_S)) > before:
        if chunks == len(what.keys):
            break
        before = chunks


def export_rows(rows: RowClient, writer: Writer, what: What) -> Carried:
    """Write the rows that hits of the session's prompt read. Raises ``CarryError``."""
    keys, written = what.keys, set[Place]()
    hit = end = _export_hit(rows, writer, keys, written)
    for _ in range(0 if rows.whole else MOST_ENDS - 1):
        if end <= 1 or not (end := _export_hit(rows, writer, keys[: end - 1], written)):
            break
    if not hit:
        raise CarryError(f"session {what.session!r}: none of its rows can be read any more")
    writer.end()
    return Carried(hit, len(keys), what.engine.chunk_tokens, len(written))


def _export_hit(rows: RowClient, writer: Writer, keys: Sequence[bytes], written: set[Place]) -> int:
    """Write the rows of the longest hit of ``keys`` that are not ``written``. Returns how long it
    is. Takes a new lease where one runs out."""
    chunks = 0
    while True:
        with rows.read(keys, 0, RequestContext(), rows.generation) as given:
            if given is None and not chunks:
                return 0
            if given is None or given[0].chunks < chunks:
                break
            (match, arena), before = given, len(written)
            if _write_match(rows, writer, match, arena, keys, written):
                return match.chunks
        if len(written) == before:
            break
        chunks = match.chunks
    raise CarryError("rows left L1, or leases ended, before they were read: the file is not whole")


def _write_match(
    rows: RowClient,
    writer: Writer,
    match: Match,
    arena: ArenaLease,
    keys: Sequence[bytes],
    written: set[Place],
) -> bool:
    """Write the rows of a match, chunk by chunk. False: its time is over before all are."""
    places = sorted(
        (match.chunks - len(slots) + number, group, number)
        for group, slots in enumerate(match.slots)
        for number in range(len(slots))
    )
    views = [[*rows.views(arena, g, slots, write=False)] for g, slots in enumerate(match.slots)]
    for chunk, group, number in places:
        if (group, chunk) in written:
            continue
        record = writer.row(group, keys[chunk], views[group][number])
        if not rows.still_there(match):
            return False
        writer.put(record)
        written.add((group, chunk))
    return True


# ---------------------------------------------------------------- into a daemon


def import_rows(rows: RowClient, reader: Reader, session: str, tenant: str) -> Carried:
    """Store the rows of a file. ``session``: whose they are here. What was stored stays, also if
    the file turns out to be broken. Raises ``CarryError``."""
    what = reader.what
    keys = what.keys
    if len(keys) * len(rows.shard_bytes) > rows.most_keys:
        raise CarryError(f"{len(keys)} chunks: the daemon finds {rows.most_keys} keys at most")
    context = RequestContext(tenant=tenant, session=session_tag(session, tenant))
    count = stored = size = 0
    batch: dict[Place, Shards] = {}
    try:
        for group, chunk, shards in reader.rows(rows.shard_bytes):
            batch[group, chunk] = shards
            count, size = count + 1, size + sum(map(len, shards))
            if size >= BATCH_BYTES or len(batch) >= BATCH_ROWS:
                stored, size = stored + _store(rows, keys, batch, context), 0
                batch = {}
    except BrokenFile as error:
        _store(rows, keys, batch, context)
        raise CarryError(
            f"{error}; the {count:,} rows before that were right, and are stored"
        ) from error
    stored += _store(rows, keys, batch, context)
    hit = rows.count(keys, 0, context, rows.generation)
    return Carried(hit, len(keys), what.engine.chunk_tokens, count, count - stored)


def _store(
    rows: RowClient, keys: Sequence[bytes], batch: Mapping[Place, Shards], context: RequestContext
) -> int:
    """Store checked rows. Returns how many; the daemon had the others, or is getting them."""
    stored, places = 0, sorted(batch)
    begins = [
        i for i, p in enumerate(places) if not i or p != (*places[i - 1][:1], places[i - 1][1] + 1)
    ]
    for begin, end in pairwise([*begins, len(places)]):
        group, first = places[begin]
        upto = keys[: first + end - begin]
        stored += _store_run(rows, upto, first, group, batch, context)
    return stored


def _store_run(
    rows: RowClient,
    keys: Sequence[bytes],
    first: int,
    group: int,
    batch: Mapping[Place, Shards],
    context: RequestContext,
) -> int:
    """Store the rows of one group of ``keys`` from number ``first`` on. Returns how many."""
    stored, tries = 0, 0
    while first < len(keys):
        end, wrote = first, 0
        given = rows.reserve(keys, first, context, rows.generation, 1 << group)
        if given is not None:
            granted, arena = given
            grant = granted.grants[0]
            if grant.error:
                raise CarryError(f"the daemon refuses the rows: {grant.error}")
            wrote = 0 if arena is None else _write(rows, granted, arena, group, batch)
            decided = len(keys) if grant.later < 0 else grant.later
            end = min((*(grant.refused or ()), decided))
        stored, tries = stored + wrote, 0 if end > first or wrote else tries + 1
        first = end
        if tries:  # what it waits for, such as a flush, takes a little
            if tries > TRIES:
                raise CarryError("the daemon has no room in L1 for more, or does not answer")
            time.sleep(AGAIN_S)
    return stored


def _write(
    rows: RowClient,
    granted: Granted,
    arena: ArenaLease,
    group: int,
    batch: Mapping[Place, Shards],
) -> int:
    """Write the granted rows of a group. Returns how many; all of them can be read now."""
    grant, whole = granted.grants[0], False
    try:
        with arena:
            whole = _copy(rows, arena, group, grant, batch)
    finally:
        whole = rows.end_write(granted, whole)
    if not whole:
        raise CarryError("the daemon did not take the rows in time")
    return len(grant.rows()[0])


def _copy(
    rows: RowClient, arena: ArenaLease, group: int, grant: Grant, batch: Mapping[Place, Shards]
) -> bool:
    views = rows.views(arena, group, grant.slots[0], write=True)
    for chunk, into in zip(grant.rows()[0], views, strict=True):
        for source, target in zip(batch[group, chunk], into, strict=True):
            target[:] = source
    return True
