"""A real Mooncake Store: a master, and processes that contribute memory.

The master is that of the package in the extra ``mooncake``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.servers.server import Server, free_port, pause

SEGMENT = 512 << 20
"""Bytes that an owner contributes."""
_PORTS = (20_000, 32_000)
"""Outside of the library's own range, 12300 to 17000."""


def program() -> Path:
    """The path of the master program."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None, "no package mooncake: install the extra"
    assert spec.origin is not None
    return Path(spec.origin).parent / "mooncake_master"


class MooncakeServer(Server):
    """A master and its owners; ``address`` is the part of a tier URL after ``mooncake:``."""

    def __init__(self, *options: str, owners: int = 1) -> None:
        self.port = free_port(*_PORTS)
        self.address = f"127.0.0.1:{self.port}"
        self._options = options
        self.owners: list[Owner] = []
        super().__init__()
        try:
            self.owners += [Owner(self.address) for _ in range(owners)]
        except BaseException:
            self.close()  # nobody else would end them
            raise

    def command(self) -> list[str | Path]:
        """The master's command line. A restarted master has lost everything."""
        flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_host": "127.0.0.1",
            "metrics_port": free_port(*_PORTS),
            "enable_metric_reporting": "false",
            "minloglevel": 2,
        }
        program().chmod(0o755)  # not every installer keeps it executable
        return [program(), *(f"--{name}={value}" for name, value in flags.items()), *self._options]

    def answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        for owner in self.owners:
            owner.kill()
        super().close()


class Owner:
    """A process that contributes memory, and reads and replaces objects for a test."""

    def __init__(self, address: str, segment: int = SEGMENT) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, address, str(segment)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert self._answer() == "ready"
        except BaseException:
            self.kill()
            raise

    def get(self, name: str) -> bytes:
        """An object's bytes; empty if it does not exist."""
        return bytes.fromhex(self._ask("get", name))

    def put(self, name: str, value: bytes) -> None:
        """Replace an object."""
        assert self._ask("put", name, value.hex()) == 0

    def pause(self, stop: bool) -> None:
        """Stop it (SIGSTOP), or let it continue."""
        pause(self._process, stop)

    def kill(self) -> None:
        """End it; the objects in its memory are lost."""
        self._process.kill()
        self._process.wait(timeout=30)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, *words: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def _own(address: str, segment: int) -> None:
    """The program of an owner."""
    from mooncake.store import MooncakeDistributedStore  # prints, and starts threads

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", address)
    sys.stdout.write(json.dumps("ready" if code == 0 else code) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        what, name, *value = json.loads(line)
        if what == "get":
            answer: object = store.get(name).hex()
        else:
            store.remove(name, True)
            answer = store.put(name, bytes.fromhex(value[0]))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    _own(sys.argv[1], int(sys.argv[2]))
