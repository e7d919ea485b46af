"""``kvass session`` and its path of HTTP against a real daemon with a tier, and an older daemon."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.rows import Rows
from kvass.cli.bench.rig import WIDTH
from kvass.cli.main import main
from kvass.client import connection
from kvass.client.client import Client
from kvass.testing.daemon import running_daemon
from kvass.types import session_tag
from tests.support.waiting import eventually


def test_a_session_is_shown_fetched_and_released(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def session(*words: str) -> tuple[int, str]:
        status = main(["session", *words, "--socket", daemon.socket])
        said = capsys.readouterr()
        return status, (said.out + said.err).strip()

    (tmp_path / "tier").mkdir()
    tiers = [f"disk:{tmp_path / 'tier'}?capacity=64MiB"]
    with running_daemon(tmp_path, "1MiB", tier=tiers) as daemon, ExitStack() as ending:
        rows = Rows(daemon.socket, "mine", 64 << 10, ending)
        mine, others = ([os.urandom(WIDTH) for _ in range(3)] for _ in range(2))
        rows.store(mine, session=session_tag("s"))
        rows.store(others)
        assert eventually(lambda: daemon.status()["tiers"][0]["stored_rows"] == 6)
        whole = "768 of 768 tokens of its last prompt are in L1 (192KiB in L1)"
        assert session("s")[1].endswith(whole)
        with Client(daemon.socket) as client:
            client.clear_tenant("default")
        status, line = session("s")
        assert (status, "0 of 768 tokens" in line, "192KiB in disk:" in line) == (0, True, True)
        assert session("s", "--fetch")[1] == "s: 3 chunks are fetched, as far as tiers have them"
        assert eventually(lambda: "768 of 768 tokens" in session("s")[1])
        assert daemon.status()["rows"] == 3, "what others stored is not fetched"
        assert session("s", "--fetch")[1] == "s: all of its last prompt is in L1"
        assert session("s", "--release") == (0, "s: 3 rows are evicted first")
        for flag in ("--show", "--fetch"):
            unknown = session("s", "--tenant", "t", flag)
            assert unknown == (0, "s: the daemon knows no prompt of it")
        assert session("")[0] == 2
        monkeypatch.setattr(connection, "FEATURES", ())
        for flag, cannot in (("--show", "show or fetch a session"), ("--release", "end a session")):
            status, line = session("s", flag)
            assert (status, line.count("\n"), f"cannot {cannot}" in line) == (1, 0, True)


def test_the_rows_of_a_session_that_was_released_go_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def release(*flags: str) -> str:
        assert main(["session", "s", "--release", *flags, "--socket", daemon.socket]) == 0
        return capsys.readouterr().out

    with running_daemon(tmp_path, "1MiB") as daemon, ExitStack() as ending:
        rows = Rows(daemon.socket, "mine", 64 << 10, ending)
        older, mine, newer = ([os.urandom(WIDTH) for _ in range(4)] for _ in range(3))
        rows.store(older)
        rows.store(mine, session=session_tag("s", "t"))
        rows.store(newer)
        assert release() == "s: 0 rows are evicted first\n"
        assert release("--tenant", "t") == "s: 4 rows are evicted first\n"
        assert daemon.status()["rows"] == 12, "nothing went yet"
        for count in (4, 3):
            rows.store([os.urandom(WIDTH) for _ in range(count)])
        assert [rows.find(keys).chunks for keys in (older, mine, newer)] == [4, 1, 4]
