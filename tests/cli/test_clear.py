"""``kvass clear --tier`` against real daemons, and ones that cannot."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.rows import Rows, flushed, tier_status, wait_tier
from kvass.cli.bench.rig import WIDTH
from kvass.cli.main import main
from kvass.testing.daemon import running_daemon

Captured = pytest.CaptureFixture[str]


def test_with_tiers_their_records_go_too(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "disk").mkdir()
    keys = [os.urandom(WIDTH) for _ in range(3)]
    tier = [f"disk:{tmp_path}/disk?capacity=16MiB"]
    with running_daemon(tmp_path, "16MiB", tier=tier) as daemon, ExitStack() as ending:
        rows = Rows(daemon.socket, "mine", 64 << 10, ending)
        for flags, text in ((["--tier"], " and all tiers"), ([], "")):
            before = tier_status(rows.scheduler).get("stored_rows", 0)
            rows.store(keys)
            wait_tier(rows.scheduler, flushed(before + 3), "the flush")
            wait_tier(rows.scheduler, lambda one: one["records"] == 3, "the report")
            assert main(["clear", *flags, "--socket", daemon.socket]) == 0
            assert capsys.readouterr().out == f"cleared 3 rows{text}\n"
            assert rows.find(keys).chunks == 0
            if flags:
                wait_tier(rows.scheduler, lambda one: one["records"] == 0, "the report")
                assert not list((tmp_path / "disk").glob("*.seg"))
        assert list((tmp_path / "disk").glob("*.seg"))


def test_a_daemon_without_tiers_refuses(tmp_path: Path, capsys: Captured) -> None:
    with running_daemon(tmp_path, "16MiB") as daemon:
        assert main(["clear", "--tier", "--socket", daemon.socket]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvass: bad_value: tiers:")


def test_a_tier_that_is_down_leaves_l1_cleared_and_that_is_said(
    tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "disk").mkdir()
    keys = [os.urandom(WIDTH) for _ in range(3)]
    tier = [f"disk:{tmp_path}/disk?capacity=16MiB"]
    with running_daemon(tmp_path, "16MiB", tier=tier) as daemon, ExitStack() as ending:
        rows = Rows(daemon.socket, "mine", 64 << 10, ending)
        rows.store(keys)
        wait_tier(rows.scheduler, flushed(3), "the flush")
        (tmp_path / "disk").rename(tmp_path / "moved")
        assert main(["clear", "--socket", daemon.socket]) == 1
        line = capsys.readouterr().err
        assert line.startswith(
            f"kvass: tier_down: L1 is cleared (3 rows), but not disk:{tmp_path}/disk"
        )
        assert daemon.status()["rows"] == 0
