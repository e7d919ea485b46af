"""``kvass forget`` against a real daemon, and one that is older."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.rows import Rows
from kvass.cli.bench.rig import WIDTH
from kvass.cli.main import main
from kvass.client import connection
from kvass.testing.daemon import running_daemon
from kvass.types import session_tag


def test_the_rows_of_a_session_that_was_forgotten_go_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(*flags: str) -> tuple[int, str]:
        status = main(["forget", *flags, "--socket", daemon.socket])
        said = capsys.readouterr()
        return status, said.out + said.err

    with running_daemon(tmp_path, "1MiB") as daemon, ExitStack() as ending:
        rows = Rows(daemon.socket, "mine", 64 << 10, ending)
        older, mine, newer = ([os.urandom(WIDTH) for _ in range(4)] for _ in range(3))
        rows.store(older)
        rows.store(mine, session=session_tag("s", "t"))
        rows.store(newer)
        assert forget("--session", "s") == (0, "0 rows of session s are evicted first\n")
        assert forget("--session", "s", "--tenant", "t") == (
            0,
            "4 rows of session s are evicted first\n",
        )
        assert daemon.status()["rows"] == 12, "nothing went yet"
        for count in (4, 3):
            rows.store([os.urandom(WIDTH) for _ in range(count)])
        assert [rows.find(keys).chunks for keys in (older, mine, newer)] == [4, 1, 4]
        assert forget("--session", "")[0] == 2
        monkeypatch.setattr(connection, "FEATURES", ())
        status, line = forget("--session", "s")
        assert (status, line.count("\n"), "cannot end a session" in line) == (1, 1, True)
