"""The caches' servers: how each is started, tuned, found ready, ended, and cleaned up after."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final

from bench.footprint import cpu_ns, status_kib
from kvass.cli.bench.rig import POPULATE_TIMEOUT_S, wait_for
from kvass.client.client import Client
from kvass.errors import KvassError, Unavailable
from kvass.types import PAGE

MALLOC: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
}
"""For every process that is measured: without it buffers of LMCache's client, and of vLLM itself,
are mapped and faulted in anew each time."""
START_S: Final = 120.0
STOP_S: Final = 30.0
STATUS_S: Final = 10.0
_SHM: Final = Path("/dev/shm")


class Server(ABC):
    """One server. ``start`` may be called again after ``stop`` or ``kill``; the address stays.

    ``disk``: a folder for its disk tier. Whatever it leaves in /dev/shm under the name that it was
    given here is removed by ``close``.
    """

    name: str

    def __init__(self, folder: Path, l1_bytes: int, disk: Path | None = None) -> None:
        self.l1_bytes, self.disk = l1_bytes, disk
        self._log = folder / f"{self.name}-server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def address(self) -> str:
        """What its clients are given."""

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def answers(self) -> bool:
        """Whether it is ready."""

    @abstractmethod
    def populate(self) -> None:
        """Have its memory faulted in."""

    @abstractmethod
    def on_disk(self, tokens_bytes: int) -> bool:
        """Whether its disk tier has all of so many bytes."""

    def left_behind(self) -> int:
        """Bytes in /dev/shm, of a server that is gone."""
        return 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> float:
        """Seconds until it answers. Raises ``Unavailable``."""
        began_s = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment() | MALLOC,
            )
        wait_for(self._up, f"{self.name}'s server", START_S)
        took_s = time.monotonic() - began_s
        self.populate()
        return took_s

    def stop(self) -> float:
        """Seconds that it takes to end after SIGTERM."""
        began_s = time.monotonic()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        return time.monotonic() - began_s

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        self.stop()

    def memory_mib(self) -> float:
        """Resident memory without what is shared."""
        kib = status_kib(Path("/proc") / str(self.pid))
        return (kib["VmRSS"] - kib["RssShmem"]) / 1024

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def cpu_s(self) -> float:
        return cpu_ns(self.pid) / 1e9

    def _up(self) -> bool:
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            tail = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise Unavailable(f"its server ended with status {status}: {''.join(tail)[-200:]}")
        return self.answers()


class KvassServer(Server):
    name = "kvass"

    def __init__(self, folder: Path, l1_bytes: int, disk: Path | None = None) -> None:
        super().__init__(folder, l1_bytes, disk)
        self._socket = str(folder / "kvass.sock")

    @property
    def address(self) -> str:
        return self._socket

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "kvass", "serve", "--socket", self._socket]
        command += ["--l1-size", str(self.l1_bytes)]
        return command + (["--tier", f"disk:{self.disk}?capacity=8GiB"] if self.disk else [])

    def answers(self) -> bool:
        try:
            self._status()
        except KvassError:
            return False
        return True

    def populate(self) -> None:
        def populated() -> bool:
            status = self._status()
            return bool(status["l1_populated_bytes"] >= status["l1_capacity_bytes"])

        wait_for(populated, "the arena", POPULATE_TIMEOUT_S)

    def on_disk(self, tokens_bytes: int) -> bool:
        (tier,) = self._status()["tiers"]
        idle = not tier["flush_queue_rows"] and not tier["storing_bytes"]
        return idle and _size(self.disk) >= tokens_bytes

    def _status(self) -> dict[str, Any]:
        with Client(self._socket) as client:
            return client.status(STATUS_S)


class LMCacheServer(Server):
    """``lmcache server`` in its shared-memory mode, one L1 without lazy allocation."""

    name = "lmcache"

    def __init__(
        self, folder: Path, l1_bytes: int, disk: Path | None = None, *, python: str
    ) -> None:
        super().__init__(folder, l1_bytes, disk)
        self._python = python
        self._port, self._http, self._metrics = free_ports(3)
        self._shm = f"kvassbench{os.getpid()}x{self._port}"

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    def command(self) -> list[str]:
        options: dict[str, object] = {
            "host": "127.0.0.1",
            "port": self._port,
            "http-port": self._http,
            "prometheus-port": self._metrics,
            "supported-transfer-mode": "engine_driven",
            "shm-name": self._shm,
            "l1-size-gb": self.l1_bytes / (1 << 30),
            "eviction-policy": "LRU",
            "chunk-size": 256,
        }
        if self.disk:
            adapter = {"type": "fs_native", "base_path": str(self.disk), "num_workers": 4}
            options["l2-adapter"] = json.dumps(adapter)
        command = [self._python, "-m", "lmcache.cli.main", "server", "--no-l1-use-lazy"]
        return command + [f"--{name}={value}" for name, value in options.items()]

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._http}/healthcheck", timeout=1):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def populate(self) -> None:
        for path in self._files():
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)

    def on_disk(self, tokens_bytes: int) -> bool:
        return _size(self.disk) >= tokens_bytes

    def left_behind(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self._files())

    def close(self) -> None:
        super().close()
        for path in self._files():
            path.unlink()

    def _files(self) -> list[Path]:
        return list(_SHM.glob(f"*{self._shm}*"))


def _size(folder: Path | None) -> int:
    """Bytes of the files in a folder, whole pages as on disk."""
    assert folder is not None
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size // PAGE * PAGE if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _environment() -> dict[str, str]:
    names = ("KVASS_", "LMCACHE_")
    return {k: v for k, v in os.environ.items() if not k.startswith(names)} | {
        "LMCACHE_DISABLE_BANNER": "1"
    }
