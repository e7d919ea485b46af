"""The encoder and decoder of frames: messages to bytes and back. No socket, no clock.

A frame is ``u32 little-endian payload length`` + payload, one MessagePack map (``messages.py``).
How a stream is cut into pieces changes nothing. The messages before a bad frame come out first,
then the ``FrameError``. Nothing comes after it, because after a wrong length the next frame's
beginning is unknown. A decoder keeps no error that was raised: its traceback would lead back to the
decoder, and neither would be freed before a collection of cycles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, Final, Generic, TypeVar

import msgspec

from kvass.errors import ErrorCode, FrameError
from kvass.messages import AnyMessage, Error, FromClient, FromDaemon, Message, Register
from kvass.types import Limits
from kvass.wire.parts import has_more_parts

HEADER: Final = Struct("<I")
_encoder: Final = msgspec.msgpack.Encoder()
_TEXT_CHARS: Final = 200
_MOST_INT: Final = (1 << 63) - 1
MOST_PARTS: Final = 20_000
"""Numbers, texts, lists and so on of a frame above ``Limits.register_bytes``: the largest
``Reserve`` has 13,000. A frame of 4 MiB could have millions, which take 25 ms and more."""

M = TypeVar("M")


def encode(message: AnyMessage) -> bytes:
    return frame(_encoder.encode(message))


def encode_reply(message: Message) -> bytes:
    """The frame of an answer, which always exists (law 11). A number of 64 bits or more becomes the
    largest one of 63, and in a text what is no Unicode, as in a path, is escaped. An answer that is
    too large for a frame becomes an ``Error``."""
    try:
        payload = _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError):
        fields = _bounded(msgspec.to_builtins(message, builtin_types=(bytes,)))
        payload = _encoder.encode(fields)
    if len(payload) > (most := Limits().frame_bytes):
        text = f"the answer has {len(payload)} bytes: at most {most} can be sent"
        payload = _encoder.encode(Error(seq=message.seq, code="limit", text=text))
    return frame(payload)


def _bounded(value: Any) -> Any:
    """``value`` as it is, but for integers and texts that MessagePack has no form for."""
    if isinstance(value, dict):
        return {_bounded(key): _bounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_bounded(each) for each in value]
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return max(-_MOST_INT, min(_MOST_INT, value)) if type(value) is int else value


def frame(payload: bytes) -> bytes:
    return HEADER.pack(len(payload)) + payload


class Decoder(Generic[M]):
    """Decodes one direction of one stream. Make it with ``from_clients()`` or ``from_daemon()``.

    ``limit`` is the largest payload accepted, in bytes; it may be changed at any time. ``payload``
    decodes one.
    """

    def __init__(self, payload: Callable[[memoryview], M], limit: int) -> None:
        self.limit, self.size = limit, 0
        """``size``: of the last message's payload."""
        self._payload = payload
        self._rest = bytearray()
        self._fault: tuple[ErrorCode, str] | None = None

    @property
    def inside_frame(self) -> bool:
        """Whether the stream so far ends in the middle of a frame."""
        return bool(self._rest)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[M]:
        """Yield the messages that ``data`` completes; exhaust it before the next feed.

        Raises ``FrameError``, and again in every later feed: ``bad_frame`` for a length of 0 or
        above ``limit``, ``bad_message`` for a payload that is no message of this direction.
        """
        if self._fault is not None:
            raise FrameError(*self._fault)
        self._rest += data
        at = 0
        try:
            with memoryview(self._rest) as view:
                while (end := at + HEADER.size) <= len(view):
                    size = HEADER.unpack_from(view, at)[0]
                    if not 0 < size <= self.limit:
                        said = f"frame of {size} bytes: send 1 to {self.limit}"
                        raise FrameError("bad_frame", said)
                    if (end := end + size) > len(view):
                        break
                    message = self._decode(view[end - size : end])
                    at, self.size = end, size
                    yield message
        except FrameError as fault:
            self._fault = fault.code, str(fault)
            self._rest = bytearray()
            raise
        del self._rest[:at]

    def _decode(self, payload: memoryview) -> M:
        try:
            return self._payload(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError("bad_message", one_line(f"no message of ours: {error}")) from None


def from_clients(limit: int = Limits().frame_bytes) -> Decoder[FromClient]:
    return Decoder(_client_message, limit)


def from_daemon(limit: int = Limits().frame_bytes) -> Decoder[FromDaemon]:
    return Decoder(_daemon_payload.decode, limit)


class _Kind(msgspec.Struct):
    """The tag of any message. Its other fields are skipped."""

    t: str = ""


def _client_message(payload: memoryview) -> FromClient:
    """Raises ``FrameError`` or what msgspec raises. A large frame of small parts is not decoded."""
    if (size := len(payload)) > _REGISTER_BYTES:
        if has_more_parts(payload, MOST_PARTS):
            text = f"{size} bytes of more than {MOST_PARTS} parts: send fewer at a time"
            raise FrameError("bad_message", text)
        if _kind.decode(payload).t == _REGISTER:
            text = f"register of {size} bytes: send at most {_REGISTER_BYTES}"
            raise FrameError("bad_message", text)
    return _client_payload.decode(payload)


def one_line(text: str) -> str:
    """``text`` fit for one line of a log or terminal, whatever a peer put into it."""
    return "".join(c if c.isprintable() else "?" for c in text[:_TEXT_CHARS])


_REGISTER_BYTES: Final = Limits().register_bytes
_REGISTER: Final = Register.__struct_config__.tag
_kind: Final = msgspec.msgpack.Decoder(_Kind)
_client_payload: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_daemon_payload: msgspec.msgpack.Decoder[FromDaemon] = msgspec.msgpack.Decoder(FromDaemon)
