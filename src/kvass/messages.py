"""All messages between clients and the daemon.

Law of this file: a field is only ever added, with a default; a name is never reused and a default
never changed. So an older peer's message decodes here and ours decodes there: unknown fields are
ignored, and a missing field means its default (docs/compatibility.md; ``tests/golden``).

Encoding: MessagePack maps tagged by ``t``, in the frames of ``wire/framing.py``. A *request* has a
``seq`` > 0 and is answered by exactly one reply with the same ``seq``, an ``Error`` if need be;
``Promoting`` may come before it. A *one-way* message is answered only by an ``Error`` (``seq``
echoed, 0 if none was given). The daemon pushes ``Populated`` with ``seq`` 0.

Order of a connection: ``Hello`` -> ``Welcome``, then ``Register`` -> ``Registered``, then anything.
One that registers no engine, such as a command's, skips ``Register``: it *only looks*.

Deadlines are CLOCK_MONOTONIC seconds. ``boot`` is the 16-byte id of the daemon's run: every message
that names arena memory, a lease or a reservation carries it. ``digests`` are equally wide chunk
hashes, ``width`` bytes each, chunk 0 first. Numbers and lengths have the bounds that the types of
the fields declare (``types.py``); a message outside of them ends the connection (``bad_message``).
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from kvass.types import (
    MAX_GROUPS,
    Count,
    Digests,
    GroupDigests,
    Int32,
    Int64,
    Limits,
    Many64,
    MemoryBytes,
    Name,
    Names,
    Quota,
    RankLayout,
    Ranks,
    Seconds,
    SessionTag,
    ShortBytes,
    Slots,
    Text,
    Timing,
)

PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1
CLEAR_TENANT: Final = "clear_tenant"
PRESENT: Final = "present"
END_SESSION: Final = "end_session"
DRAINED: Final = "drained"
RESULTS: Final = "results"
AHEAD: Final = "ahead"
SESSIONS: Final = "sessions"
FEATURES: Final[tuple[str, ...]] = (
    *("explain", "shadow", CLEAR_TENANT, PRESENT, END_SESSION, DRAINED, RESULTS, AHEAD, SESSIONS),
)
"""Optional abilities, which both sides must name to use one. What needs none belongs to protocol 1.
``explain``: the messages ``LookupNotes`` and ``Explain``. ``shadow``: ``ShadowReport``.
``clear_tenant``: ``ClearTenant``. ``present``: ``Present``. ``end_session``: ``EndSession``.
``drained``: ``Drained``. ``results``: ``RequestContext.reported``. ``ahead``: what ``Prefetch``
says of it. ``sessions``: ``AskSession``.

A name is never used again: ``take_over`` belongs to earlier versions."""


class Message(msgspec.Struct, tag_field="t", kw_only=True, omit_defaults=True):
    """The base class of all messages but ``Lookup``. ``seq`` pairs a reply with its request."""

    seq: Int64 = 0


# ---------------------------------------------------------------- the context of a request


class RequestContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request says of itself, and what its engine knows of it.

    It is made once, where the engine's request enters, and handed on whole. ``Lookup`` and
    ``ReserveItem`` have its fields, so they are contexts, too. A new hint is one more field here;
    only who obeys it reads it.

    ``tenant``: who pays for its rows, and in whose figures its lookups count; empty: the default
    one. ``session``: the tag of the client's session (``types.session_tag``); 0: it is not known.
    ``keep_s``: retain its rows for so many seconds, at most a day; 0: do not. ``then_s``: the
    session's next request comes in about so many seconds, so have its rows in L1 by then; 0: it is
    not known.

    The other fields are of one lookup, and no ``ReserveItem`` says them. ``budget_ms``: how long
    the answer may take; 0: the daemon's ``lookup_budget_ms``. ``prefill_tokens_s``: how many tokens
    the engine computes per second; 0: not known. ``prompt_tokens``, ``local_tokens``: of the
    request, and those of them that the engine's own cache has; for ``Explain`` only. ``if_absent``:
    the reason that the engine knows in case that the match ends at chunk ``absent_chunk`` and the
    daemon knows no other reason: ``other_salt``, ``other_adapter`` or ``engine_busy``.
    ``reported``: the scheduler reports what comes of it (``LookupResult``), so do not count the
    answer. Only to daemons with the feature ``RESULTS``.
    """

    budget_ms: Seconds = 0.0
    prefill_tokens_s: Seconds = 0.0
    tenant: Name = ""
    prompt_tokens: Count = 0
    local_tokens: Count = 0
    if_absent: Name = ""
    absent_chunk: Int32 = 0
    session: SessionTag = 0
    keep_s: Seconds = 0.0
    reported: bool = False
    then_s: Seconds = 0.0


NO_CONTEXT: Final = RequestContext()


def context_of(message: RequestContext) -> RequestContext:
    """The context of a message, without the rest of it. ``msgspec.structs.asdict`` of a context
    makes a message with it."""
    names = RequestContext.__struct_fields__
    return RequestContext(**{name: getattr(message, name) for name in names})


class _WithContext(  # type: ignore[misc]  # the context stays frozen for mypy
    RequestContext, frozen=False, tag_field="t", kw_only=True, omit_defaults=True
):
    """A ``Message`` that has a context. A struct cannot have the fields of two others."""

    seq: Int64 = 0


# ---------------------------------------------------------------- connection


class Hello(Message, tag="hello"):
    """First message of a client. ``clock_s`` is its CLOCK_MONOTONIC when it sent this."""

    protocol_min: Int32 = 1  # a default is what a missing field means, and never changes
    protocol_max: Int32 = 1
    features: Names = ()
    client: Name = ""
    clock_s: Seconds = 0.0
    wants_arena: bool = False


class Welcome(Message, tag="welcome"):
    """Answer to ``Hello``. With ``wants_arena`` the arena's descriptor comes with this frame.

    The client checks that ``clock_s`` lies between the times at which it sent ``Hello`` and
    received this. ``tiers`` is the number of tiers: if there are any, a ``Lookup`` may be answered
    late.
    """

    protocol: int = 1
    features: tuple[str, ...] = ()
    boot: bytes = b""
    version: str = ""
    clock_s: float = 0.0
    arena_bytes: int = 0
    populated_bytes: int = 0
    limits: Limits = Limits()
    timing: Timing = Timing()
    tiers: int = 0


class Register(Message, tag="register"):
    """The registration of a scheduler (``rank`` -1, no layout) or of a worker (its rank and
    layout).

    ``ranks`` is the number of worker processes, ``world_size`` that of distinct shards, ``shard``
    the one this worker holds, ``writer`` whether it is the rank that writes it. ``identity`` are
    the namespace's fields, the same for all connections of an instance. ``model`` is a name for
    people, and no part of the namespace.

    ``generation`` is part of the namespace: empty while the engine has the weights that
    ``identity`` names, a new random token whenever they may have been changed in place. The
    scheduler then sends its ``Register`` again: the instance leaves its namespace for that of the
    new generation, and what it was writing is discarded.

    ``counted``: False for a measurement and for an engine in shadow mode. The figures of models and
    tenants leave out their lookups.

    ``cache_bytes``: the memory of a worker's own KV cache; 0: not told. For advice only.

    ``uncached``: why the engine uses no cache any more, although it is connected. For people only.
    A scheduler that learns it sends its ``Register`` again.
    """

    instance: Name
    identity: Annotated[dict[Text, Text], Meta(max_length=4096)]
    chunk_tokens: Int32
    rank: Int32 = -1
    ranks: Int32 = 1
    world_size: Int32 = 1
    shard: Int32 = 0
    writer: bool = True
    layout: RankLayout | None = None
    generation: ShortBytes = b""
    model: Name = ""
    counted: bool = True
    cache_bytes: MemoryBytes = 0
    uncached: Name = ""


class Registered(Message, tag="registered"):
    """Answer to ``Register``. While ranks are ``missing``, ``namespace`` is empty and every lookup
    is a miss."""

    namespace: bytes = b""
    missing: tuple[int, ...] = ()


# ---------------------------------------------------------------- reading


class Lookup(_WithContext, tag="lookup"):  # type: ignore[misc]  # as there
    """Touch chunks ``[0, first)`` and pin the longest run of READY rows from ``first``.

    ``readers`` are the ranks that will each send one ``Release``; missing means exactly rank 0.
    ``spare`` chunks after the match must be cached too; they are checked but not returned.

    Rows that L1 lacks may be promoted from a tier, and ``tenant`` pays for them. The answer then
    comes after the promotion, or after ``budget_ms`` with the rows that are READY by then. If L1
    has a part of the rows, the budget shrinks to the share of the others, but not below
    ``lookup_budget_ms``. Rows that take longer to load than to compute at ``prefill_tokens_s`` are
    not promoted. ``keep_s`` retains the chunks of the match.

    ``blocks``: hashes of the first blocks of the chunk after ``digests``, fewer than a
    chunk has. If all chunks of ``digests`` match, those blocks that a row of L1 has match too. Only
    where all groups are ``full`` with one block size. ``again``: the lookup of a prompt that was
    looked up just now, with the blocks of the chunk at which that match ended; it is not counted as
    another. ``first_blocks``: hashes of the first blocks of chunk ``first``, which ``digests`` has;
    those of them that some row of L1 has match if no chunk does. ``writing``: wait for rows that
    engines are writing, as for tiers, within the same budget.
    """

    request: Name
    digests: Digests
    width: Int32 = 32
    first: Int32 = 0
    readers: Ranks | None = None
    spare: Int32 = 0
    blocks: Digests = b""
    again: bool = False
    writing: bool = False
    first_blocks: Digests = b""


class Promoting(Message, tag="promoting"):
    """Sent at once for a ``Lookup``, ``Prefetch`` or ``Present`` (same ``seq``) that waits for
    tiers or for engines that store its rows. The answer follows."""


class Prefetch(Message, tag="prefetch"):
    """Promote what a ``Lookup`` of these digests would promote, without a lease.

    ``namespace`` is empty from an engine's scheduler, which means its own. A connection that only
    looks gives the digest of one. ``budget_ms``: how long the answer may take (0: a minute).
    ``first``: rows of the chunks before it are not needed. ``tenant`` pays for the rows. Lookups
    come first: nothing of it is loaded while one waits for the same tier. Without digests it ends
    those of the same asker and request, which are answered. Only daemons with the feature
    ``AHEAD`` do what these four sentences say. ``session``: as of a lookup; 0: it is not known, or
    the engine is older than this field.
    """

    request: Name
    digests: Digests
    width: Int32 = 32
    namespace: ShortBytes = b""
    budget_ms: Seconds = 0.0
    first: Int32 = 0
    tenant: Name = ""
    session: SessionTag = 0


class Prefetched(Message, tag="prefetched"):
    """Answer to ``Prefetch``: the first ``chunks`` chunks of the prompt are in L1 now."""

    chunks: int = 0


class Matched(Message, tag="matched"):
    """Answer to ``Lookup``. ``chunks`` counts from chunk 0: ``chunks == first`` is a miss, and
    ``lease`` is 0.

    ``slots[g]`` are the slots of group ``g``: those of the last ``len(slots[g])`` chunks of
    ``[first, chunks)``, which are the ones that ``GroupLayout.needs`` names. A read counts only if
    it finished before ``deadline_s``, and only by a rank that was registered at ``given_s`` and has
    been since: a rank's EOF settles its leases and reservations, so those slots may belong to
    others by now. ``spare`` repeats that of the lookup.

    ``blocks``: how many of ``Lookup.blocks`` match too. Then ``slots[g]`` have one more row, of
    which only the first ``blocks`` blocks may be read, and there is a lease even if ``chunks`` is
    ``first``.

    ``why``: why no more matched; empty if all did, or to a lookup ``again``. docs/explain.md has
    the reasons. ``kept``: how many first chunks of the prompt are retained (``keep_s``).
    ``tiers``: how many tokens of the match each tier loaded for it; empty: none did.

    ``whole``: how many first chunks have the rows of all groups of which a hit needs all. If there
    are more than ``chunks``, windows are missing at its end; 0: the daemon is older than this
    field, or no group has windows.
    """

    boot: bytes = b""
    lease: int = 0
    first: int = 0
    chunks: int = 0
    given_s: float = 0.0
    deadline_s: float = 0.0
    slots: tuple[Slots, ...] = ()
    spare: int = 0
    blocks: int = 0
    why: str = ""
    kept: int = 0
    tiers: tuple[int, ...] = ()
    whole: int = 0


class LookupNote(msgspec.Struct, omit_defaults=True):
    """What an engine tells of a request's lookup that the daemon cannot know. ``when_s``: when it
    ended (CLOCK_MONOTONIC). ``prompt_tokens``, ``local_tokens`` as in ``RequestContext``. ``why``:
    the reason, as ``Matched.why``. ``detail``: more about the reason."""

    request: Name
    why: Name
    when_s: Seconds = 0.0
    prompt_tokens: Count = 0
    local_tokens: Count = 0
    detail: Name = ""


MOST_NOTES: Final = 256


class LookupNotes(Message, tag="lookup_notes"):
    """One-way, from a scheduler: lookups that the daemon did not answer, or whose answer the engine
    could not use. Feature ``explain``."""

    boot: ShortBytes
    notes: Annotated[tuple[LookupNote, ...], Meta(max_length=MOST_NOTES)] = ()


class Release(Message, tag="release"):
    """One-way: ``rank`` has read the lease's rows. -1: the scheduler gives back a lease that it did
    not hand over."""

    boot: ShortBytes
    lease: Int64
    rank: Int32 = -1


# ---------------------------------------------------------------- segments


class IndexChunks(Message, tag="index_chunks"):
    """Index chunks by their tokens, so that ``FindSegments`` finds them anywhere in a prompt.

    The exact KV of the chunks is stored under ``digests``, or is being stored. Chunks without a row
    are left out, so index chunks that a ``Reserve`` has just granted or a ``Lookup`` has just hit.
    A chunk may be indexed again. ``space``: at most 32 bytes that stand for all that must be alike
    beside the namespace, such as a salt or an adapter. ``tokens``: those of the chunks, uint32,
    little endian. ``start``: the position of the first one. ``predecessor``: the digest of the
    chunk before, empty at position 0. Refused in a namespace with groups that are not ``full``.
    """

    space: ShortBytes
    digests: Digests
    tokens: Digests
    width: Int32 = 32
    start: Count = 0
    predecessor: ShortBytes = b""


class Indexed(Message, tag="indexed"):
    """Answer to ``IndexChunks``: how many of the chunks are in the index now."""

    chunks: int = 0


class FindSegments(Message, tag="find_segments"):
    """Find indexed chunks of ``space`` in a prompt's ``tokens`` (uint32, little endian) from token
    ``first`` on. Segments of fewer than ``min_tokens`` tokens are left out. The tokens of
    1,024 chunks are searched at most.

    Nothing is pinned: name the digests in a ``Lookup``, each once, after those of the exact prefix.
    """

    space: ShortBytes
    tokens: Digests
    width: Int32 = 32
    first: Count = 0
    min_tokens: Count = 0


class Segment(msgspec.Struct, omit_defaults=True):
    """Tokens ``[new_start, new_start + length)`` of the prompt are those of whole chunks that were
    stored one after the other from position ``old_start`` on. ``predecessor``: the digest of the
    chunk before them then, empty at position 0."""

    new_start: int = 0
    old_start: int = 0
    length: int = 0
    predecessor: bytes = b""


class Segments(Message, tag="segments"):
    """Answer to ``FindSegments``: disjoint segments in ascending order. ``digests``: those of their
    chunks, in the same order. A chunk may be found several times."""

    segments: tuple[Segment, ...] = ()
    digests: bytes = b""


# ---------------------------------------------------------------- writing


class ReserveItem(RequestContext, frozen=False):  # type: ignore[misc]  # as ``_WithContext``
    """Chunks ``[first, n)`` of one request to be stored; ``[0, first)`` are touched.

    ``groups`` is a bit mask of the groups whose rows are wanted. Every rank that registered as a
    writer will send one ``Commit``. ``keep_s`` retains all chunks of the item that have rows.

    ``blocks``: the block hashes of chunks ``[first, n)``, and those of the first blocks of chunk
    ``n`` if these are to be stored as a *tail*. The tail is chunk ``n`` of the grant, unless a row
    already has these blocks. Ignored where hits end with a chunk (``Lookup.blocks``).
    """

    request: Name
    digests: Digests
    first: Int32 = 0
    groups: Int64 = 1
    blocks: Digests = b""


class Reserve(Message, tag="reserve"):
    """Ask for slots for all chunks that become storable in one scheduler step."""

    items: Annotated[list[ReserveItem], Meta(max_length=1024)]
    width: Int32 = 32


class Grant(msgspec.Struct, omit_defaults=True):
    """The slots granted for one item. ``chunks``: the indices of the granted chunks,
    counted from the prompt's beginning.

    Rows that exist, are being written or were refused are not in it. ``reservation`` 0: no row was
    granted.
    ``slots[i]`` belongs to the i-th group named in the item's mask: one row for each of
    ``chunks``, or of ``which[i]`` if the groups differ.

    ``later``: the first chunk that was not decided, because that would have taken too long; -1: all
    were. Reserve the item again with this as its ``first``.

    ``refused``: the chunks for which there was no room, or which exceed the instance's share. All
    other chunks that were decided exist or are being written. If there was no room for any chunk,
    those after the last of ``refused`` were not decided. None: the daemon is older than this field.

    ``kept``: how many first chunks are retained (``keep_s``).

    ``error``: why the daemon refused the item, and always will; empty if it did not. Nothing of
    such an item was decided.
    """

    reservation: int = 0
    chunks: tuple[int, ...] = ()
    slots: tuple[Slots, ...] = ()
    which: tuple[tuple[int, ...], ...] = ()
    later: int = -1
    refused: tuple[int, ...] | None = None
    kept: int = 0
    error: str = ""

    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The granted chunks of each group of the mask, parallel to ``slots``."""
        return self.which or (self.chunks,) * len(self.slots)


class Granted(Message, tag="granted"):
    """Answer to ``Reserve``. ``grants`` is parallel to its items. Commits after ``deadline_s``
    publish nothing.

    ``given_s`` as in ``Matched``: a rank that registered later must not write.
    """

    boot: bytes = b""
    given_s: float = 0.0
    deadline_s: float = 0.0
    grants: list[Grant] = []


class Commit(Message, tag="commit"):
    """One-way: ``rank`` has written its shard of every row of the reservation."""

    boot: ShortBytes
    reservation: Int64
    rank: Int32 = 0


class Abort(Message, tag="abort"):
    """One-way: ``rank`` does not write, or no longer. -1: the scheduler, before ``HandedOver``."""

    boot: ShortBytes
    reservation: Int64
    rank: Int32 = -1


class LookupResult(msgspec.Struct, omit_defaults=True):
    """What came of a request's lookup, once the request got blocks and its load, if there was one,
    has ended. Repeats of the lookup before that are part of it.

    ``lookup_tokens``: tokens that were looked up. ``hit_tokens``: those of them that were loaded.
    ``failed``: a load of them failed. ``tenant``: the request's. ``why``: why no more were
    loaded, as ``Matched.why``. ``tiers``: as in ``Matched``. ``answer_tokens``: if its prompt goes
    on from an earlier request, the tokens of that one's answer; ``repeated_tokens``: those of them
    with which it goes on.
    """

    request: Name
    lookup_tokens: Count = 0
    hit_tokens: Count = 0
    failed: bool = False
    tenant: Name = ""
    why: Name = ""
    tiers: Annotated[tuple[Count, ...], Meta(max_length=256)] = ()
    answer_tokens: Count = 0
    repeated_tokens: Count = 0


MOST_RESULTS: Final = 256


class HandedOver(Message, tag="handed_over"):
    """One-way, from the scheduler: from now on only the ranks settle these leases and
    reservations.

    ``results``: of lookups that were ``reported``; each is sent once. ``prefill_tokens_s``: as in
    ``RequestContext``.
    """

    boot: ShortBytes
    leases: Many64 = ()
    reservations: Many64 = ()
    results: Annotated[tuple[LookupResult, ...], Meta(max_length=MOST_RESULTS)] = ()
    prefill_tokens_s: Seconds = 0.0


class Drained(Message, tag="drained"):
    """One-way, from a worker after its registration: it has no copy to or from the arena of a boot
    before ``boot`` under way any more."""

    boot: ShortBytes


# ---------------------------------------------------------------- shadow mode


class ShadowGroup(msgspec.Struct, omit_defaults=True):
    """What shadow mode found in one layer group. Of ``rows`` rows, ``differing_rows`` were not
    equal to the last bit. ``wrong_rows``: those of them with a difference as large as the values
    themselves. ``largest_difference``: between a loaded value and the computed one, whose magnitude
    is ``at_value``. ``not_compared``: loads in which this group could not be compared."""

    rows: Count = 0
    bytes: Count = 0
    differing_rows: Count = 0
    largest_difference: Seconds = 0.0
    at_value: Seconds = 0.0
    not_compared: Count = 0
    wrong_rows: Count = 0


class ShadowReport(Message, tag="shadow_report"):
    """One-way, from the scheduler of an engine in shadow mode: its figures since its start.

    ``sampled``: the share of hits that it loads and compares. ``saved_s``: how long it took to
    compute ``hit_tokens``, the tokens that it would have loaded of ``lookup_tokens``. ``loads``,
    ``load_bytes`` and ``load_s``: those of all ranks. ``not_compared``: sampled hits that were not
    loaded. ``groups``: by layer group.
    """

    boot: ShortBytes = b""
    sampled: Seconds = 0.0
    lookups: Count = 0
    lookup_tokens: Count = 0
    hit_tokens: Count = 0
    saved_s: Seconds = 0.0
    loads: Count = 0
    load_bytes: Count = 0
    load_s: Seconds = 0.0
    not_compared: Count = 0
    groups: Annotated[tuple[ShadowGroup, ...], Meta(max_length=MAX_GROUPS)] = ()


# ---------------------------------------------------------------- looking, clearing


class Ping(Message, tag="ping"):
    """A request that is answered after all earlier messages of this connection were carried out."""


class Pong(Message, tag="pong"):
    """The answer to ``Ping``."""


class Clear(Message, tag="clear"):
    """Forget a namespace (its digest), or this connection's own (empty), or all (``everything``).

    With ``tiers`` (and ``everything``) the tiers are emptied too. Answered once every tier has
    taken note, so that nothing of before matches again, even after a restart. If a tier cannot, the
    answer is an ``Error`` with the code ``tier_down``: send it again.
    """

    namespace: ShortBytes = b""
    everything: bool = False
    tiers: bool = False


class ClearTenant(Message, tag="clear_tenant"):
    """Forget the rows of L1 that a tenant pays for. Only for connections that only look, and
    only to daemons with the feature ``CLEAR_TENANT``. Answered by ``Cleared``.

    Tiers keep the tenant's records: a later lookup may load them again.
    """

    tenant: Name


class Cleared(Message, tag="cleared"):
    """Answer to ``Clear``, ``ClearTenant`` and ``EmptyTier``: how many rows stopped matching."""

    rows: int = 0


class EmptyTier(Message, tag="empty_tier"):
    """Forget all records of the tier of this name, and nothing else. Only for connections that only
    look. Answered by ``Cleared``, or by an ``Error`` with the code ``tier_down``: send it again."""

    tier: Name


class SetQuota(Message, tag="set_quota"):
    """Set a tenant's quota, or with ``remove`` remove it. Only for the daemon's own user, in a
    connection that only looks."""

    quota: Quota
    remove: bool = False


class QuotaSet(Message, tag="quota_set"):
    """The answer to ``SetQuota``."""


class EndSession(Message, tag="end_session"):
    """The client's session with the tag ``session`` ended. The rows that its requests stored and no
    other session used are the next to be evicted, and are not queued for tiers any more. They
    match until then. ``tenant``: who pays for them. A later ``Lookup`` of the
    session revokes it for the rows that it uses. Feature ``END_SESSION``."""

    session: SessionTag
    tenant: Name = ""


class SessionEnded(Message, tag="session_ended"):
    """Answer to ``EndSession``, when all its rows are among those that are evicted next: how many
    rows these are. 0, too, if the session had ended already."""

    rows: int = 0


class AskSession(Message, tag="ask_session"):
    """Where are the rows of the last prompt of the client's session with the tag ``session``, whose
    rows ``tenant`` pays for? Answered by ``SessionIs``, as late as tiers answer. Feature
    ``SESSIONS``.

    ``fetch``: load from tiers what L1 lacks of it, in each namespace that the session used. It is
    answered when that begins, and tiers are not asked for the answer. Lookups come first, as they
    do with ``Prefetch``.

    ``keys``: say what is needed to read its rows, too. Whoever may connect may read, so that is no
    secret. An older daemon does not say it."""

    session: SessionTag
    tenant: Name = ""
    fetch: bool = False
    keys: bool = False


class EngineIs(msgspec.Struct, omit_defaults=True):
    """How all connections of an engine of a namespace register: see ``Register``. By rank:
    ``shards``, and ``which`` of ``layouts`` it has. ``writers``: the ranks that write. ``layouts``:
    each is a ``RankLayout`` in MessagePack."""

    model: Name = ""
    identity: Annotated[dict[Text, Text], Meta(max_length=4096)] = {}
    chunk_tokens: Int32 = 0
    world_size: Int32 = 1
    shards: Ranks = ()
    writers: Ranks = ()
    which: Ranks = ()
    layouts: Annotated[tuple[bytes, ...], Meta(max_length=128)] = ()


class SessionIs(Message, tag="session_is"):
    """Answer to ``AskSession``, about the namespace that the session used last. ``model``: of its
    engine.

    ``chunks``: of its last prompt; 0: no such session is known. ``hit_chunks``: the hit that a
    lookup of it has in L1. ``l1_bytes``, ``loading_bytes``: of its rows that L1 has, and that come
    from tiers now. ``tier_bytes``: those that L1 has not yet, by the name of the first tier that
    has them. ``fetching``: how many fetches of the session go on.

    With ``AskSession.keys``: ``namespace`` is its digest, ``digests`` are the prompt's, 32 bytes
    each. ``engine``: None if the daemon does not know any more how its engines register, or if the
    namespace is that of one generation."""

    model: str = ""
    chunk_tokens: int = 0
    chunks: int = 0
    hit_chunks: int = 0
    l1_bytes: int = 0
    loading_bytes: int = 0
    tier_bytes: dict[str, int] = {}
    fetching: int = 0
    namespace: bytes = b""
    digests: bytes = b""
    engine: EngineIs | None = None


class Removals(Message, tag="removals"):
    """A scheduler's question: which rows of its namespace left L1 since ``since``, and which of the
    digests in ``present`` (by group) are in L1? ``since``: the last answer's ``upto``; 0: none yet.

    The daemon notes what leaves from the first such message of a connection on.
    """

    since: Int64 = 0
    width: Int32 = 32
    present: GroupDigests = ()


class Removed(Message, tag="removed"):
    """Answer to ``Removals``. ``removed``: digests by group, of the asked width. Their number is
    limited, so ``upto`` may not be the end. ``present`` is as of ``upto``: a byte, 0 or 1, for each
    digest asked for; empty if ``upto`` is not the end.

    ``lost``: some removals are not known any more. The scheduler then asks for each row it knows.
    """

    upto: int = 0
    lost: bool = False
    removed: tuple[bytes, ...] = ()
    present: tuple[bytes, ...] = ()


class Present(Message, tag="present"):
    """A scheduler's question: which of ``digests`` have a row in every group of its namespace, in
    L1 or, with ``tiers``, in L1 or a tier? Nothing is pinned, loaded or marked as used. Answered by
    ``Presence``; with ``tiers`` as late as they answer. ``groups``: a bit for each group that the
    question is about; 0: all. Feature ``PRESENT``."""

    digests: Digests
    width: Int32 = 32
    tiers: bool = False
    groups: Int64 = 0


class Presence(Message, tag="presence"):
    """Answer to ``Present``. ``held``: a byte, 0 or 1, for each digest."""

    held: bytes = b""


class Status(Message, tag="status"):
    """Ask for the counters and gauges of ``kvass status``. ``terms_of``: digests of namespaces of
    which the answer has all fields; an older daemon gives none."""

    terms_of: Annotated[tuple[ShortBytes, ...], Meta(max_length=16)] = ()


class StatusReply(Message, tag="status_reply"):
    """Answer to ``Status``. ``fields``: what ``kvass status --json`` prints, JSON-able."""

    fields: dict[str, Any] = {}


MOST_EXPLAINED: Final = 256


class Explain(Message, tag="explain"):
    """Ask for the last ``limit`` lookups (at most ``MOST_EXPLAINED``), and why they did not match
    more. Feature ``explain``.

    ``engine``: the beginning of an instance's id, or a part of a model's name. ``request``: a part
    of a request's id. Empty: of all."""

    engine: Name = ""
    request: Name = ""
    limit: Int32 = 20


class Explained(Message, tag="explained"):
    """Answer to ``Explain``, the oldest first. Each has JSON-able fields (docs/explain.md)."""

    lookups: tuple[dict[str, Any], ...] = ()


class Populated(Message, tag="populated"):
    """Pushed to those that mapped the arena: the daemon has faulted in its first ``bytes``."""

    bytes: int = 0


class Error(Message, tag="error"):
    """A refusal. ``fatal``: this connection ends after it. ``code`` is an ``ErrorCode``, or one
    that only a newer daemon knows."""

    code: str
    text: str = ""
    fatal: bool = False


Request = (
    Hello
    | Register
    | Lookup
    | Prefetch
    | IndexChunks
    | FindSegments
    | Reserve
    | Ping
    | Clear
    | ClearTenant
    | EmptyTier
    | SetQuota
    | EndSession
    | AskSession
    | Removals
    | Present
    | Status
    | Explain
)
OneWay = Release | Commit | Abort | HandedOver | Drained | LookupNotes | ShadowReport
FromClient = Request | OneWay
FromDaemon = (
    Welcome
    | Registered
    | Matched
    | Promoting
    | Prefetched
    | Indexed
    | Segments
    | Granted
    | Pong
    | Cleared
    | QuotaSet
    | SessionEnded
    | SessionIs
    | Removed
    | Presence
    | StatusReply
    | Explained
    | Populated
    | Error
)
AnyMessage = FromClient | FromDaemon
