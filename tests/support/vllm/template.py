"""A process that has imported vLLM and forks: what is forked needs no import, 6 s of a core each.

Every fork is a Python program of its own, as ``python -m`` runs it, with pipes, an environment and
a process id of its own. Forks of one template share the seed of Python's ``hash()``; processes that
do not are in ``tests/engine/test_recipes.py`` (a server) and ``test_scheduler_identity.py``.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import IO, Any, Final, NoReturn

PRELOADED: Final = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "compressed_tensors",
)
"""Nothing of kvass, which notes when its process started: weights must be older than that."""
_STARTED_S: Final = 600.0
_LONGEST_REQUEST: Final = 1 << 17


class Forked:
    """A fork, with what ``subprocess.Popen`` would say of it."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], status: int) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._status = status

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. :raises subprocess.TimeoutExpired: if it runs on."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork of vLLM", timeout or 0)
            self.returncode = int(os.read(self._status, 16))
            os.close(self._status)
        return self.returncode

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Template:
    """Forks for any thread; it starts with the first one. ``environment``: of its imports."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._one = threading.Lock()

    @cached_property
    def _control(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_STARTED_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.vllm.template", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=self._environment,
            )
        return ours  # when it is closed, the template ends

    def fork(self, command: Sequence[str], env: Mapping[str, str], stderr: int) -> Forked:
        """Run ``command``, a module and its arguments, in a fork; stdin and stdout are pipes."""
        (stdin, to_it), (from_it, its), (status, told) = os.pipe(), os.pipe(), os.pipe()
        request = json.dumps([command, dict(env)]).encode()
        with self._one:
            try:
                socket.send_fds(self._control, [request], [stdin, its, stderr, told])
            finally:
                for fd in (stdin, its, told):
                    os.close(fd)
            pid = self._control.recv(16)
        if not pid:
            raise RuntimeError("the template has ended: see its stderr")
        return Forked(int(pid), os.fdopen(to_it, "wb"), os.fdopen(from_it, "rb"), status)


def _serve(control: socket.socket) -> list[str]:
    """Fork until the parent has ended. Returns in a fork, with its module and arguments."""
    for module in PRELOADED:
        importlib.import_module(module)
    # vLLM looks at a model's class in a process that imports vLLM for it, 8 s of a core, unless an
    # earlier one left what it saw in the home folder. The fork will import that class anyway.
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks' parents
    while True:
        request, fds, _, _ = socket.recv_fds(control, _LONGEST_REQUEST, 4)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            return _forked(control, request, fds)
        for fd in fds:
            os.close(fd)


def _forked(control: socket.socket, request: bytes, fds: Sequence[int]) -> list[str]:
    """Fork once more; the parent stays, to tell the process id, and the exit status at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, told = fds
    if pid := os.fork():
        for fd in streams:
            os.close(fd)
        control.send(b"%d" % pid)
        control.close()
        os.write(told, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    control.close()
    os.close(told)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    command: list[str]
    command, environment = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    return command


def _run(module: str) -> int:
    """Run it as the program; its exit status."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exited:
        return exited.code if isinstance(exited.code, int) else int(exited.code is not None)
    return 0


def _end(status: int) -> NoReturn:
    """End as Python does, but free no object: with vLLM's that takes 3 s of a core."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    _end(_run(sys.argv[0]))
