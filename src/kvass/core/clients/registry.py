"""Connections and instances, the checks of a registration, and the digest of a namespace.

Law of this file: the namespace of an instance is the digest of everything that changes the bytes of
its rows (law 10).

Ranks of one instance must agree. A rank that contradicts them is refused, with the name of the
field. A layout is evaluated once, when its rank registers, and it is not kept: an instance may have
128 ranks with thousands of layers each, and the garbage collector would visit all of them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from heapq import nsmallest
from typing import Final

import msgspec

from kvass.core.clients.shadow_figures import ShadowFigures
from kvass.core.clients.traffic import Savings
from kvass.errors import Refused
from kvass.messages import Register
from kvass.types import (
    MAX_GROUPS,
    MAX_RANKS,
    SCHEDULER,
    GroupLayout,
    Limits,
    RankLayout,
    chunk_blocks,
)


class ClientConnection(msgspec.Struct):
    """A connection of a client. ``own``: its user is that of the daemon, or root. ``pid``: 0 if
    unknown. ``start``: when its process started; 0 if unknown. ``ending``: the core has ended it,
    and ignores what it still sends."""

    id: int
    uid: int = 0
    own: bool = False
    pid: int = 0
    start: int = 0
    greeted: bool = False
    ending: bool = False
    wants_arena: bool = False
    features: tuple[str, ...] = ()
    """The protocol features that both sides know."""
    registered: Register | None = None
    """Its ``Register``, without the layout. ``layout`` has the layout's digest."""
    layout: bytes = b""


class Worker(msgspec.Struct, frozen=True):
    """A registered rank. ``layout``: the digest of its layout. ``groups``: its layer groups without
    their layers. These are equal on all ranks. ``shard_bytes``: the padded size of its shard of a
    row, by group."""

    shard: int
    writer: bool
    layout: bytes
    groups: tuple[GroupLayout, ...]
    shard_bytes: tuple[int, ...]
    cache_bytes: int = 0
    """The memory of its own KV cache; 0: it did not tell."""


class Instance(msgspec.Struct):
    """An engine. ``connections``: its live connections by rank; the scheduler's is under
    ``SCHEDULER``."""

    id: str
    terms: Register
    """The ``Register`` of its first connection, with which all its connections must agree."""
    connections: dict[int, int] = {}
    workers: dict[int, Worker] = {}
    generation: bytes = b""
    """The last generation that its scheduler registered (``Register``)."""
    namespace: int | None = None
    """``None`` unless all its ranks are registered."""
    home: int | None = None
    """The last namespace that it had."""
    lookup_tokens: int = 0
    hit_tokens: int = 0
    """Tokens that its lookups asked for, and those that it loaded."""
    failed_loads: int = 0
    saved: Savings = msgspec.field(default_factory=Savings)
    """The time that computing ``hit_tokens`` would have taken."""
    since_s: float = 0.0
    """The time of its first registration."""
    seen_s: float = 0.0
    """The time of its last lookup or registration."""
    shadow: ShadowFigures | None = None
    """The last report of an engine in shadow mode."""

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that are not registered."""
        if len(self.workers) == self.terms.ranks:
            return ()
        return tuple(sorted({*range(self.terms.ranks)}.difference(self.workers)))

    @property
    def writers(self) -> tuple[int, ...]:
        """The registered ranks that write their shard."""
        return tuple(sorted(r for r, w in self.workers.items() if w.writer))

    @property
    def cache_bytes(self) -> int:
        """The memory of its own KV cache, shards that several ranks hold counted once; 0 if no rank
        told."""
        return sum(worker.cache_bytes for worker in self.workers.values() if worker.writer)

    def covers_all_shards(self, ranks: Iterable[int]) -> bool:
        """Whether every shard has exactly one writer among ``ranks``."""
        shards = sorted(self.workers[r].shard for r in ranks)
        return shards == list(range(self.terms.world_size))


class Refusal(msgspec.Struct, frozen=True):
    """Why an engine was refused when it registered, and when."""

    when: float
    text: str


class RowClassSpec(msgspec.Struct, frozen=True):
    """What all rows of one (namespace, group) have in common.

    ``layout``: the layer group without its layers. ``shard_bytes``: the padded bytes of each shard
    of a slot. ``chunk_blocks``: the number of blocks of a chunk if a hit may end at any block; 0 if
    a hit ends at the end of a chunk only.
    """

    group: int
    layout: GroupLayout
    shard_bytes: tuple[int, ...]
    chunk_blocks: int = 0

    @property
    def row_bytes(self) -> int:
        return sum(self.shard_bytes)


MAX_GENERATION: Final = 64
_MODEL_CHARS: Final = 256
"""The most characters of a model's name that are shown. Statuses and labels repeat it."""


def model_of(terms: Register) -> str:
    """The name of an engine's model, for display."""
    return (terms.model or terms.identity.get("model", ""))[:_MODEL_CHARS]


def check_register(msg: Register, layout: RankLayout | None, limits: Limits) -> None:
    """Check the fields of a ``Register``. ``check_agrees`` compares it with other ranks.

    ``layout``: its layout, decoded.

    Raises:
        Refused: ``bad_value``, ``bad_rank`` or ``limit``, with the name of the field.
    """
    if not msg.instance or len(msg.instance) > limits.request_id_bytes:
        raise Refused("bad_value", "instance: give a non-empty id of at most 512 characters")
    if len(msg.identity) > limits.identity_fields:
        raise Refused("limit", f"identity: at most {limits.identity_fields} fields")
    texts = sum(len(k) + len(v) for k, v in msg.identity.items())
    if texts + len(msg.model) + len(msg.uncached) > limits.identity_bytes:
        raise Refused("limit", f"identity: at most {limits.identity_bytes} bytes of fields")
    if not 1 <= msg.ranks <= MAX_RANKS:
        raise Refused("bad_rank", f"ranks: {msg.ranks} is not in 1..{MAX_RANKS}")
    if not 1 <= msg.world_size <= msg.ranks:
        raise Refused("bad_value", f"world_size: {msg.world_size} is not in 1..{msg.ranks}")
    if not SCHEDULER <= msg.rank < msg.ranks:
        raise Refused("bad_rank", f"rank: {msg.rank} is outside the world of {msg.ranks}")
    if not 0 <= msg.shard < msg.world_size:
        raise Refused("bad_value", f"shard: {msg.shard} is not in 0..{msg.world_size - 1}")
    if msg.chunk_tokens < 1:
        raise Refused("bad_value", f"chunk_tokens: {msg.chunk_tokens} is not positive")
    if len(msg.generation) > MAX_GENERATION or (msg.generation and msg.rank != SCHEDULER):
        text = f"generation: a scheduler gives one of at most {MAX_GENERATION} bytes, a worker none"
        raise Refused("bad_value", text)
    if (msg.rank == SCHEDULER) != (layout is None):
        raise Refused("bad_value", "layout: every worker gives one and a scheduler none")
    if layout is not None:
        _check_layout(layout, msg.chunk_tokens, limits)


def _check_layout(layout: RankLayout, chunk_tokens: int, limits: Limits) -> None:
    if not 1 <= len(layout.groups) <= MAX_GROUPS:
        many = len(layout.groups)
        raise Refused("bad_value", f"layout: {many} groups, must be 1..{MAX_GROUPS}")
    if (layers := sum(len(g.layers) for g in layout.groups)) > limits.layers:
        raise Refused(
            "limit", f"layout: {layers} layers, there may be {limits.layers} in all groups"
        )
    for i, g in enumerate(layout.groups):
        where = f"layout.groups[{i}]"
        if g.window_tokens < 0 or (g.window_tokens > 0) != g.rules.windowed:
            raise Refused(
                "bad_value", f"{where}.window_tokens: {g.window_tokens} for a {g.kind} group"
            )
        if g.block_tokens < 1 or chunk_tokens % g.block_tokens:
            raise Refused(
                "bad_value",
                f"{where}.block_tokens: {g.block_tokens} does not divide a chunk of {chunk_tokens}",
            )
        if len(g.layers) != len(g.page_bytes) or min(g.page_bytes, default=1) < 1:
            raise Refused("bad_value", f"{where}: one positive page_bytes per layer is needed")
    if not any(g.layers for g in layout.groups):
        raise Refused("bad_value", "layout: no group has a layer")


def layout_digest(layout: RankLayout | None) -> bytes:
    """The SHA-256 of an encoded layout; empty for a scheduler, which has none."""
    return b"" if layout is None else hashlib.sha256(msgspec.msgpack.encode(layout)).digest()


def worker_of(msg: Register, layout: RankLayout, digest: bytes) -> Worker:
    return Worker(
        shard=msg.shard,
        writer=msg.writer,
        layout=digest,
        groups=tuple(
            msgspec.structs.replace(group, layers=(), page_bytes=()) for group in layout.groups
        ),
        shard_bytes=tuple(group.shard_bytes(msg.chunk_tokens) for group in layout.groups),
        cache_bytes=msg.cache_bytes,
    )


_TERMS = ("identity", "chunk_tokens", "ranks", "world_size")


def check_agrees(msg: Register, worker: Worker | None, instance: Instance) -> None:
    """Check that a ``Register`` agrees with its instance. ``worker``: ``None`` for a scheduler.

    Raises:
        Refused: ``contradiction``, with the name of the field and both values.
    """
    for name in _TERMS:
        ours, theirs = getattr(instance.terms, name), getattr(msg, name)
        if isinstance(ours, dict) and ours != theirs:
            name, ours, theirs = _first_difference(ours, theirs)
        if ours != theirs:
            raise Refused("contradiction", f"{name}: {theirs!r}, but its instance said {ours!r}")
    for rank, other in instance.workers.items():
        if worker is None or rank == msg.rank:
            continue
        if worker.groups != other.groups:
            a, b = _shape(worker), _shape(other)
            raise Refused("contradiction", f"layout: groups {a}, but rank {rank} said {b}")
        if worker.shard == other.shard and worker.layout != other.layout:
            raise Refused("contradiction", f"layout: differs from rank {rank}'s of the same shard")
        if worker.shard == other.shard and worker.writer and other.writer:
            raise Refused("contradiction", f"writer: rank {rank} writes shard {msg.shard} already")


def _first_difference(ours: dict[str, str], theirs: dict[str, str]) -> tuple[str, str, str]:
    key = min(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
    return f"identity[{key}]", ours.get(key, "(absent)"), theirs.get(key, "(absent)")


_SHOWN_CHARS: Final = 40
"""The most characters of a field's name or value in ``differences``."""
_SHOWN_FIELDS: Final = 8
"""The most fields in ``differences``."""
_ENGINE_TYPE: Final = "the engine type"


def differences(ours: Register, theirs: Register) -> tuple[str, ...]:
    """The fields in which two ``Register`` differ, for display. Both values are shown if they are
    short. Engines of two types (vLLM, transformers) have other fields, so only that is said."""
    types = [one.identity.get("engine", "").partition(" ")[0] for one in (theirs, ours)]
    if all(types) and types[0] != types[1]:
        return (f"{_ENGINE_TYPE}: {types[0][:_SHOWN_CHARS]}, not {types[1][:_SHOWN_CHARS]}",)
    old, new = (
        terms.identity | {name: str(getattr(terms, name)) for name in _TERMS[1:]}
        for terms in (ours, theirs)
    )
    if theirs.generation:
        new["generation"] = "weights replaced while it ran"
    found = []
    other = (k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    for name in nsmallest(_SHOWN_FIELDS, other):
        a, b = old.get(name, "(absent)"), new.get(name, "(absent)")
        values = f": {b}, not {a}" if max(len(a), len(b)) <= _SHOWN_CHARS else ""
        found.append(f"{name[:_SHOWN_CHARS]}{values}")
    return tuple(found) or ("the layout of the KV cache",)


def distance(found: tuple[str, ...]) -> int:
    """How unlike two ``Register`` are, by their ``differences``. Another type of engine is the
    most."""
    return _SHOWN_FIELDS + 1 if found[0].startswith(_ENGINE_TYPE) else len(found)


def _shape(worker: Worker) -> list[tuple[str, int, int]]:
    return [(g.kind, g.window_tokens, g.block_tokens) for g in worker.groups]


def namespace_digest(instance: Instance) -> bytes:
    """The SHA-256 over the tagged, length-prefixed fields of an instance whose ranks are all
    registered."""
    h = hashlib.sha256()

    def field(tag: str, *values: object) -> None:
        for part in (tag, *map(str, values)):
            raw = part.encode()
            h.update(struct.pack("<I", len(raw)))
            h.update(raw)

    terms = instance.terms
    if instance.generation:
        field("generation", instance.generation.hex())
    field("chunk_tokens", terms.chunk_tokens)
    field("ranks", terms.ranks)
    field("world_size", terms.world_size)
    field("identity", len(terms.identity))
    for key in sorted(terms.identity):
        field("field", key, terms.identity[key])
    for rank in range(terms.ranks):
        worker = instance.workers[rank]
        field("rank", rank, worker.shard, worker.writer, worker.layout.hex())
    return h.digest()


def row_class_specs(instance: Instance) -> list[RowClassSpec]:
    """The row class of each layer group of an instance whose ranks are all registered."""
    terms = instance.terms
    by_shard = {w.shard: w for w in instance.workers.values()}
    holders = [by_shard[s] for s in range(terms.world_size)]
    groups = holders[0].groups
    sizes = zip(*(holder.shard_bytes for holder in holders), strict=True)
    blocks = chunk_blocks(groups, terms.chunk_tokens)
    return [
        RowClassSpec(i, group, shard_bytes, blocks)
        for i, (group, shard_bytes) in enumerate(zip(groups, sizes, strict=True))
    ]
