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
import time
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
_RETRY_S: Final = 1.0
"""After a failure to set up the same answer is given for so long."""


def meaning(code: int) -> str:
    """What the library means by it."""
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
    """The library's client, and the memory that it may use directly."""

    def __init__(
        self, name: str, master: tuple[str, int], options: MooncakeOptions, bounce: Buffer
    ) -> None:
        self._name = name
        self._master = master
        self._options = options
        self._bounce = bounce
        self._lock = threading.Lock()
        self._client: Any = None
        self._announced: list[Buffer] = []
        self._direct: list[tuple[int, int]] = []
        self._refusal = ""
        self._refused_until = 0.0
        _set_limits(options.timeout_s)

    def client(self) -> Any:
        """Ready for every call. Raises ``TierDown``."""
        with self._lock:
            if self._client is None:
                if time.monotonic() < self._refused_until:
                    raise TierDown(self._refusal)
                try:
                    self._client = self._set_up()
                except TierDown as error:
                    self._refusal = str(error)
                    self._refused_until = time.monotonic() + _RETRY_S
                    raise
            return self._client

    def announce(self, buffer: Buffer) -> None:
        """Let transfers use this memory directly, if possible; it stays until ``close``.

        Over ``tcp`` any memory can be used, and none is registered: a peer could write to memory
        that is, unasked, over a port that asks for no password. RDMA devices need it registered.
        """
        with self._lock:
            if self._options.protocol == "tcp":
                self._direct.append(_range(buffer))
            elif self._client is None:
                self._announced.append(buffer)
            else:
                self._register_announced(self._client, buffer)

    def direct(self, buffer: Buffer) -> bool:
        """Whether all of it lies in memory that transfers may use."""
        first, end = _range(buffer)
        return any(begin <= first and end <= stop for begin, stop in self._direct)

    def sizes(self, names: list[str]) -> dict[str, int]:
        """Of those objects that exist and lie in somebody's memory; one round trip."""
        found: dict[str, Any] = self.client().batch_get_replica_desc(names) if names else {}
        return {
            name: copies[0].get_memory_descriptor().buffer_descriptor.size
            for name, copies in found.items()
            if copies and copies[0].is_memory_replica()
        }

    def read_beginnings(self, wanted: list[tuple[str, int, int]]) -> list[bool]:
        """Read beginnings of objects: (name, address in the bounce buffer, bytes). Which were read.

        Nobody else in this process may do so with the same names: the library keeps what it knows
        of them by name meanwhile.
        """
        names = [name for name, _, _ in wanted]
        if not names:
            return []
        client = self.client()
        begun = [code == 0 for code in client.batch_get_session_start(names)]
        known = [item for item, there in zip(wanted, begun, strict=True) if there]
        codes = client.batch_get_into_multi_buffer_ranges(
            [name for name, _, _ in known],
            [[address] for _, address, _ in known],
            [[size] for _, _, size in known],
            [[0] for _ in known],
        )
        client.batch_get_session_end(names)
        read = {name: code == size for (name, _, size), code in zip(known, codes, strict=True)}
        return [read.get(name, False) for name in names]

    def close(self) -> None:
        """Nobody uses the client any more."""
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
        if code == 0:
            code = self._register(client, self._bounce)
        if code != 0:
            client.close()
            raise TierDown(f"{self._name}: it cannot be set up: {meaning(code)}")
        for buffer in self._announced:
            self._register_announced(client, buffer)
        return client

    def _register(self, client: Any, buffer: Buffer) -> int:
        code: int = client.register_buffer(buffer.ctypes.data, len(buffer))
        return code

    def _register_announced(self, client: Any, buffer: Buffer) -> None:
        code = self._register(client, buffer)
        if code == 0:
            self._direct.append(_range(buffer))
        else:
            _log.warning(
                "%s: %d bytes cannot be registered, everything is copied once more: %s",
                self._name,
                len(buffer),
                meaning(code),
            )


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
        _set(variable, str(value))


def _set(variable: str, value: str) -> None:
    if variable not in _SET_BEFORE and os.environ.get(variable) != value:
        os.environ[variable] = value
