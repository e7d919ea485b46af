"""The messages of blend: index chunks by their tokens, and find them anywhere in a prompt.

Each function handles one message. It returns the reply. It raises ``Refused`` before it changes
anything. All groups of the namespace must be ``full``: in other groups, a chunk without its prefix
is of no use.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from kvass.blend.match import ChunkMatcher, Chunks
from kvass.core.clients.registry import ClientConnection
from kvass.core.handlers.checks import scheduler_of, split_keys
from kvass.core.matching.coverage import BoolArray
from kvass.core.rows.index import ABSENT, digests_of, key_array
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_table import LOADING
from kvass.core.state import State
from kvass.core.tiers import epochs
from kvass.errors import Refused
from kvass.messages import FindSegments, IndexChunks, Indexed, Segment, Segments
from kvass.types import KEY_WORDS, I64Array, U32Array, U64Array

_WIDEST: Final = 8 * KEY_WORDS
MOST_CHUNKS: Final = 1024
"""The most chunks of a prompt that one search covers. Each chunk that is found takes 1 us."""


def index_chunks(state: State, connection: ClientConnection, msg: IndexChunks) -> Indexed:
    """Index the chunks that have a row in every group."""
    ns = state.namespace_of(scheduler_of(state, connection))
    space = _space(msg.space)
    keys = split_keys(msg.digests, msg.width, 0, state.config.limits)
    tokens = _tokens(state, msg.tokens)
    if len(keys) > (most := state.config.limits.segment_chunks):
        raise Refused("limit", f"digests: index at most {most} chunks at a time")
    if len(msg.predecessor) not in (0, msg.width):
        raise Refused("bad_value", f"predecessor: no digest of width {msg.width}")
    if ns is None:
        return Indexed()
    if len(tokens) != len(keys) * ns.chunk_tokens:
        text = f"{len(tokens)} tokens for {len(keys)} chunks of {ns.chunk_tokens}"
        raise Refused("bad_value", f"tokens: {text}")
    _check_full(ns)
    in_tiers = epochs.in_tiers(state, ns)
    entries = state.followers.segments.begin(ns.id, ns.chunk_tokens, in_tiers)
    if entries is None:
        raise Refused("limit", f"chunks of {ns.chunk_tokens} tokens: other sizes are indexed")
    before = key_array(msg.predecessor.ljust(msg.width, b"\0") + msg.digests, msg.width)[:-1]
    starts = msg.start + ns.chunk_tokens * np.arange(len(keys))
    known = np.all([c.index.find(keys) != ABSENT for c in ns.classes], axis=0)
    chunks = Chunks(tokens.reshape(len(keys), ns.chunk_tokens), keys, before, starts)
    matcher = entries.chunks.matcher
    replaced = matcher.replaced
    state.counters["chunks_indexed"] += entries.chunks.add(entries.number, space, chunks.of(known))
    state.counters["chunks_unindexed"] += matcher.replaced - replaced
    return Indexed(chunks=int(known.sum()))


def find_segments(state: State, connection: ClientConnection, msg: FindSegments) -> Segments:
    """Find indexed chunks in a prompt whose rows are READY, or LOADING, or may be in a tier."""
    ns = state.namespace_of(scheduler_of(state, connection))
    space = _space(msg.space)
    tokens = _tokens(state, msg.tokens)
    split_keys(b"", msg.width, 0, state.config.limits)
    if msg.first > len(tokens):
        raise Refused("bad_value", f"first: {msg.first} is not in 0..{len(tokens)}")
    state.counters["segment_searches"] += 1
    state.counters["segment_search_tokens"] += len(tokens) - msg.first
    entries = None if ns is None else state.followers.segments.of.get(ns.id)
    if ns is None or entries is None:
        return Segments()
    matcher = entries.chunks.matcher
    usable = partial(_usable, state, ns, matcher)
    tokens = tokens[: msg.first + MOST_CHUNKS * ns.chunk_tokens]
    runs = matcher.find(entries.number, space, tokens, msg.first, usable)
    segments, found = [], []
    for new_start, ids in runs:
        if (length := len(ids) * ns.chunk_tokens) >= msg.min_tokens:
            before, old_start = matcher.before[ids[:1]], int(matcher.start[ids[0]])
            predecessor = digests_of(before, msg.width) if before.any() else b""
            segments.append(Segment(new_start, old_start, length, predecessor))
            found += ids
            state.counters["segment_tokens"] += length
    return Segments(segments=tuple(segments), digests=digests_of(matcher.key[found], msg.width))


def _usable(state: State, ns: Namespace, matcher: ChunkMatcher, ids: I64Array) -> BoolArray:
    """Which entries have, in every group, a row that is READY or LOADING or may be in a tier."""
    keys, usable = matcher.key[ids], np.ones(len(ids), np.bool_)
    in_tiers = epochs.in_tiers(state, ns)
    for c in ns.classes:
        rows = c.index.find(keys)
        usable &= state.rows.there(rows, LOADING) | ((rows == ABSENT) & in_tiers)
    return usable


def _space(space: bytes) -> U64Array:
    if len(space) > _WIDEST:
        raise Refused("bad_value", f"space: at most {_WIDEST} bytes, not {len(space)}")
    words: U64Array = key_array(space.ljust(_WIDEST, b"\0"), _WIDEST)[0]
    return words


def _tokens(state: State, tokens: bytes) -> U32Array:
    count, most = len(tokens) // 4, state.config.limits.segment_tokens
    if len(tokens) % 4:
        raise Refused("bad_value", f"tokens: {len(tokens)} bytes are no multiple of 4")
    if count > most:
        raise Refused("limit", f"tokens: at most {most} a message, not {count}")
    return np.frombuffer(tokens, "<u4")


def _check_full(ns: Namespace) -> None:
    for c in ns.classes:
        if not c.spec.layout.rules.whole:
            text = f"segments: group {c.spec.group} is {c.spec.layout.kind}; "
            text += "chunks are reused only where all groups are full"
            raise Refused("bad_value", text)
