"""What commands print where standard output and standard error take ASCII alone."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from bench.rows import Rows
from kvass.cli.bench import rig
from kvass.testing.daemon import running_daemon

NAME: Final = "mod\xe8le-\u65e5"
PRINTED: Final = "mod\\xe8le-\\u65e5"
ENV: Final = {"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "1"}


def kvass(*argv: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "kvass", *argv]
    return subprocess.run(command, capture_output=True, env=os.environ | ENV | env, timeout=60)


def test_other_letters_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "MODEL", NAME)
    (folder := tmp_path / NAME).mkdir()
    for name, text in ENV.items():
        monkeypatch.setenv(name, text)
    with running_daemon(folder, "16MiB") as daemon, ExitStack() as ending:
        Rows(daemon.socket, "mine", 64 << 10, ending).find([bytes(rig.WIDTH)])
        for command, status, printed in (
            ("status", 0, PRINTED),
            ("status --json", 0, '"model": "mod\\u00e8le-\\u65e5"'),
            ("explain", 0, PRINTED),
            ("top --times 1", 0, PRINTED),
            (f"clear --model {NAME}", 0, f"cleared 0 rows of {PRINTED}"),
            (f"clear --model {NAME}s", 2, f"no such model; the nearest: {PRINTED}"),
            (f"serve --print-config --record {NAME}", 0, "record: "),
            ("run -- true", 0, f"uses the daemon that is at {tmp_path}/{PRINTED}/"),
        ):
            first, *rest = command.split()
            said = kvass(first, "--socket", daemon.socket, *rest)
            assert said.returncode == status, (command, said.stderr)
            assert printed in (said.stdout + said.stderr).decode("ascii"), command
    flags = ("--socket", f"{folder}/s", "--l1-size", "1MiB")
    started = kvass("run", *flags, "--", "true", PYTHONIOENCODING="latin-1:strict")
    assert f"ready socket={tmp_path}/{PRINTED}/s" in started.stderr.decode("ascii")
