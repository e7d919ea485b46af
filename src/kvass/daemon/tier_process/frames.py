"""The messages between the daemon and the process of a tier, and how they are framed.

Law of this file: both ends run the same kvass, so messages have no versions. Nothing is pickled,
and bytes that cannot be decoded raise ``FrameError``. An array is sent as its shape and its bytes,
in the machine's byte order.
"""

from __future__ import annotations

from typing import Any, Final, get_args

import msgspec
import numpy as np

from kvass.core.effects import FromTier, TierReport, ToTier
from kvass.wire.framing import Decoder, frame

LIMIT: Final = 256 << 20
"""Bytes of a frame; a probe of the longest prompt in 64 groups is half of it."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first frame to a tier's process: the tier's URL and its name."""

    number: int
    url: str
    name: str
    arena_bytes: int
    close_s: float
    """How long calls that still run at the end are waited for."""
    log_format: str = "text"


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A frame that the daemon sends, and that the process's main thread sends back. ``log_level``
    is the log level from now on."""

    log_level: str


class TierOpened(msgspec.Struct, frozen=True, tag=True):
    """The first frame from a tier's process: the tier is open, or the reason why it cannot be
    opened. In the second case the process ends."""

    refusal: str = ""


ToProcess = Start | Heartbeat | ToTier
FromProcess = TierOpened | Heartbeat | FromTier | TierReport


def encode(message: ToProcess | FromProcess) -> bytes:
    return frame(_encoder.encode(message))


def from_daemon() -> Decoder[ToProcess]:
    return Decoder(_to_process.decode, LIMIT)


def from_process() -> Decoder[FromProcess]:
    return Decoder(_from_process.decode, LIMIT)


def _pack(array: object) -> object:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"a {type(array).__name__} in a frame")
    return array.shape, array.tobytes()


def _unpack(kind: Any, packed: Any) -> object:
    """``kind``: ``npt.NDArray[one dtype]``, of which the second argument is ``np.dtype[...]``."""
    (scalar,) = get_args(get_args(kind)[1])
    shape, raw = packed
    return np.frombuffer(raw, scalar).reshape(shape)


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_pack)
_to_process: Final = msgspec.msgpack.Decoder[ToProcess](ToProcess, dec_hook=_unpack)
_from_process: Final = msgspec.msgpack.Decoder[FromProcess](FromProcess, dec_hook=_unpack)
