"""``kvass clear`` with its options against real daemons, and ones that cannot."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from bench.rows import Rows, flushed, tier_status, wait_tier
from kvass.cli.bench import rig
from kvass.cli.bench.rig import WIDTH
from kvass.cli.main import main
from kvass.client import connection
from kvass.testing.daemon import running_daemon
from tests.support.servers.redis import RedisServer

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


def test_why_a_tier_was_not_emptied_is_said(tmp_path: Path, capsys: Captured) -> None:
    with closing(RedisServer()) as server:
        client: Any = server.client()
        client.execute_command("ACL SETUSER me on >s3cret ~* +@all -scan")
        where = f"redis:{server.address}"
        tier = [f"{where}?username=me&password=s3cret"]
        with running_daemon(tmp_path, "16MiB", tier=tier) as daemon:
            assert main(["clear", "--tier", "--socket", daemon.socket]) == 1
            said = capsys.readouterr().err
            assert f"but not {where} (" in said
            assert "permission" in said
            assert "'scan'" in said
            assert "s3cret" not in said + daemon.log()


def test_only_a_model_or_a_tenant_is_cleared(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that the daemon does not know clears nothing, and neither does an older daemon."""

    def clear(*flags: str) -> tuple[int, str]:
        status = main(["clear", *flags, "--socket", daemon.socket])
        said = capsys.readouterr()
        return status, said.out + said.err

    with running_daemon(tmp_path, "16MiB", quota=["team-a=:0"]) as daemon, ExitStack() as ending:
        for name, model, rows in (("x", "llama", 1), ("y", "llama", 2), ("z", "qwen", 2)):
            monkeypatch.setattr(rig, "MODEL", model)
            keys = [os.urandom(WIDTH) for _ in range(rows)]
            Rows(daemon.socket, name, 64 << 10, ending).store(keys)
        unknown = "kvass: model 'lama': the daemon knows no such model; the nearest: llama\n"
        assert clear("--model", "lama") == (2, unknown)
        unknown = "kvass: tenant 'team-b': the daemon knows no such tenant; the nearest: team-a\n"
        assert clear("--tenant", "team-b") == (2, unknown)
        with monkeypatch.context() as older:
            older.setattr(connection, "FEATURES", ())
            status, text = clear("--tenant", "default")
            assert (status, "cannot clear a tenant; nothing was cleared" in text) == (1, True)
        assert daemon.status()["rows"] == 5
        assert clear("--tenant", "team-a") == (0, "cleared 0 rows of tenant team-a\n")
        assert clear("--model", "llama") == (0, "cleared 3 rows of llama\n")
        assert daemon.status()["rows"] == 2
        assert clear("--tenant", "default") == (0, "cleared 2 rows of tenant default\n")
        status, text = clear("--tier", "--tenant", "default")
        assert (status, "not allowed with" in text) == (2, True)
