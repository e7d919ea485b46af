"""Containers for tests: processes of this machine's Python that see and may write what a container
of an image with kvass would, and no more. Bubblewrap makes them (``requirements/debian.sh``).

Law of this file: nothing is shared with the machine but what ``mounts`` says and the read-only
files of Python. As root, a container has the user that it names. As another user it is that one, by
another number: there is no second user to be had, so nothing can be said about those.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.support.browser import DEBIAN

ROOT: Final = Path(__file__).parents[2]
PASSWD: Final = "root:x:0:0::/root:/bin/sh\n"
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
IS_ROOT: Final = os.geteuid() == 0
SHM_BYTES: Final = 64 << 20
"""What Docker and Kubernetes give unless they are told."""


@dataclass(frozen=True)
class Mount:
    """A folder of this machine; or a new tmpfs of ``size`` bytes that everybody may write to."""

    folder: Path | None = None
    read_only: bool = False
    size: int = 1 << 30


@dataclass(frozen=True)
class Container:
    """What a container is made of. ``memory``: the limit of its cgroup in bytes, as its files say;
    nothing enforces it. ``folder``: an empty folder of the test, for what stands for the kernel's
    files."""

    folder: Path
    user: int
    group: int
    env: Mapping[str, str]
    mounts: Mapping[str, Mount] = field(default_factory=dict)
    groups: Sequence[int] = ()
    memory: int = 1 << 40
    read_only_root: bool = False
    capabilities: bool = False

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run ``command`` as the only one in it."""
        with self.started(*command) as running:
            out, errors = running.process.communicate(timeout=60)
            return subprocess.CompletedProcess(command, running.process.returncode, out, errors)

    @contextmanager
    def started(self, *command: str) -> Iterator[Running]:
        """Run ``command`` as its first process. It is killed at the end."""
        ours, theirs = os.pipe()
        with subprocess.Popen(
            [*self._made_by("--info-fd", str(theirs)), *self._as_user(), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(theirs,),
        ) as process:
            os.close(theirs)
            try:
                with os.fdopen(ours) as info:
                    text = info.read()
                assert text, process.communicate()[1]
                pid = json.loads(text)["child-pid"]
                try:
                    yield Running(self, process, pid)
                finally:  # with it all end that are in it; bubblewrap's own end does not end it
                    if process.poll() is None:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            finally:
                process.kill()

    def _as_user(self) -> list[str]:
        """The command that becomes the user, with the environment."""
        env = [f"{name}={text}" for name, text in ({"PATH": _PATH} | {**self.env}).items()]
        command = ["env", "-i", *env]
        if not IS_ROOT:
            return command
        groups = ",".join(map(str, self.groups))
        user = [f"--reuid={self.user}", f"--regid={self.group}"]
        user += [f"--groups={groups}" if groups else "--clear-groups"]
        if not self.capabilities:
            user += ["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]
            user += ["--no-new-privs"]
        return ["setpriv", *user, *command]

    def _made_by(self, *flags: str) -> list[str]:
        program = shutil.which("bwrap", path=f"{DEBIAN / 'bin'}:{os.environ['PATH']}")
        assert program is not None, "no bwrap: bash requirements/debian.sh .venv says what it needs"
        made = [program, "--as-pid-1", *flags]
        made += [f"--unshare-{what}" for what in ("pid", "net", "ipc", "uts")]
        if not IS_ROOT:
            made += ["--unshare-user", "--uid", str(self.user), "--gid", str(self.group)]
        made += ["--perms", "1777", "--dir", "/tmp", "--proc", "/proc", "--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib64"):
            made += ["--symlink", f"usr/{name}", f"/{name}"]
        program_of = Path(sys.executable).resolve().parents[1]
        for path in dict.fromkeys([sys.base_prefix, sys.prefix, str(program_of), str(ROOT)]):
            if not path.startswith("/usr"):
                made += [*_parents(path), "--ro-bind", path, path]
        made += _parents("/etc/passwd")
        made += ["--ro-bind", str(self._file("passwd", PASSWD)), "/etc/passwd"]
        made += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
        made += ["--tmpfs", "/dev"]
        for name in _DEVICES:
            made += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        made += [*_parents("/sys/fs/cgroup"), "--ro-bind", str(self._cgroup()), "/sys/fs/cgroup"]
        for path, mount in ({"/dev/shm": Mount(size=SHM_BYTES)} | {**self.mounts}).items():
            made += _parents(path)
            if mount.folder is None:
                made += ["--perms", "1777", "--size", str(int(mount.size)), "--tmpfs", path]
            else:
                made += ["--ro-bind" if mount.read_only else "--bind", str(mount.folder), path]
        return [*made, *["--remount-ro", "/"] * self.read_only_root, "--chdir", "/"]

    def _file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def _cgroup(self) -> Path:
        """The files of both versions of cgroups that say the limit of memory."""
        for folder, limit, used in (
            ("", "memory.max", "memory.current"),
            ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            self._file(f"cgroup/{folder}{limit}", f"{int(self.memory)}\n")
            self._file(f"cgroup/{folder}{used}", "0\n")
        return self.folder / "cgroup"


def _parents(path: str) -> list[str]:
    """The folders above ``path``. Bubblewrap would make those that are missing for itself alone."""
    above = [*Path(path).parents][-2::-1]
    return [word for each in above for word in ("--perms", "0755", "--dir", str(each))]


_PATH: Final = f"{Path(sys.executable).parent}:/usr/bin:/bin"


@dataclass(frozen=True)
class Running:
    """A container that runs. ``pid``: its first process, as this machine numbers it."""

    container: Container
    process: subprocess.Popen[str]
    pid: int

    def exec(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run another command in it, as ``docker exec`` and probes do."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", "--ipc", "--uts"]
        enter += [] if IS_ROOT else ["--user", "--preserve-credentials"]
        whole = [*enter, "--", *self.container._as_user(), *command]
        return subprocess.run(whole, capture_output=True, text=True, timeout=60)
