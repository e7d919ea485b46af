"""A disk tier's write budget: what it counts, how it fills, and what a restart finds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from kvass.folder import Folder
from kvass.tiers.disk import DiskTier
from kvass.tiers.disk.write_budget import WriteBudget
from kvass.tiers.url import open_tier
from kvass.types import PAGE
from tests.tiers.conftest import OpenDisk
from tests.tiers.records import KEYS, fill, hits

HOUR = 3600.0
DAY = 2400
"""A budget of 100 bytes an hour; the bucket holds 600."""
SLOT = 4 * PAGE


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def begin(folder: Path, clock: Clock) -> Callable[[], WriteBudget]:
    """A budget as the next process finds it."""
    return lambda: WriteBudget(Folder(folder), DAY, clock)


def left(budget: WriteBudget) -> int:
    report = budget.report()
    assert report["over_budget"] is (report["write_budget_left_bytes"] <= 0)
    assert report["write_budget_bytes"] == DAY
    number: int = report["write_budget_left_bytes"]
    return number


def test_it_fills_over_hours(begin: Callable[[], WriteBudget], clock: Clock) -> None:
    budget = begin()
    assert left(budget) == 600
    budget.spend(700)
    assert left(budget) == -100
    clock.now += HOUR
    assert left(budget) == 0
    clock.now += 2 * HOUR
    assert left(budget) == 200
    clock.now += 100 * HOUR
    assert left(budget) == 600


def test_what_is_owed_is_bounded(begin: Callable[[], WriteBudget], clock: Clock) -> None:
    budget = begin()
    budget.spend(10**9)
    assert left(budget) == -600
    clock.now += 7 * HOUR
    assert left(budget) == 100


def test_a_clock_that_is_set_back_adds_nothing_and_fills_on(
    begin: Callable[[], WriteBudget], clock: Clock
) -> None:
    budget = begin()
    budget.spend(600)
    clock.now -= 50 * HOUR
    assert left(budget) == 0
    clock.now += HOUR
    assert left(budget) == 100


def test_a_restart_goes_on_where_it_ended(
    begin: Callable[[], WriteBudget], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    budget = begin()
    budget.spend(500)
    budget.save()
    assert left(begin()) == 100
    clock.now += 2 * HOUR
    assert left(begin()) == 300
    assert not caplog.records


def test_it_is_saved_once_a_minute(begin: Callable[[], WriteBudget], clock: Clock) -> None:
    budget = begin()
    budget.spend(500)
    clock.now += 59
    budget.save_if_due()
    assert left(begin()) == 600
    clock.now += 1
    budget.save_if_due()
    assert left(begin()) == 101


@pytest.mark.parametrize("raw", [b"", b"x" * 24, "cut", "flipped", "longer"])
def test_a_damaged_file_is_a_full_bucket_and_a_line(
    begin: Callable[[], WriteBudget], folder: Path, caplog: pytest.LogCaptureFixture, raw: bytes
) -> None:
    budget = begin()
    budget.spend(500)
    budget.save()
    good = (folder / "written").read_bytes()
    damaged = {
        "cut": good[:-1],
        "flipped": good[:-1] + bytes([good[-1] ^ 1]),
        "longer": good + b"x",
    }
    (folder / "written").write_bytes(raw if isinstance(raw, bytes) else damaged[raw])
    assert left(begin()) == 600
    (line,) = caplog.messages
    assert "damaged: the write budget of 2400 a day begins anew" in line


def test_a_save_that_fails_is_a_line(
    begin: Callable[[], WriteBudget], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget = begin()
    (folder / "written").mkdir()
    with caplog.at_level(logging.WARNING):
        budget.save()
    assert "the write budget is not saved" in caplog.text


def test_a_tier_counts_what_it_writes_and_keeps_it(folder: Path) -> None:
    """It stores over its budget, too: the core chooses what it is to store."""
    url = f"disk:{folder}?capacity=16MiB&write=240KiB/day&compress=off"
    tier = open_tier(url)
    assert isinstance(tier, DiskTier)
    before = tier.report()["write_budget_left_bytes"]
    assert before == 60 << 10
    assert all(fill(tier, KEYS[:2]))
    seen = tier.report()
    assert 2 * SLOT <= before - seen["write_budget_left_bytes"] + 100 <= 2 * SLOT + 100
    assert not seen["over_budget"]
    assert all(fill(tier, KEYS[2:4]))
    assert tier.report()["over_budget"]
    tier.close()
    tier = open_tier(url)
    assert isinstance(tier, DiskTier)
    assert tier.report()["over_budget"]
    assert all(hits(tier, KEYS[:4]))
    tier.close()


def test_without_a_budget_nothing_is_kept_or_said(open_disk: OpenDisk, folder: Path) -> None:
    tier = open_disk()
    assert all(fill(tier, KEYS))
    assert "over_budget" not in tier.report()
    tier.close()
    assert not (folder / "written").exists()
