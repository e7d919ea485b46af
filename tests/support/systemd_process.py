"""A real systemd for a test: the first process of namespaces of its own, with its own ``/run``.

Law of this file: it finds no unit but those of the test, and changes nothing of the machine: all
but the folders that it needs is read-only.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.support.waiting import eventually

PROGRAM: Final = Path("/lib/systemd/systemd")
_GROUPS: Final = Path("/sys/fs/cgroup")
ROOT: Final = Path(__file__).parents[2]
USER: Final = 64_300
ENGINE: Final = 64_301
"""The users ``kvass``, of the unit, and ``engine``, a member of its group."""
_UNSHARE: Final = "unshare --mount --pid --fork --kill-child --cgroup --ipc --uts --net"
_BEGIN: Final = """
set -e
for group in $GROUPS_OF_TEST; do mkdir $group; echo $$ > $group/cgroup.procs; done
exec $UNSHARE sh -c "$WITHIN"
"""
_WITHIN: Final = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys
mount -o remount,ro,bind /proc/sys
for name in passwd group; do mount --bind "$FOLDER_OF_TEST/$name" /etc/$name; done
mount -t tmpfs -o mode=755 tmpfs "$FOLDER_OF_TEST/opt"
cd "$FOLDER_OF_TEST/opt"
mkdir -p kvass/bin kvass/python kvass/packages kvass/tree
mount --bind "$BASE" kvass/python
mount --bind "$PACKAGES" kvass/packages
mount --bind "$TREE" kvass/tree
install -m 755 "$FOLDER_OF_TEST/kvass" kvass/bin/kvass
mount --rbind . /opt
cd /
mount -t tmpfs -o mode=755 tmpfs /run
cp -r "$FOLDER_OF_TEST/units" /run/units
for folder in /tmp /var/tmp /var/cache /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs $folder; done
if [ -d /sys/fs/cgroup/systemd ]; then
    umount /sys/fs/cgroup/systemd
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
    if [ -d /sys/fs/cgroup/unified ]; then
        umount /sys/fs/cgroup/unified
        mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
    fi
else
    umount -l /sys/fs/cgroup
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi
mount -o remount,ro,bind /
exec env -i PATH="$PATH" container=test SYSTEMD_UNIT_PATH=/run/units \
    /lib/systemd/systemd --system --unit=test.target --log-target=null
"""
_KVASS: Final = """#!/bin/sh
export PYTHONPATH=/opt/kvass/tree/src:/opt/kvass/tree:/opt/kvass/packages PYTHONDONTWRITEBYTECODE=1
export LD_LIBRARY_PATH=/opt/kvass/python/lib
exec /opt/kvass/python/bin/python{version} -m "${{MODULE:-kvass}}" "$@"
"""
_ALONE: Final = "[Unit]\nDefaultDependencies=no\n"


def _refused() -> str:
    """What ``unshare`` says if the kernel does not permit namespaces; empty if it does."""
    command = [*_UNSHARE.split(), "true"]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    return ran.stderr.strip() if os.strerror(errno.EPERM) in ran.stderr else ""


class Systemd:
    """A running one. ``pid``: its process, as this machine numbers it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def run(self, *command: str, user: int = 0) -> str:
        """Run a command beside it, as a user. Returns what it prints. A process of ``ENGINE`` is in
        the group ``kvass``."""
        enter = ["nsenter", "-t", str(self.pid), "--mount", "--pid", "--net", "--ipc", "--uts"]
        if user:
            enter += ["setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={USER}"]
        ran = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=60)
        return (ran.stdout or ran.stderr).strip()

    def ctl(self, *words: str) -> str:
        return self.run("systemctl", *words)


@contextmanager
def system_manager(folder: Path, unit: str, drop_in: str) -> Iterator[Systemd]:
    """A running systemd with the unit ``kvass.service`` and a drop-in for it; ``/opt/kvass`` has
    this tree, with this Python. Skips the test for who is not root, and where there is no systemd
    or the kernel refuses namespaces; fails it if systemd does not run otherwise."""
    if os.geteuid() or not PROGRAM.exists():
        pytest.skip("there is no systemd that this user can start")
    if refused := _refused():
        pytest.skip(f"the kernel refuses namespaces: {refused}")
    own = folder / "units/kvass.service.d"
    own.mkdir(parents=True)
    (folder / "opt").mkdir()
    (own / "test.conf").write_text(_ALONE + drop_in)
    (folder / "units/test.target").write_text(_ALONE)
    (folder / "units/kvass.service").write_text(unit)
    users = f"kvass:x:{USER}:{USER}::/nonexistent:/bin/false\n"
    (folder / "passwd").write_text(Path("/etc/passwd").read_text() + users)
    (folder / "group").write_text(Path("/etc/group").read_text() + f"kvass:x:{USER}:\n")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "kvass").write_text(_KVASS.format(version=version))
    groups = [_GROUPS / part for part in ("systemd", "unified") if (_GROUPS / part).is_dir()]
    groups = [group / f"kvass-test-{os.getpid()}" for group in groups or [_GROUPS]]
    env = {
        "UNSHARE": _UNSHARE,
        "WITHIN": _WITHIN,
        "FOLDER_OF_TEST": str(folder),
        "GROUPS_OF_TEST": " ".join(map(str, groups)),
        "BASE": sys.base_prefix,
        "PACKAGES": sysconfig.get_path("purelib"),
        "TREE": str(ROOT),
    }
    with (folder / "systemd.log").open("wb") as log:
        outer = subprocess.Popen(["sh", "-c", _BEGIN], env=os.environ | env, stderr=log)

    def ready() -> bool:
        if outer.poll() is not None:
            pytest.fail(f"systemd does not run: {(folder / 'systemd.log').read_text()}")
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        if not children:
            return False
        systemd.pid = int(children[0])
        return systemd.ctl("show", "-p", "Version").startswith("Version=")

    systemd = Systemd(0)
    try:
        if not eventually(ready, 10):
            pytest.fail(f"systemd does not answer: {(folder / 'systemd.log').read_text()}")
        yield systemd
    finally:
        outer.kill()
        outer.wait()
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
