"""Processes that have imported what many programs need, and fork: a fork needs no import.

Of vLLM an import takes 6 s of a core, of kvass 0.2 s, and tests start hundreds of daemons. Every
fork is a Python program of its own, as ``python -m`` runs it, with pipes, an environment, a current
folder and a process id of its own. Forks of one template share the seed of Python's ``hash()``;
processes that do not are in ``tests/engine/test_recipes.py`` (a server).
"""

from __future__ import annotations

import atexit
import fcntl
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
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Final, NoReturn

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
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            self.returncode = int(os.read(self._status, 16))
            os.close(self._status)
        return self.returncode

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def ran(self) -> tuple[int, str]:
        """Its exit status and what it printed. It has ended then, also if the test has not."""
        try:
            with self.stdin, self.stdout:
                said = self.stdout.read().decode()
            return self.wait(), said
        finally:
            self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # reaped, and what would tell has not told yet
                os.kill(self.pid, number)


class Template:
    """Forks for any thread of all processes that name this ``place``, a socket; it starts with the
    first fork, and ends with the last of these processes. It imports ``modules``, in the
    ``environment``."""

    def __init__(self, place: Path, environment: Mapping[str, str], *modules: str) -> None:
        self._place, self._environment, self._modules = place, environment, modules
        self._one = threading.Lock()

    @cached_property
    def _control(self) -> socket.socket:
        control = _new_socket()
        control.settimeout(_STARTED_S)
        with self._place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                control.connect(str(self._place))
            except OSError:  # there is none, or there is none any more
                self._place.unlink(missing_ok=True)
                self._start()
                control.connect(str(self._place))
        return control

    def _start(self) -> None:
        with _new_socket() as listener:
            listener.bind(str(self._place))
            listener.listen()
            command = [sys.executable, "-m", __name__, str(listener.fileno()), *self._modules]
            self._process = subprocess.Popen(
                command,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                env=self._environment,
            )

    def start(self) -> None:
        """Begin its imports, and do not wait for them."""

        def connect() -> None:
            with self._one:
                _ = self._control

        threading.Thread(target=connect, name="template", daemon=True).start()

    def fork(self, command: Sequence[str], env: Mapping[str, str], stderr: int) -> Forked:
        """Run ``command``, a module and its arguments, in a fork; stdin and stdout are pipes."""
        (stdin, to_it), (from_it, its), (status, told) = os.pipe(), os.pipe(), os.pipe()
        request = json.dumps([command, dict(env), os.getcwd()]).encode()
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


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _serve(listener: socket.socket, modules: Sequence[str]) -> list[str]:
    """Fork until all who connected have ended. Returns in a fork, with its module and arguments."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks' parents
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all
    open_ones = [listener]
    while True:
        (one, *_), _, _ = select.select(open_ones, [], [])
        if one is listener:
            open_ones.append(listener.accept()[0])
            continue
        try:
            request, fds, _, _ = socket.recv_fds(one, _LONGEST_REQUEST, 4)
        except ConnectionResetError:  # who was killed has not read all that it was told
            request, fds = b"", []
        if not request:
            open_ones.remove(one)
            one.close()
            if open_ones == [listener]:
                os._exit(0)
        elif os.fork() == 0:
            for other in open_ones:
                if other is not one:
                    other.close()
            return _forked(one, request, fds, interrupt)
        for fd in fds:
            os.close(fd)


def _forked(
    control: socket.socket, request: bytes, fds: Sequence[int], interrupt: Any
) -> list[str]:
    """Fork once more; the parent stays, to tell the process id, and the exit status at the end.
    ``interrupt``: what the fork does with SIGINT."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, told = fds
    if pid := os.fork():
        for fd in streams:
            os.close(fd)
        control.send(b"%d" % pid)
        control.close()
        os.write(told, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    signal.signal(signal.SIGINT, interrupt)
    control.close()
    os.close(told)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    # What these were before may have been files, and pipes cannot seek.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    command: list[str]
    command, environment, folder = json.loads(request)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return command


def _run(module: str) -> int:
    """Run it as the program; its exit status."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exited:
        if exited.code is None or isinstance(exited.code, int):
            return exited.code or 0
        sys.stderr.write(f"{exited.code}\n")
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """End as Python does, but free no object: with vLLM's that takes 3 s of a core."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    _end(_run(sys.argv[0]))
