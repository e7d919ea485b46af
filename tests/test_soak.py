"""``make soak``: five minutes' mischief in half a one, and that it notices what it is there for."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvass.tiers.disk.segment import SEGMENT
from tests.support.soak.__main__ import GAP_S, plan, soak
from tests.support.soak.record import MAY_GROW, compressed, growth, process_figures, stores
from tests.support.soak.world import EARLY, MISCHIEF, World

SEED = 7
SECONDS = 30.0
GAP = 0.35
LEAKY = """
import os
from kvass.cli.main import main
from kvass.daemon.connection import Connection
close = Connection.close_now
def close_now(self):
    os.dup(2)
    close(self)
Connection.close_now = close_now
raise SystemExit(main())
"""
"""A daemon that leaves a descriptor open at the end of each session."""


def red(checks: list[Any]) -> list[str]:
    return [check.what for check in checks if not check.ok]


def test_as_much_mischief_as_five_minutes_have_is_clean(tmp_path: Path) -> None:
    """That many requests are two minutes' of a soak."""
    assert red(soak(SEED, SECONDS, tmp_path, rate=15, gap=GAP)) == []
    assert (tmp_path / "soak.html").read_text().count("<svg") == 8
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) > 20
    for process in ("engine 0", "daemon", "disk tier"):
        seen = [sample[process] for sample in samples if process in sample]
        assert any(figures.keys() >= MAY_GROW.keys() for figures in seen), process
    begun = re.findall(r" for \d", (tmp_path / "events.txt").read_text())
    assert len(begun) >= 300 / GAP_S


def corrupted(world: World, _: int) -> Iterator[None]:
    """One byte of each 32 KiB of the daemon's arena, once there are hits."""
    if sum(engine.total["hit"] for engine in world.engines) < 200:
        return
    for fd in Path(f"/proc/{world.daemon.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # a session ended meanwhile
            if "memfd" in os.readlink(fd):
                np.memmap(fd, np.uint8, "r+")[:: 32 << 10] ^= 1
    yield


def test_a_wrong_byte_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mischief = {f"corrupted {n}": ("", corrupted) for n in range(30)}
    checks = soak(SEED, 20, tmp_path, rate=20, mischief=mischief)
    assert "WRONG BYTES" in "".join(red(checks))
    said = capsys.readouterr().out
    assert f"seed {SEED}" in said
    assert "corrupted" in said


def test_a_leaked_descriptor_is_noticed(tmp_path: Path) -> None:
    mischief = {"engine killed": MISCHIEF["engine killed"]}
    checks = soak(SEED, 1, tmp_path, mischief=mischief, program=("-c", LEAKY))
    assert "descriptors and threads" in "".join(red(checks))


def test_a_daemon_that_ends_by_itself_ends_the_run(tmp_path: Path) -> None:
    def ended(world: World, _: int) -> Iterator[None]:
        os.kill(world.daemon.pid, signal.SIGKILL)
        yield

    checks = soak(SEED, 60, tmp_path, mischief={"ended": ("", ended)})
    assert "the daemon ended" in "".join(red(checks))


def life(pid: int, **figures: list[int]) -> list[dict[str, Any]]:
    rows = zip(*(figures.get(name, [9] * 100) for name in MAY_GROW), strict=True)
    return [
        {"s": 2.0 * n, "daemon": {"pid": pid, **dict(zip(MAY_GROW, row, strict=True))}}
        for n, row in enumerate(rows)
    ]


def test_growth_is_that_of_the_process_that_is_there_at_the_end() -> None:
    young = [5] * 25
    assert red(growth(life(1))) == []
    before = life(1, descriptors=[200] * 100)
    for name, much in MAY_GROW.items():
        for more, wrong in ((much, 0), (much + 1, 1)):
            values = [*young, *([9] * 25), *([9] * 25), *([9 + more] * 25)]
            assert len(red(growth([*before, *life(2, **{name: values})]))) == wrong


def test_one_descriptor_of_each_segment_does_not_count(tmp_path: Path) -> None:
    def used() -> int:
        return int(process_figures(os.getpid(), tmp_path)["descriptors"])

    segment = tmp_path / "disk" / f"00000001{SEGMENT}"
    segment.parent.mkdir()
    before = used()
    with segment.open("wb"):
        assert used() == before
        with segment.open("rb"):
            assert used() == before + 1
        segment.unlink()
        assert used() == before + 1


def test_a_seed_is_a_plan_and_some_mischief_is_early() -> None:
    planned = list(plan(SEED, 600, MISCHIEF))
    assert planned == list(plan(SEED, 600, MISCHIEF))
    assert planned != list(plan(SEED + 1, 600, MISCHIEF))
    counted = Counter(one.what for one in planned)
    assert counted.keys() == MISCHIEF.keys()
    assert min(counted.values()) >= 3
    assert all(one.at_s < 600 / 4 + 60 for one in planned if one.what in EARLY)


@pytest.mark.slow
def test_stores_that_lie_cost_no_right_byte(tmp_path: Path) -> None:
    """Too short for S3 to be down each time: one that is a portal for long enough is noticed."""
    assert red(soak(SEED, 20, tmp_path, rate=2, gap=4, stores=True)) == []


def test_a_tier_that_compresses_nothing_is_noticed() -> None:
    before = [{}, {"compressed": {"disk": 5, "redis": 0}}, {"compressed": {"disk": 1}}]
    assert red(compressed(before)) == ["records compressed by redis, in one boot: 0"]
    assert compressed([{}, {"compressed": {}}]) == []


def seen(s: float, doing: str = "", **up: bool) -> dict[str, Any]:
    return {"s": s, "doing": [doing], "up": up, "tiers": {"redis": s, "s3": s}}


def test_a_portal_that_is_taken_for_a_store_is_noticed() -> None:
    quiet = [seen(n, s3=True, redis=True) for n in range(20)]
    portal = [seen(20 + n, "s3 is a portal", s3=n < 2, redis=True) for n in range(5)]
    assert red(stores([*quiet, *portal])) == []
    missed = [seen(20 + n, "s3 is a portal", s3=True, redis=True) for n in range(5)]
    assert red(stores([*quiet, *missed])) == ["S3 was down in 0 of 1 times as a portal"]
    away = [seen(30 + n, s3=True, redis=False) for n in range(12)]
    assert "Redis was down 1 times, at most 11.0 s" in red(stores([*quiet, *away]))
    unused = [{**one, "tiers": {"redis": 0, "s3": one["s"]}} for one in quiet]
    assert "in the last quarter" in "".join(red(stores(unused)))
