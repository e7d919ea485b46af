"""The messages between the daemon and the process of a tier, and their encoding as frames.

Law of this file: both ends run the same version of kvass, so the messages have no versions. Nothing
is pickled. Bytes that cannot be decoded raise ``FrameError``. An array is encoded as its shape and
its bytes, in the machine's byte order.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Final, get_args

import msgspec
import numpy as np

from kvass.core.effects import ENDS, FromTier, TierReport, ToTier
from kvass.wire.framing import Decoder, frame

LIMIT: Final = 256 << 20
"""The largest frame in bytes. A probe for the longest prompt in 64 groups takes half of it."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first frame to a tier's process: the tier to open, with its number and name."""

    number: int
    url: str
    name: str
    arena_bytes: int
    close_s: float
    """Seconds that the process waits for running calls before it exits."""
    log_format: str = "text"


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent by the daemon; the main thread of the process sends it back. ``log_level``: the process
    changes to this level."""

    log_level: str


class TierOpened(msgspec.Struct, frozen=True, tag=True):
    """The first frame from a tier's process. ``refusal`` is empty if the tier is open. Otherwise it
    says why the tier cannot be opened, and the process ends."""

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
    """Decode an array. ``kind`` is ``npt.NDArray[scalar]``, whose second type argument is
    ``np.dtype[scalar]``."""
    (scalar,) = get_args(get_args(kind)[1])
    shape, raw = packed
    return np.frombuffer(raw, scalar).reshape(shape)


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_pack)
_to_process: Final = msgspec.msgpack.Decoder[ToProcess](
    reduce(or_, [Start, Heartbeat, *ENDS]), dec_hook=_unpack
)
_from_process: Final = msgspec.msgpack.Decoder[FromProcess](
    reduce(or_, [TierOpened, Heartbeat, TierReport, *ENDS.values()]), dec_hook=_unpack
)
