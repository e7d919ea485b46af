"""A real daemon process for a test, on a socket of its own.

::

    @pytest.fixture
    def daemon(tmp_path):
        with running_daemon(tmp_path, l1_size="64MiB") as daemon:
            yield daemon
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from kvass.client.client import Client

READY_S = 120.0
"""How long a daemon may take to start; a loaded machine starts Python slowly."""
ENDS_S = 30.0
"""How long it may take to answer, to end or to reach a state: less than its leases last, so that
nothing passes for ended because it has lapsed."""
KVASS = ("-m", "kvass")
GRACE_S = 1.0
"""The default of ``lost_engine_grace_s`` here. That of kvass is longer, for large pinned arenas."""


class Daemon:
    """Daemon processes, one after the other, on one socket path. See ``running_daemon``."""

    popen: ClassVar[Callable[..., subprocess.Popen[str]]] = subprocess.Popen
    """Starts each process."""

    def __init__(
        self, folder: Path, options: dict[str, Any], program: Sequence[str] = KVASS
    ) -> None:
        self.socket = str(folder / "kvass.sock")
        self.ready = ""
        """The ``ready`` line that the process printed."""
        self._options = {"socket": self.socket, **options}
        self._program = program
        self._process: subprocess.Popen[str] | None = None
        self._log = folder / "daemon.log"

    def start(self) -> None:
        """Start a process and wait for its ``ready`` line. Raises ``RuntimeError`` with its log."""
        assert not self.running, "it runs already"
        flags = [
            part
            for name, value in self._options.items()
            for one in (value if isinstance(value, list) else [value])
            for part in (f"--{name.replace('_', '-')}", str(one))
        ]
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVASS_")}
        env.pop("LD_PRELOAD", None)  # vLLM on a CPU sets it in the process that imported it
        with self._log.open("a") as log:
            self._process = self.popen(
                [sys.executable, *self._program, "serve", *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
            )
        assert self._process.stdout is not None
        self.ready = ""
        if select.select([self._process.stdout], [], [], READY_S)[0]:
            self.ready = self._process.stdout.readline().strip()
        if not self.ready:
            self.kill()
            raise RuntimeError(f"no ready line; its log: {self.log()}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def boot(self) -> bytes:
        return bytes.fromhex(self.ready.rpartition("boot=")[2])

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end of the process. Idempotent."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(timeout=ENDS_S)

    def restart(self) -> None:
        """Kill the process, and start a new one on the same socket path."""
        self.kill()
        self.start()

    def suspend(self) -> None:
        """Send SIGSTOP, and wait until the process has stopped. Its sockets stay open."""
        os.kill(self.pid, signal.SIGSTOP)
        state = Path(f"/proc/{self.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] not in "TZ":
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def status(self) -> dict[str, Any]:
        """The fields of ``kvass status``, from a new connection."""
        with Client(self.socket) as client:
            return client.status(ENDS_S)

    def wait_until(self, timeout_s: float = ENDS_S, **fields: Any) -> dict[str, Any]:
        """Wait until ``status()`` has these values. Returns the status. Raises
        ``AssertionError``."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if all(status[name] == value for name, value in fields.items()):
                return status
            assert time.monotonic() < deadline, f"{fields} not reached: {status}"
            time.sleep(0.02)

    def log(self) -> str:
        return self._log.read_text()

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        if self.running:
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)  # a suspended process does not see SIGTERM
        status = self.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return status


@contextmanager
def running_daemon(
    folder: Path, l1_size: str = "64MiB", program: Sequence[str] = KVASS, **options: Any
) -> Iterator[Daemon]:
    """A running daemon with its socket in ``folder``. ``options`` are those of ``kvass serve``.
    ``program`` has the arguments of Python that run kvass."""
    daemon = Daemon(
        folder, {"l1_size": l1_size, "lost_engine_grace_s": GRACE_S, **options}, program
    )
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.kill()
