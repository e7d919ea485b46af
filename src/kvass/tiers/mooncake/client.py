"""The native client of a Mooncake Store: one per tier, set up when it is first needed.

The library kills the process if it is called before it was set up, and takes 90 s to say that no
master answers. So it is set up only once the master's port accepts a connection, with limits of our
own, and nobody gets a client that is not set up.

The library reads its limits from the environment of the process. We set them, except those that
were set before this module was loaded; of several tiers in one process the one opened last decides.
A dead master, a dead owner of memory and a master that stands still cost one to two times
``timeout_s``, an owner that stands still up to ten times that; the GIL is free meanwhile. One thing
has no remedy: the library says of a request that makes progress, but has not ended after a minute,
that it failed, and may still write to the memory it was given.
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
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it is looked at when the library is loaded

from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: E402

ABSENT: Final = frozenset({-703, -704, -710, -712})
"""Codes that say: there is none, not yet, or not any more."""
NO_ROOM: Final = -200
"""Also if nobody contributes memory."""
LEASE_OVER: Final = -707
"""All was read, but longer ago than the master promised to keep it: right if the checksum is."""
OTHER_SIZE: Final = frozenset({-600, -800})
"""Said of a record that is longer or shorter than asked for, but not of those alone."""

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
    """How a record is kept: once, and evicted like any other."""
    return ReplicateConfig()


def lasting(copies: int) -> Any:
    """Never evicted, and with as many owners as there are, up to ``copies``."""
    config = ReplicateConfig()
    config.replica_num = copies
    config.with_hard_pin = True
    return config


class MooncakeClient:
    """The library's client, and the memory that it may use.

    Over ``tcp`` it may use any memory, and none is registered: a peer could write to memory that
    is, unasked, over a port that asks for no password. RDMA devices need it registered.
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
        """Ready for every call. Raises ``TierDown``."""
        with self._lock:
            if self._client is None:
                self._client = self._set_up()
            return self._client

    def announce(self, buffer: Buffer) -> None:
        """Let transfers use this memory directly, if possible; it stays until ``close``."""
        with self._lock:
            self._announced.append(buffer)
            if self._client is not None:
                self._register(self._client, buffer)

    def direct(self, buffer: Buffer) -> bool:
        """Whether all of it lies in memory that transfers may use."""
        first, end = _range(buffer)
        return self._options.protocol == "tcp" or any(
            begin <= first and end <= stop for begin, stop in self._registered
        )

    @contextmanager
    def registered(self, buffers: Sequence[Buffer]) -> Iterator[None]:
        """Let transfers use this memory meanwhile. Raises ``TierDown``."""
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
        try:  # the library would try for long, and say less
            with socket.create_connection(self._master, o.timeout_s) as connection:
                hostname = o.hostname or connection.getsockname()[0]
        except OSError as error:
            raise TierDown(f"{self._name}: the master: {error}") from error
        client = MooncakeDistributedStore()
        master = "{}:{}".format(*self._master)
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
    """The library's own: each is read when a client is set up, or a transfer begins."""
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
