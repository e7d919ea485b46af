"""All exceptions of kvass, and the codes of refused requests.

::

    KvassError
    ├── UsageError            you called us wrongly; the text says what to do
    │   ├── ConfigError       a flag, an environment name, a YAML key, a connector option
    │   └── UntrustedDaemon   who listens at the socket may be a stranger: run uncached
    ├── Unavailable           no daemon there right now: a miss, and reconnecting goes on by itself
    │   └── TimedOut          it did not answer within the bound
    ├── TierDown              a tier could serve nothing of a batch: all misses, leave it a while
    ├── RemoteError           the peer broke the protocol; its session ends, no other
    │   ├── FrameError        the bytes are no frame of ours
    │   └── Incompatible      version ranges or clocks that do not meet: run uncached
    └── Refused               the daemon said no, with a code; nothing was changed

A miss, a refused key or a shorter match is a value, never one of these.
"""

from __future__ import annotations

from typing import Literal

ErrorCode = Literal[
    "bad_message",  # undecodable, of an unknown type, or a field of a wrong type or out of bounds
    "bad_frame",  # the length prefix or size is out of bounds
    "bad_value",  # decodes, but a value is out of its domain
    "not_registered",  # needs Register first
    "already_registered",  # this session registered already, with other contents
    "rank_taken",  # a second live (instance, rank)
    "bad_rank",  # negative, unknown, or above the limit
    "contradiction",  # differs from what its own instance said; names the field
    "incompatible_version",  # protocol ranges do not meet
    "incompatible_clock",  # the monotonic clocks differ: another time namespace
    "wrong_boot",  # names memory or a lease of another daemon's life
    "unknown_lease",
    "unknown_reservation",
    "not_yours",  # belongs to another instance
    "limit",  # more than Limits allow
    "too_large",  # a row of this layout does not fit the arena
    "tier_down",  # a tier could not keep what must be kept: say it again
    "forbidden",  # this peer's uid or role may not
    "shutting_down",
]


class KvassError(Exception):
    """Root of everything kvass raises."""


class UsageError(KvassError):
    """The caller's mistake. The text says what to do about it."""


class ConfigError(UsageError):
    """A flag, environment name, YAML key or connector option that cannot be used."""


class UntrustedDaemon(UsageError):
    """The process that listens at the socket may not be the daemon. The text says how to name the
    daemon's user."""


class Unavailable(KvassError):
    """The daemon cannot be reached now."""


class TimedOut(Unavailable):
    """The daemon did not answer within the bound."""


class TierDown(KvassError):
    """A tier's own trouble left a batch without a single success."""


class RemoteError(KvassError):
    """The peer broke the protocol."""


class FrameError(RemoteError):
    """Bytes that are no frame, or a frame that is no message."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code: ErrorCode = code


class Incompatible(RemoteError):
    """The peer cannot work with this version (protocol version range, clock)."""


class Refused(KvassError):
    """The daemon refused a request. It has a code, and one line that says what to do."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code: ErrorCode = code
        self.text = text
