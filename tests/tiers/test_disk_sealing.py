"""Encrypted records are written part by part: right bytes, padded with zeros, no nonce twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvass.errors import TierDown
from kvass.testing.tier_suite import data_of, fetch, same
from kvass.tiers import encryption, open_tier
from kvass.tiers.base import Tier
from kvass.tiers.codec import decode_header
from kvass.types import PAGE
from tests.tiers.records import fill, hits
from tests.tiers.system_calls import Calls

TURN = 3 * PAGE
LARGE = (5 * PAGE + 1, 7, 3 * PAGE)
"""Four parts; the second one ends in the middle of a shard."""
SHAPES = [
    (1,),
    (PAGE,),
    (2 * PAGE,),
    (2 * PAGE + 1,),
    (PAGE - 16, 17, PAGE),
    (PAGE, PAGE, 1),
    (5 * PAGE,),
    (PAGE + 5, 4 * PAGE - 3, 7 * PAGE),
    LARGE,
]


@pytest.fixture
def tier(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    """An encrypted one. A part has three pages."""
    for module in ("segment", "reading"):
        monkeypatch.setattr(f"kvass.tiers.disk.{module}.IO_BYTES", TURN)
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("11" * 32)
    opened = open_tier(f"disk:{folder}?capacity=4MiB&threads=1&key_file={keys}")
    yield opened
    opened.close()


@pytest.fixture
def nonces(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Those with which records were encrypted."""
    seen: list[bytes] = []
    real: Any = encryption.Encryption.seal

    def seal(self: Any, *about: Any) -> Any:
        closing = real(self, *about)
        seen.append(closing._seal[-12:])
        return closing

    monkeypatch.setattr(encryption.Encryption, "seal", seal)
    return seen


def in_slots(folder: Path) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Each record's lengths, and the bytes from its slot to the segment's end."""
    for path in folder.glob("*.seg"):
        raw = path.read_bytes()
        for at in range(PAGE, len(raw), PAGE):
            if (header := decode_header(raw[at : at + PAGE])) is not None:
                yield header.lengths, raw[at:]


def test_records_of_all_shapes_come_back_and_are_padded_with_zeros(
    tier: Tier, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in buffers in which a longer record was before, and at addresses inside a page."""
    written = Calls(monkeypatch, "pwritev")
    for shape in (LARGE, *SHAPES, *reversed(SHAPES)):
        key = repr(shape).encode()
        data = [b[3:] for b in data_of(key, tuple(n + 3 for n in shape))]
        assert tier.store([key], [data]) == [True]
        assert same(fetch(tier, key, shape) or [], data)
    assert max(written.sizes) == TURN
    padded = 0
    for lengths, raw in in_slots(folder):
        at = PAGE
        for length in lengths:
            padding = raw[at + length : at + length + -length % PAGE]
            assert not any(padding)
            padded += len(padding)
            at += length + len(padding)
    assert padded > 10 * PAGE


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_part_that_is_not_written_ends_the_record_and_its_nonce(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, nonces: list[bytes], nth: int
) -> None:
    assert fill(tier, [b"a"], LARGE) == [True]
    with monkeypatch.context() as patch:
        calls = Calls(patch, "pwritev", nth)
        with pytest.raises(TierDown, match=r"wrote \d+ of"):
            fill(tier, [b"b"], LARGE)
        assert len(calls.sizes) == nth, "nothing is written behind a hole, nor again"
    assert hits(tier, [b"a", b"b"], LARGE) == [True, False]
    assert fill(tier, [b"b"], LARGE) == [True]
    assert hits(tier, [b"a", b"b"], LARGE) == [True, True]
    assert len(nonces) == len(set(nonces)) == 3
