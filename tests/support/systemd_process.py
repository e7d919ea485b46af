"""A real systemd for a test: one of a user, in a mount namespace with a ``/run`` of its own.

Law of this file: it finds no unit but those of the test. The machine's own units would clean
temporary folders and start what the machine's user has.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.support.waiting import eventually

PROGRAM: Final = Path("/lib/systemd/systemd")
_GROUPS: Final = Path("/sys/fs/cgroup")
_BEGIN: Final = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/user/0
for group in $GROUPS_OF_TEST; do mkdir $group; echo $$ > $group/cgroup.procs; done
exec env -i PATH="$PATH" HOME="$HOME_OF_TEST" XDG_RUNTIME_DIR=/run/user/0 SYSTEMD_LOG_TARGET=null \
    SYSTEMD_UNIT_PATH="$HOME_OF_TEST/units" /lib/systemd/systemd --user --unit=test.target
"""
_ALONE: Final = "[Unit]\nDefaultDependencies=no\n"

Systemctl = Callable[..., str]
"""Runs ``systemctl --user``. Returns what it prints."""


def version() -> int:
    said = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout
    return int(said.split()[1])


@contextmanager
def user_manager(folder: Path, unit: str) -> Iterator[Systemctl]:
    """A running systemd with the unit ``kvass.service``. Skips the test where none can run."""
    if os.geteuid() or not PROGRAM.exists() or not shutil.which("unshare"):
        pytest.skip("there is no systemd that this user can start")
    units = folder / "units"
    units.mkdir()
    (units / "test.target").write_text(_ALONE)
    (units / "kvass.service").write_text(_ALONE + unit)
    groups = [_GROUPS / part for part in ("systemd", "unified") if (_GROUPS / part).is_dir()]
    groups = [group / f"kvass-test-{os.getpid()}" for group in groups or [_GROUPS]]
    env = {"HOME_OF_TEST": str(folder), "GROUPS_OF_TEST": " ".join(map(str, groups))}
    with (folder / "systemd.log").open("wb") as log:
        systemd = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", _BEGIN], env=os.environ | env, stderr=log
        )

    def systemctl(*words: str) -> str:
        enter = ["nsenter", "-t", str(systemd.pid), "-m"]
        return subprocess.run(
            [*enter, "env", "XDG_RUNTIME_DIR=/run/user/0", "systemctl", "--user", *words],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()

    def ready() -> bool:
        if systemd.poll() is not None:
            pytest.skip(f"systemd does not run here: {(folder / 'systemd.log').read_text()}")
        return systemctl("show", "-p", "Version") != ""

    try:
        if not eventually(ready, 10):
            pytest.skip("systemd does not answer here")
        yield systemctl
    finally:
        systemd.kill()
        systemd.wait()
        for group in groups:
            for inner, _, _ in os.walk(group, topdown=False):
                eventually(partial(_removed, Path(inner)), 5)


def _removed(group: Path) -> bool:
    """Kill what is left in a control group of the test, and remove the group."""
    try:
        for pid in (group / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        group.rmdir()
    except (OSError, ValueError):
        return not group.is_dir()
    return True
