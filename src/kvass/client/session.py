"""One connection, from its welcome to its EOF, and the arena that came through it.

Law of this file: a socket is closed, and its arena unmapped, when the last user leaves and not
before. EOF tells the daemon that this process will not write any more (law 3), so it must be true.

Mapping the arena takes address space only. What costs page tables and time is populating, and a
process populates only what it is going to touch: all of the arena if a row has one shard, since
then any slot may be its own; else the slices in which a copy was announced (``want``), of which
this rank's extents soon are the only ones. Nothing waits for it: a copy that comes first faults
pages in as it goes.

Not locked: ``Link`` calls everything but ``populate`` under its lock.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Iterable
from typing import Final, cast

from kvass._version import __version__
from kvass.arena import memory
from kvass.config import check_folder
from kvass.errors import ErrorCode, Incompatible, KvassError, Refused, RemoteError, TimedOut
from kvass.messages import (
    FEATURES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Error,
    FromDaemon,
    Hello,
    Populated,
    Register,
    Registered,
    Request,
    Welcome,
)
from kvass.wire.channel import Channel
from kvass.wire.framing import one_line

HANDSHAKE_S: Final = 5.0
"""How long the keeper waits for a daemon that accepted but says nothing."""
BOOT_BYTES: Final = 16
CLOCK_SLACK_S: Final = 0.001
SLICE_BYTES: Final = 16 << 20
"""Populated at a time: a few milliseconds, after which the keeper looks at its socket again."""


AT_ONCE_BYTES: Final = 256 << 20
"""What is unmapped in some 50 ms."""


class Session:
    """A welcomed and registered connection. ``users`` counts the keeper and every arena lease."""

    def __init__(
        self, channel: Channel, welcome: Welcome, registration: Register | None = None
    ) -> None:
        self.registration = registration
        """What the daemon knows us by."""
        self.channel = channel
        self.welcome = welcome
        self.registered: Registered | None = None
        self.boot = welcome.boot
        self.registered_s = math.inf
        """When (CLOCK_MONOTONIC) we knew that the daemon had registered us."""
        self.arena: memory.Arena | None = None
        self.watermark = min(welcome.populated_bytes, welcome.arena_bytes)
        self.users = 1
        self._wanted = set[int]()
        self._to_populate: list[int] = []
        """A heap: the lowest slice is below the watermark if any is."""

    def want(self, slices: Iterable[int]) -> bool:
        """This process will touch these slices of its arena (``i`` begins at ``i * SLICE_BYTES``);
        whether some of them were not wanted before."""
        fresh = {i for i in slices if 0 <= i * SLICE_BYTES < self.welcome.arena_bytes}
        fresh -= self._wanted
        self._wanted |= fresh
        for one in fresh:
            heapq.heappush(self._to_populate, one)
        return bool(fresh)

    @property
    def behind(self) -> bool:
        """Whether a slice that is wanted and populated by the daemon is not by this process."""
        return bool(self._to_populate) and self._end(self._to_populate[0]) <= self.watermark

    def next_slice(self) -> int | None:
        """The slice to ``populate`` now."""
        return heapq.heappop(self._to_populate) if self.behind else None

    def populate(self, one: int) -> None:
        """Fault a slice into this process's mapping."""
        assert self.arena is not None
        try:
            self.arena.populate(one * SLICE_BYTES, self._end(one))
        except OSError:  # no memory for page tables: copies fault pages in as they touch them
            self._to_populate.clear()

    def _end(self, one: int) -> int:
        return min((one + 1) * SLICE_BYTES, self.welcome.arena_bytes)

    def end(self) -> None:
        """Close the socket and unmap the arena: the last user has left. It may be anybody, the
        copy thread too, so a large arena goes on a thread of its own."""
        assert not self.users
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


def open_session(path: str, registration: Register | None, *, wants_arena: bool) -> Session:
    """Connect, greet, check, map, register; waits up to ``HANDSHAKE_S`` for each answer.

    Raises ``Unavailable``, ``Incompatible``, ``RemoteError``, or ``Refused`` for the registration;
    ``ConfigError`` for a path that cannot be, or whose folder another user made first.
    """
    check_folder(path)
    channel = Channel.connect(path, HANDSHAKE_S)
    session = None
    try:
        welcome, pushed = _greet(channel, wants_arena)
        channel.limit_frames(welcome.limits.frame_bytes)
        session = Session(channel, welcome, registration)
        if wants_arena:
            session.arena = _attach(channel, welcome.arena_bytes)
            if registration is None or registration.world_size == 1:
                session.want(range(-(-welcome.arena_bytes // SLICE_BYTES)))
        if registration is not None:
            reply, more = _ask(channel, registration)
            if not isinstance(reply, Registered):
                raise RemoteError(f"a {type(reply).__name__} in answer to Register")
            session.registered = reply
            session.registered_s = time.monotonic()
            pushed += more
        for message in pushed:
            session.watermark = min(message.bytes, welcome.arena_bytes)
        return session
    except BaseException:
        if session is None:
            channel.close()
        else:
            session.users = 0
            session.end()
        raise


def refusal(error: Error) -> Refused:
    """What the daemon said, as an exception; its code may be one that we do not know."""
    return Refused(cast(ErrorCode, one_line(error.code)), one_line(error.text))


def _greet(channel: Channel, wants_arena: bool) -> tuple[Welcome, list[Populated]]:
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
        welcome, pushed = _ask(channel, hello)
    except Refused as no:
        if no.code in ("incompatible_version", "incompatible_clock"):
            raise Incompatible(f"{no.text}; {ours}") from None
        raise
    if not isinstance(welcome, Welcome) or len(welcome.boot) != BOOT_BYTES:
        raise RemoteError(f"a {type(welcome).__name__} in answer to Hello")
    if not PROTOCOL_MIN <= welcome.protocol <= PROTOCOL_MAX:
        raise Incompatible(f"the daemon chose protocol {welcome.protocol}; {ours}")
    now_s = time.monotonic()
    if not sent_s - CLOCK_SLACK_S <= welcome.clock_s <= now_s + CLOCK_SLACK_S:
        raise Incompatible(
            f"the daemon's CLOCK_MONOTONIC reads {welcome.clock_s:.3f}, ours {now_s:.3f}: "
            "run both in one time namespace; uncached until then"
        )
    return welcome, pushed


def _attach(channel: Channel, size: int) -> memory.Arena:
    fd = channel.take_fd()
    if fd is None:
        raise RemoteError("the welcome came without the arena's descriptor")
    try:
        return memory.attach(fd, size)
    except (OSError, ValueError, KvassError) as error:
        raise RemoteError(f"the arena of {size} bytes cannot be mapped: {error}") from error


def _ask(channel: Channel, message: Request) -> tuple[FromDaemon, list[Populated]]:
    """The reply to ``message`` on a connection that nobody else uses, and what was pushed."""
    deadline_s = time.monotonic() + HANDSHAKE_S
    message.seq = 1
    channel.send(message)
    pushed: list[Populated] = []
    while (left_s := deadline_s - time.monotonic()) > 0:
        reply: FromDaemon | None = None
        for got in channel.receive(left_s):
            if isinstance(got, Populated):
                pushed.append(got)
            elif isinstance(got, Error):
                raise refusal(got)
            elif reply is not None or got.seq != message.seq:
                raise RemoteError(f"a {type(got).__name__} nobody asked for")
            else:
                reply = got
        if reply is not None:
            return reply, pushed
    raise TimedOut(f"the daemon accepted but did not answer within {HANDSHAKE_S:g} s")
