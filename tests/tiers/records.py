"""Records that a test stores, and what it asks of their tier later: right, or a miss? Or is it
down, and says so?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest

from kvass.errors import TierDown
from kvass.testing import TierSuite
from kvass.testing.tier_suite import MakeTier, data_of, room_for, same
from kvass.tiers.base import Buffer, ProvingTier, Tier
from kvass.tiers.record_tier import RecordTier

OpenAt = Callable[[str], Tier]
_numbers = count()


class Raw(NamedTuple):
    """``get(prefix, key)`` a record's bytes, ``put(prefix, key, bytes)`` others in its place."""

    get: Callable[[str, bytes], bytes]
    put: Callable[[str, bytes, bytes], object]


HUGE = 32 << 20
"""Bytes of a value that is no record's: many times a batch of those."""
SHAPE = (5000, 4096)
"""Two pages and one, and the header's: slots of 16 KiB."""


def keys_of(count: int, name: str = "key") -> list[bytes]:
    return [b"%s %d" % (name.encode(), i) for i in range(count)]


KEYS = keys_of(10)


def fill(
    tier: Tier, keys: list[bytes], shape: tuple[int, ...] = SHAPE, version: int = 0
) -> list[bool]:
    return tier.store(keys, [data_of(key, shape, version) for key in keys])


def hits(
    tier: Tier, keys: list[bytes], shape: tuple[int, ...] = SHAPE, versions: int = 1
) -> list[bool]:
    """Which are held; every byte that was served is right, or the test fails."""
    into: list[list[Buffer]] = [room_for(shape) for _ in keys]
    which = tier.load(keys, into)
    for key, got, held in zip(keys, into, which, strict=True):
        wanted = (data_of(key, shape, v) for v in range(versions))
        assert not held or any(same(got, want) for want in wanted), f"wrong bytes: {key!r}"
    return which


def down(tier: Tier, at_once: int = 1, probe: bool = True) -> list[str]:
    """What each call says while the server is not there for us, each in a short line.

    ``at_once``: so many are asked together, where each takes long to say so. ``probe``: a probe can
    tell as well.
    """
    asks: list[Callable[[], object]] = [
        *([lambda: tier.probe(KEYS)] if probe else []),
        lambda: hits(tier, KEYS),
        lambda: fill(tier, KEYS),
        lambda: tier.delete(KEYS),
        tier.clear,
        lambda: tier.note("epoch"),
        lambda: tier.set_note("epoch", b"7"),
    ]
    with ThreadPoolExecutor(at_once) as pool:
        return [*pool.map(_why_down, asks)]


def _why_down(ask: Callable[[], object]) -> str:
    with pytest.raises(TierDown) as caught:
        ask()
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 400
    return said


def works(tier: Tier) -> bool:
    """Whether it takes all and gives all back."""
    try:
        return all(fill(tier, KEYS)) and all(hits(tier, KEYS))
    except TierDown:
        return False


@contextmanager
def allocating(most: int) -> Iterator[None]:
    """What runs here makes this process larger by at most so many bytes, also for a moment."""
    status = Path("/proc/self/status")

    def bytes_of(figure: str) -> int:
        [line] = [line for line in status.read_text().splitlines() if line.startswith(figure)]
        return int(line.split()[1]) << 10

    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = bytes_of("VmRSS")
    yield
    grown = bytes_of("VmHWM") - before
    assert grown <= most, f"{grown >> 20} MiB more"


def check_often(tier: Tier) -> None:
    """Write and read the note of checks, as another daemon may do meanwhile."""
    assert isinstance(tier, ProvingTier)
    for _ in range(20):
        tier.check_store(True)


class SharedSuite(TierSuite):
    """Tests of a store that several daemons may use. A subclass has the fixtures ``open_at``, which
    opens the tier of a prefix, and ``raw``, which reads and replaces a record behind its back."""

    prefixes: ClassVar = ("a.b", "axb", "za.b", "a.b2", "a")
    huge: ClassVar = 8 << 20

    @pytest.fixture
    def make_tier(self, open_at: OpenAt) -> MakeTier:
        prefix = f"suite{next(_numbers)}"
        return lambda: open_at(prefix)

    def test_two_daemons_share_what_they_store(self, make_tier: MakeTier) -> None:
        one, other = make_tier(), make_tier()
        assert all(fill(one, KEYS))
        assert all(hits(other, KEYS))
        assert all(fill(other, KEYS, version=1))  # although one has read them
        into = room_for(SHAPE)
        assert one.load(KEYS[:1], [into]) == [True]
        assert same(into, data_of(KEYS[0], SHAPE, 1))
        other.delete(KEYS[:5])
        assert hits(one, KEYS, versions=2) == [False] * 5 + [True] * 5
        one.set_note("epoch", b"7")
        assert other.note("epoch") == b"7"
        one.clear()
        assert not any(other.probe(KEYS))
        assert other.note("epoch") == b"7"
        one.close()
        other.close()

    def test_two_daemons_prove_their_store_at_the_same_time(self, make_tier: MakeTier) -> None:
        tiers = [make_tier(), make_tier()]
        with ThreadPoolExecutor(2) as pool:
            for check in [pool.submit(check_often, tier) for tier in tiers]:
                check.result(timeout=60)
        for tier in tiers:
            tier.close()

    def test_a_clear_leaves_others_alone(self, open_at: OpenAt) -> None:
        tiers = [open_at(prefix) for prefix in self.prefixes]
        for number, tier in enumerate(tiers):
            assert all(fill(tier, KEYS, version=number))
        tiers[0].clear()
        assert not any(tiers[0].probe(KEYS))
        for tier in tiers[1:]:
            assert all(hits(tier, KEYS, versions=5))
        for tier in tiers:
            tier.clear()
            tier.close()

    def test_a_value_of_any_size_costs_no_more_than_a_record(
        self, open_at: OpenAt, raw: Raw
    ) -> None:
        """A stranger's, at the name of a record, and one that begins as a record does."""
        tier = open_at("huge")
        keys, shape = keys_of(24, "huge"), (64 << 10,)
        assert all(fill(tier, keys, shape))
        begins = {keys[3]: b"", keys[7]: raw.get("huge", keys[7])}
        for key, begin in begins.items():
            raw.put("huge", key, begin + bytes(self.huge))
        with allocating(3 * self.huge // 2):
            assert hits(tier, keys, shape) == [key not in begins for key in keys]
        assert isinstance(tier, RecordTier)
        [(reason, count)] = tier.report()["refusals"].items()
        assert count == 2
        assert "longer" in reason or "another size" in reason
        assert tier.probe(keys) == [key not in begins for key in keys], "so it is stored again"
        assert all(fill(tier, keys, shape))
        assert all(hits(tier, keys, shape))
        tier.clear()
        tier.close()

    def test_a_damaged_record_is_a_miss_and_forgotten(self, open_at: OpenAt, raw: Raw) -> None:
        """Any flipped byte and any length: ``test_codec.py``."""
        tier = open_at("damage")
        assert all(fill(tier, KEYS))
        key, right = KEYS[3], raw.get("damage", KEYS[3])
        flipped = [right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :] for at in (0, 60, 5000)]
        cut = [right[:5], right[:-1], right + b"\0"]
        for value in (*flipped, *cut, raw.get("damage", KEYS[4])):
            raw.put("damage", key, value)
            assert hits(tier, KEYS) == [True] * 3 + [False] + [True] * 6
            if len(value) == len(right):  # Mooncake does not say why another size cannot be read
                assert tier.probe(KEYS).count(False) == 1
            assert all(fill(tier, [key]))
            assert raw.get("damage", key) == right
        tier.clear()
        tier.close()
