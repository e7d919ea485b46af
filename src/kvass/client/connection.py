"""One connection to the daemon, from its welcome to its EOF, and the arena that came through it.

Law of this file: a socket is closed, and its arena unmapped, when the last user leaves and not
before. EOF tells the daemon that this process will not write any more (law 3), so it must be true.

Not locked: ``Endpoint`` calls everything but ``populate`` under its lock.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from contextlib import ExitStack
from typing import Final, cast

from kvass._version import __version__
from kvass.arena import memory
from kvass.client.requests import REPLY_TO, OpenRequests
from kvass.errors import (
    ErrorCode,
    Incompatible,
    KvassError,
    Refused,
    RemoteError,
    TimedOut,
    Unavailable,
    UsageError,
)
from kvass.messages import (
    FEATURES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Error,
    FromDaemon,
    Hello,
    OneWay,
    Populated,
    Register,
    Request,
    Welcome,
)
from kvass.wire.channel import Channel, Transport
from kvass.wire.framing import one_line
from kvass.wire.places import check_folder, socket_places
from kvass.wire.trust import check_daemon

HANDSHAKE_S: Final = 5.0
"""How long to wait for a daemon that accepted but says nothing."""
BOOT_BYTES: Final = 16
CLOCK_SLACK_S: Final = 0.001
AT_ONCE_BYTES: Final = 256 << 20
"""The size of an arena that is unmapped in about 50 ms."""
_seqs: Final = itertools.count(1)  # no number twice in a process, whatever the connection


class DaemonConnection:
    """A connection, made by ``open_connection``. ``users``: how many users it has: the connecting
    thread and each arena lease."""

    def __init__(self, channel: Transport, path: str) -> None:
        self.channel = channel
        self.path = path
        """The path of the daemon's socket."""
        self.requests = OpenRequests()
        self.welcome = Welcome()
        self.registration: Register | None = None
        """The registration that the daemon has; None: it has none."""
        self.registered_s = math.inf
        """When (CLOCK_MONOTONIC) we knew that the daemon had registered us."""
        self.arena: memory.Arena | None = None
        self.users = 1
        self.populates = False
        """Whether this process populates its mapping of the arena."""
        self._populated = self._daemon_populated = 0

    @property
    def boot(self) -> bytes:
        return self.welcome.boot

    def send(self, message: Request | OneWay) -> None:
        """Send a message; a request is then open. Raises what ``Channel.send`` raises."""
        reply = REPLY_TO.get(type(message))
        if reply is not None:
            message.seq = next(_seqs)
        self.channel.send(message)
        if reply is not None:
            self.requests.add(message.seq, reply)

    def receive(self, timeout_s: float) -> list[FromDaemon]:
        """Read the messages that arrive first within ``timeout_s``. Returns those nobody will
        fetch.

        Raises ``Unavailable`` or ``RemoteError``: the connection cannot be used any more.
        """
        unclaimed = list[FromDaemon]()
        for message in self.channel.receive(timeout_s):
            if isinstance(message, Populated):
                self._daemon_populated = message.bytes
            elif not self.requests.arrived(message):
                unclaimed.append(message)
        return unclaimed

    def end(self) -> None:
        """Close the socket and unmap the arena, after the last user left.

        The copy thread may call this, so a large arena is unmapped on a thread of its own."""
        self.channel.close()
        if self.arena is None:
            return
        if self.arena.size > AT_ONCE_BYTES:
            try:
                threading.Thread(target=self.arena.close, name="kvass-unmap", daemon=True).start()
                return
            except RuntimeError:  # no thread left
                pass
        self.arena.close()

    # ------------------------------------------------------------ populating

    @property
    def watermark(self) -> int:
        """How many bytes of the arena, from its beginning, the daemon has populated."""
        said = max(self.welcome.populated_bytes, self._daemon_populated)
        return min(said, self.welcome.arena_bytes)

    @property
    def behind(self) -> bool:
        """Whether this process may populate one more slice of its mapping."""
        end = min(self._populated + memory.SLICE_BYTES, self.welcome.arena_bytes)
        return self.populates and self._populated < end <= self.watermark

    def populate(self) -> None:
        """Fault the next slice into this process's mapping, if the daemon has populated it."""
        if self.arena is None or not self.behind:
            return
        end = min(self._populated + memory.SLICE_BYTES, self.arena.size)
        try:
            self.arena.populate(self._populated, end)
            self._populated = end
        except OSError:  # no memory for page tables: copies fault pages in as they touch them
            self.populates = False


def open_connection(
    path: str,
    registration: Register | None,
    *,
    wants_arena: bool,
    daemon_uid: int | None = None,
) -> DaemonConnection:
    """Open a connection to the daemon at ``path``, or at the default places if ``path`` is empty:
    check the daemon, map the arena, register.

    Waits up to ``HANDSHAKE_S`` for each answer.

    If a row has one shard, any slot may be this rank's own, so all of the arena gets populated.

    Raises ``Unavailable``, ``Incompatible``, ``RemoteError``, or ``Refused`` for the registration;
    ``ConfigError`` for an impossible path, or one whose folder another user made first;
    ``UntrustedDaemon``, before anything is sent (``wire.trust``). At the default places the error
    is that of the first place where there is something.
    """
    if path:
        return _open(path, registration, wants_arena, daemon_uid)
    failures = list[KvassError]()
    for place in (places := socket_places()):
        try:
            return _open(place, registration, wants_arena, daemon_uid)
        except TimedOut:
            raise
        except (Unavailable, UsageError) as error:  # there may be one of ours at the next place
            failures.append(error)
    for place, failure in zip(places, failures, strict=True):
        nobody = isinstance(failure.__cause__, FileNotFoundError | ConnectionRefusedError)
        # A folder of another user, such as an inherited XDG_RUNTIME_DIR, says nothing.
        hidden = isinstance(failure.__cause__, PermissionError) and not os.path.exists(place)
        if not (nobody or hidden):
            raise failure
    raise Unavailable(f"no daemon at {', '.join(places)}") from failures[-1].__cause__


def _open(
    path: str, registration: Register | None, wants_arena: bool, daemon_uid: int | None
) -> DaemonConnection:
    check_folder(path)
    channel = Channel.connect(path, HANDSHAKE_S)
    connection = DaemonConnection(channel, path)
    with ExitStack() as undo:
        undo.callback(connection.end)
        check_daemon(path, channel.daemon_uid, daemon_uid)
        _greet(connection, wants_arena)
        channel.decoder.limit = connection.welcome.limits.frame_bytes
        if wants_arena:
            connection.arena = _map_arena(connection, channel)
            connection.populates = registration is None or registration.world_size == 1
        if registration is not None:
            _ask(connection, registration)
            connection.registration, connection.registered_s = registration, time.monotonic()
        undo.pop_all()
    return connection


def refusal(error: Error) -> Refused:
    """The daemon's ``Error`` as an exception. This client may not know its code."""
    return Refused(cast(ErrorCode, one_line(error.code)), one_line(error.text))


def _greet(connection: DaemonConnection, wants_arena: bool) -> None:
    """Exchange ``Hello`` and ``Welcome``. Raises ``Incompatible`` for another protocol or clock."""
    ours = f"this client ({__version__}) speaks protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}"
    sent_s = time.monotonic()
    hello = Hello(
        features=FEATURES,
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        client=f"kvass {__version__}",
        clock_s=sent_s,
        wants_arena=wants_arena,
    )
    try:
        welcome = _ask(connection, hello)
    except Refused as no:
        if no.code in ("incompatible_version", "incompatible_clock"):
            raise Incompatible(f"{no.text}; {ours}") from None
        raise
    assert isinstance(welcome, Welcome)
    if len(welcome.boot) != BOOT_BYTES:
        raise RemoteError(f"a boot id of {len(welcome.boot)} bytes")
    if not PROTOCOL_MIN <= welcome.protocol <= PROTOCOL_MAX:
        raise Incompatible(f"the daemon chose protocol {welcome.protocol}; {ours}")
    now_s = time.monotonic()
    if not sent_s - CLOCK_SLACK_S <= welcome.clock_s <= now_s + CLOCK_SLACK_S:
        raise Incompatible(
            f"the daemon's CLOCK_MONOTONIC reads {welcome.clock_s:.3f}, ours {now_s:.3f}: "
            "run both in one time namespace; uncached until then"
        )
    connection.welcome = welcome


def _map_arena(connection: DaemonConnection, channel: Channel) -> memory.Arena:
    fd, size = channel.take_fd(), connection.welcome.arena_bytes
    if fd is None:
        raise RemoteError("the welcome came without the arena's descriptor")
    try:
        return memory.attach(fd, size)
    except (OSError, ValueError, KvassError) as error:
        raise RemoteError(f"the arena of {size} bytes cannot be mapped: {error}") from error


def _ask(connection: DaemonConnection, message: Request) -> FromDaemon:
    """The reply to ``message`` on a connection that nobody else uses yet. Raises ``Refused`` for
    any ``Error`` that arrives meanwhile."""
    deadline_s = time.monotonic() + HANDSHAKE_S
    try:
        connection.send(message)
    except Unavailable:  # it may have refused us, and closed, before it read anything
        for error in connection.receive(0):
            if isinstance(error, Error):
                raise refusal(error) from None
        raise
    while not connection.requests.answered(message.seq):
        if (left_s := deadline_s - time.monotonic()) <= 0:
            raise TimedOut(f"the daemon accepted but did not answer within {HANDSHAKE_S:g} s")
        for error in connection.receive(left_s):
            assert isinstance(error, Error), "nothing was abandoned yet"
            raise refusal(error)
    reply = connection.requests.fetch(message.seq)
    if isinstance(reply, Error):
        raise refusal(reply)
    return reply
