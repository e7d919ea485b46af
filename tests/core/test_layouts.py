"""The layouts that the core remembers, and their bounds."""

from __future__ import annotations

import hashlib

import pytest

from kvass.core.clients import layouts
from kvass.core.clients.layouts import ENTRY_BYTES, Layouts, RankOf
from kvass.messages import Register

TERMS = Register(instance="a", identity={"model": "m"}, chunk_tokens=16, ranks=2, world_size=2)


def rank(raw: bytes, shard: int = 0, writer: bool = True) -> RankOf:
    return shard, writer, hashlib.sha256(raw).digest()


def test_an_engine_is_told_as_it_registered() -> None:
    known = Layouts()
    for raw in (b"one", b"two", b"one"):
        known.remember(raw)
    assert (len(known), known.bytes) == (2, 6 + 2 * ENTRY_BYTES)
    ranks = (rank(b"one"), rank(b"one", writer=False), rank(b"two", 1))
    told = known.engine(TERMS, "m", ranks)
    assert told is not None
    assert (told.shards, told.writers, told.which) == ((0, 0, 1), (0, 2), (0, 0, 1))
    assert told.layouts == (b"one", b"two")
    assert known.engine(TERMS, "m", (*ranks, rank(b"three"))) is None
    assert known.engine(TERMS, "m", ()) is None, "no engine has registered in this life"


def test_layouts_are_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "MOST_BYTES", 3 * (1000 + ENTRY_BYTES))
    known = Layouts()
    for byte in (b"a", b"b", b"c", b"a", b"d"):
        known.remember(1000 * byte)
    assert known.bytes == layouts.MOST_BYTES
    gone = [b for b in (b"a", b"b", b"c", b"d") if not known.engine(TERMS, "m", [rank(1000 * b)])]
    assert gone == [b"b"], "that which was registered longest ago"


def test_an_engine_that_would_be_too_long_to_tell_is_not_told() -> None:
    known, half = Layouts(), layouts.ENGINE_BYTES // 2
    many = [half * b"a", half * b"b", b"c"]
    for raw in many:
        known.remember(raw)
    assert known.engine(TERMS, "m", [rank(raw) for raw in many[:2]]) is not None
    assert known.engine(TERMS, "m", [rank(raw) for raw in many]) is None
