"""What goes into ``CacheMachine.step`` and what comes out of it.

Law of this file: plain values. An event says what happened; an effect says what the shell must do.
The *result* of an effect, where it has one, is simply the next event.
"""

from __future__ import annotations

import msgspec

from kvass.errors import ErrorCode
from kvass.messages import FromClient, FromDaemon

SessionId = int
"""Chosen by the shell, never reused in one boot."""


# ---------------------------------------------------------------- events


class Opened(msgspec.Struct, frozen=True):
    """A peer connected (its uid was accepted by the shell); it must say ``Hello`` first."""

    session: SessionId


class Received(msgspec.Struct, frozen=True):
    """One decoded message of a session."""

    session: SessionId
    message: FromClient


class Faulted(msgspec.Struct, frozen=True):
    """Bytes of a session that are no message. Its stream cannot be trusted any more (law 11)."""

    session: SessionId
    code: ErrorCode
    text: str


class Lost(msgspec.Struct, frozen=True):
    """EOF: the only proof that the peer will not write to the arena again."""

    session: SessionId


class PopulatedTo(msgspec.Struct, frozen=True):
    """The arena's first ``bytes`` are faulted in."""

    bytes: int


class Tick(msgspec.Struct, frozen=True):
    """Time passed: lapse what is due."""


Event = Opened | Received | Faulted | Lost | PopulatedTo | Tick


# ---------------------------------------------------------------- effects


class Send(msgspec.Struct, frozen=True):
    """Send ``message``; with ``with_arena`` the arena's descriptor rides on its frame."""

    session: SessionId
    message: FromDaemon
    with_arena: bool = False


class Close(msgspec.Struct, frozen=True):
    """Close the session after what was sent to it: it owes nothing. ``Lost`` need not follow."""

    session: SessionId


class HalfClose(msgspec.Struct, frozen=True):
    """Shut down our sending side, drop whatever still arrives, and wait for EOF (then ``Lost``).

    For a session that must end but may still write into slots it was granted (law 3).
    """

    session: SessionId


Effect = Send | Close | HalfClose
