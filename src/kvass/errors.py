"""The exceptions of kvass, and the codes of refusals on the wire.

::

    KvassError
    ├── UsageError            the caller's mistake; the text says what to do
    │   ├── ConfigError       a flag, an environment name, a YAML key, a connector option
    │   ├── UnknownName       a model or a tenant that the daemon does not know
    │   └── UntrustedDaemon   another user may be listening at the socket: run uncached
    ├── Unavailable           no daemon now: a miss; the client goes on trying to reconnect
    │   └── TimedOut          it did not answer within the bound
    ├── TierDown              no key of a batch could be served: all are misses; retry later
    │   └── ItemRefused       the tier is up, and refused this one record or request
    │       └── ItemUnreadable  what is stored there is in the way; another store replaces it
    ├── RemoteError           the peer broke the protocol; its connection ends, no other
    │   ├── FrameError        the bytes are not a frame, or the frame is not a message
    │   └── Incompatible      protocol versions or clocks do not match: run uncached
    └── Refused               the daemon refused the request, with a code; nothing changed

A miss, a refused key or a shorter match is a value, never one of these.
"""

from __future__ import annotations

from typing import Literal

ErrorCode = Literal[
    "bad_message",  # undecodable, of an unknown type, or a field of a wrong type or out of bounds
    "bad_frame",  # the length prefix or size is out of bounds
    "bad_value",  # it was decoded, but a value is out of its domain
    "not_registered",  # needs Register first
    "already_registered",  # this connection registered already, with other contents
    "rank_taken",  # another live connection has this (instance, rank)
    "bad_rank",  # negative, unknown, or above the limit
    "contradiction",  # differs from what its instance registered; the text names the field
    "incompatible_version",  # the ranges of protocol versions do not overlap
    "incompatible_clock",  # the monotonic clocks differ: the peer is in another time namespace
    "wrong_boot",  # names memory, a lease or a reservation of another boot
    "unknown_lease",
    "unknown_reservation",
    "not_yours",  # belongs to another instance
    "limit",  # more than Limits allow
    "too_large",  # a row of this layout does not fit the arena
    "tier_down",  # a tier could not store what it must: send the request again
    "forbidden",  # not allowed for the uid or the role of this peer
    "shutting_down",
]


class KvassError(Exception):
    """Root of everything kvass raises."""


class UsageError(KvassError):
    """The caller's mistake. The text says what to do about it."""


class ConfigError(UsageError):
    """A flag, environment name, YAML key or connector option that cannot be used."""


class UnknownName(UsageError):
    """A model or a tenant that the daemon does not know. The text has the nearest known names."""


class UntrustedDaemon(UsageError):
    """Another user may be listening at the socket. The text says how to name the daemon's user."""


class Unavailable(KvassError):
    """The daemon cannot be reached now."""


class TimedOut(Unavailable):
    """The daemon did not answer within the bound."""


class TierDown(KvassError):
    """A tier failed for every key of a batch, for a reason of its own."""


class ItemRefused(TierDown):
    """A store answered, and refused one record or request. That says nothing of others."""


class ItemUnreadable(ItemRefused):
    """A store refuses what it has under one name, and will until that is replaced."""


class RemoteError(KvassError):
    """The peer broke the protocol."""


class FrameError(RemoteError):
    """The bytes are not a frame, or the frame is not a message."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code: ErrorCode = code


class Incompatible(RemoteError):
    """The peer's protocol versions or its clock do not match ours."""


class Refused(KvassError):
    """The daemon refused a request, with a code and one line that says what to do."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code: ErrorCode = code
        self.text = text
