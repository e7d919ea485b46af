"""Daemons of tests, forked from a process that has imported kvass."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvass.testing.daemon import KVASS, Daemon
from tests.support.template import Template


def fork_daemons(folder: Path) -> None:
    """From now on. ``folder``: of the template's socket."""
    without = {"LD_PRELOAD"}
    environment = {name: value for name, value in os.environ.items() if name not in without}
    template = Template(folder / "kvass.sock", environment, "kvass.cli.main", "kvass.daemon.main")

    def started(command: Sequence[str], *, env: dict[str, str], stderr: Any, **more: Any) -> Any:
        if tuple(command[1:3]) != KVASS:
            return subprocess.Popen(command, env=env, stderr=stderr, **more)
        env = {"OPENBLAS_NUM_THREADS": "1", **env}  # kvass set it when the template imported it
        forked: Any = template.fork(command[2:], env, stderr.fileno())
        forked.stdin.close()
        forked.stdout = io.TextIOWrapper(forked.stdout)
        return forked

    Daemon.popen = staticmethod(started)
