"""The native client of a Mooncake Store: one per tier, set up when it is first needed.

If the library is called before it is set up, it kills the process. If no master answers, its setup
takes 90 s. So it is set up only once the master's port accepts a connection, with our own timeouts,
and ``client`` never returns a client that is not set up.

The library reads its timeouts from the environment of the process. We set these variables, except
those that were set before this module was loaded. If a process has several tiers, the one that was
opened last decides. A call takes one to two times ``timeout_s`` if the master is dead or hangs, or
if the process that holds the record's memory is dead. It takes up to ten times that if the latter
hangs. The GIL is released meanwhile. One problem remains: after a minute, the library reports a
request that still makes progress as failed, but may go on writing to its buffers.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from kvass.errors import TierDown
from kvass.tiers.base import Buffer
from kvass.tiers.options import MooncakeOptions

_SET_BEFORE: Final = frozenset(os.environ)
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # the library reads it when it is loaded

from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: E402

ABSENT: Final = frozenset({-703, -704, -710, -712})
"""Codes for an object that does not exist, not yet or not any more."""
NO_ROOM: Final = -200
"""The store is full, or no client contributes memory."""
LEASE_OVER: Final = -707
"""All bytes were read, but the read lease of the master had expired by then. They are valid if the
checksum matches."""
OTHER_SIZE: Final = frozenset({-600, -800})
"""Codes for an object whose size differs from the requested one. They also stand for other
errors."""

NO_MASTER: Final = frozenset({-900, -901})
LOST: Final = frozenset({-800})
"""The code for a record that cannot be read until another one takes its place."""

_CODES: Final = {
    -1: "an error inside the library",
    NO_ROOM: "no room in the memory that its clients contribute",
    -600: "it calls our request invalid",
    -706: "the record is leased",
    LEASE_OVER: "the lease ran out during the transfer",
    -708: "the record is being copied",
    -800: "the transfer failed: whoever holds the record may be gone",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}
_log = logging.getLogger("kvass.tiers")


def meaning(code: int) -> str:
    return _CODES.get(code, f"error {code} of the library")


def plain() -> Any:
    """The replication of a record: one copy, which may be evicted."""
    return ReplicateConfig()


def lasting(copies: int) -> Any:
    """The replication of a note: up to ``copies`` copies, each in the memory of another client,
    which are not evicted."""
    config = ReplicateConfig()
    config.replica_num = copies
    config.with_hard_pin = True
    return config


class MooncakeClient:
    """The client of the library, and the memory that it may transfer to and from directly.

    With ``tcp`` the library may use any memory, so none is registered: peers could write to
    registered memory at any time, over a port without a password. RDMA devices need registered
    memory.
    """

    def __init__(self, name: str, master: tuple[str, int], options: MooncakeOptions) -> None:
        self._name = name
        self._master = master
        self._options = options
        self._lock = threading.Lock()
        self._client: Any = None
        self._announced: list[Buffer] = []
        self._registered: list[tuple[int, int]] = []
        _set_limits(options.timeout_s)

    def client(self) -> Any:
        """Return the library's client. Sets it up if needed. Raises ``TierDown``."""
        with self._lock:
            if self._client is None:
                self._client = self._set_up()
            return self._client

    def announce(self, buffer: Buffer) -> None:
        """Let transfers use this memory directly, if possible. It must stay mapped until
        ``close``."""
        with self._lock:
            self._announced.append(buffer)
            if self._client is not None:
                self._register(self._client, buffer)

    def direct(self, buffer: Buffer) -> bool:
        """Whether transfers may use all of ``buffer`` directly."""
        first, end = _range(buffer)
        return self._options.protocol == "tcp" or any(
            begin <= first and end <= stop for begin, stop in self._registered
        )

    @contextmanager
    def registered(self, buffers: Sequence[Buffer]) -> Iterator[None]:
        """The context in which transfers may use ``buffers``. Raises ``TierDown``."""
        with ExitStack() as ending:
            for buffer in buffers if self._options.protocol == "rdma" else ():
                client, address = self.client(), buffer.ctypes.data
                if code := client.register_buffer(address, len(buffer)):
                    raise TierDown(f"{self._name}: memory cannot be registered: {meaning(code)}")
                ending.callback(client.unregister_buffer, address)
            yield

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _set_up(self) -> Any:
        o = self._options
        try:  # the library would try for longer, and its error would say less
            with socket.create_connection(self._master, o.timeout_s) as connection:
                hostname = o.hostname or connection.getsockname()[0]
        except OSError as error:
            raise TierDown(f"{self._name}: the master: {error}") from error
        client = MooncakeDistributedStore()
        host, port = self._master
        master = f"{host}:{port}"
        code = client.setup(hostname, o.metadata, o.segment, 0, o.protocol, o.devices, master)
        if code != 0:
            client.close()
            raise TierDown(f"{self._name}: it cannot be set up: {meaning(code)}")
        for buffer in self._announced:
            self._register(client, buffer)
        return client

    def _register(self, client: Any, buffer: Buffer) -> None:
        if self._options.protocol == "tcp":
            return
        code = client.register_buffer(buffer.ctypes.data, len(buffer))
        if code == 0:
            self._registered.append(_range(buffer))
        else:
            line = "%s: %d bytes cannot be registered, everything is copied once more: %s"
            _log.warning(line, self._name, len(buffer), meaning(code))


def _range(buffer: Buffer) -> tuple[int, int]:
    first: int = buffer.ctypes.data
    return first, first + len(buffer)


def _set_limits(timeout_s: int) -> None:
    """Set the library's timeouts. It reads each when a client is set up or a transfer begins."""
    limits = {
        "MC_RPC_TIMEOUT_MS": timeout_s * 1000,
        "MC_RPC_CONNECT_TIMEOUT_MS": timeout_s * 1000,
        "MC_HANDSHAKE_CONNECT_TIMEOUT": timeout_s,
        "MC_TCP_STATUS_TIMEOUT_SEC": timeout_s,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": timeout_s,
        "MC_STORE_CLIENT_SETUP_RETRIES": 1,
        "MC_STORE_CLIENT_METRIC": 0,
    }
    for variable, value in limits.items():
        text = str(value)
        if variable not in _SET_BEFORE and os.environ.get(variable) != text:
            os.environ[variable] = text
