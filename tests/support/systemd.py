"""A service manager that keeps descriptors for one service, as systemd does: sd_notify(3)."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Final

import pytest

START: Final = (
    "-c",
    """
import fcntl, os, socket, sys
from kvass.cli.main import main

with socket.socket(socket.AF_UNIX) as manager:
    manager.connect(os.environ["TESTS_MANAGER"])
    names, fds, _, _ = socket.recv_fds(manager, 4096, 100)
fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for fd in fds]
for at, fd in enumerate(fds, 3):
    os.dup2(fd, at)
    os.close(fd)
if fds:
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(fds))}
    os.environ["LISTEN_FDNAMES"] = names.decode().removesuffix("|")
sys.exit(main())
""",
)
"""The arguments of Python that run kvass as this manager's service."""


class Manager:
    """Keeps descriptors. Processes that the test starts while ``env`` is set are its service."""

    def __init__(self, folder: Path) -> None:
        self._stored = list[tuple[str, int]]()
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._starts = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self.env = {
            "NOTIFY_SOCKET": str(folder / "notify"),
            "TESTS_MANAGER": str(folder / "starts"),
        }
        self._notify.bind(self.env["NOTIFY_SOCKET"])
        self._notify.setblocking(False)
        self._starts.bind(self.env["TESTS_MANAGER"])
        self._starts.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._starts.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._starts.close()
        self.forget("")
        self._notify.close()

    def stored(self) -> dict[str, int]:
        """By its name, each descriptor that is kept. No name has several."""
        with self._lock:
            self._hear()
            names = dict(self._stored)
            assert len(names) == len(self._stored), self._stored
            return names

    def store(self, name: str, fd: int) -> None:
        """Keep a descriptor, which is the manager's from now on."""
        with self._lock:
            self._keep(name, fd)

    def forget(self, name: str) -> None:
        """Keep the descriptors of that name no longer. Empty: all."""
        with self._lock:
            self._hear()
            self._drop(name)

    def _hear(self) -> None:
        """Do what the service has asked for."""
        while True:
            try:
                text, fds, _, _ = socket.recv_fds(self._notify, 4096, 100)
            except BlockingIOError:
                return
            fields = dict(line.split("=", 1) for line in text.decode().splitlines())
            if "FDSTOREREMOVE" in fields:
                self._drop(fields["FDNAME"])
            for fd in fds:
                self._keep(fields["FDNAME"], fd)

    def _keep(self, name: str, fd: int) -> None:
        if any(os.path.sameopenfile(fd, other) for _, other in self._stored):
            os.close(fd)
        else:
            self._stored.append((name, fd))

    def _drop(self, name: str) -> None:
        for one, fd in self._stored:
            if name in ("", one):
                os.close(fd)
        self._stored = [each for each in self._stored if name not in ("", each[0])]

    def _serve(self) -> None:
        """Give each process of the service what is kept."""
        while True:
            try:
                client, _ = self._starts.accept()
            except OSError:
                return
            with client, self._lock:
                self._hear()
                names = ":".join(name for name, _ in self._stored)
                socket.send_fds(client, [f"{names}|".encode()], [fd for _, fd in self._stored])


def with_manager(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Manager:
    """A manager whose service each process is that the test starts from now on."""
    manager = Manager(folder)
    for name, value in manager.env.items():
        monkeypatch.setenv(name, value)
    return manager
