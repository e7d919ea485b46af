"""The frame decoder: any cut of a valid stream is that stream, all else is a FrameError."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.errors import FrameError
from kvass.messages import (
    AnyMessage,
    Commit,
    Error,
    Hello,
    Lookup,
    Ping,
    Reserve,
    ReserveItem,
    StatusReply,
)
from kvass.types import Limits
from kvass.wire import framing

MESSAGES = st.one_of(
    st.builds(Ping, seq=st.integers(0, 2**32)),
    st.builds(Hello, client=st.text(max_size=20), clock_s=st.floats(0, 1e12)),
    st.builds(Lookup, request=st.text(max_size=9), digests=st.binary(max_size=300)),
    st.builds(Commit, boot=st.binary(max_size=16), reservation=st.integers(0, 2**63 - 1)),
    st.builds(
        Reserve,
        items=st.lists(
            st.builds(ReserveItem, request=st.text(max_size=5), digests=st.binary(max_size=64))
        ),
    ),
)


def cut(stream: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(stream[at : at + size])
        at += size
    return [*pieces, stream[at:]]


def decode(pieces: list[bytes], limit: int = 1 << 20) -> tuple[list[Any], FrameError | None]:
    decoder = framing.from_clients(limit)
    out: list[Any] = []
    for piece in pieces:
        try:
            out.extend(decoder.feed(piece))
        except FrameError as fault:
            return out, fault
    return out, None


@given(st.lists(MESSAGES, max_size=8), st.lists(st.integers(0, 40), max_size=60))
def test_any_chunking_decodes_the_same(messages: list[AnyMessage], sizes: list[int]) -> None:
    stream = b"".join(map(framing.encode, messages))
    assert decode(cut(stream, sizes)) == (messages, None)


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.data())
def test_truncated_stream_yields_whole_messages_only(
    messages: list[AnyMessage], data: st.DataObject
) -> None:
    frames = [framing.encode(m) for m in messages]
    keep = data.draw(st.integers(0, len(frames[-1]) - 1))
    decoder = framing.from_clients()
    assert list(decoder.feed(b"".join(frames[:-1]) + frames[-1][:keep])) == messages[:-1]
    assert decoder.inside_frame == (keep > 0)


@given(st.binary(max_size=400), st.lists(st.integers(0, 30), max_size=20))
def test_garbage_is_a_frame_error_however_it_is_cut(garbage: bytes, sizes: list[int]) -> None:
    whole, fault = decode([garbage], limit=200)
    pieces, piece_fault = decode(cut(garbage, sizes), limit=200)
    assert whole == pieces
    assert str(fault) == str(piece_fault)


@given(MESSAGES, st.data())
def test_flipped_bytes_raise_nothing_but_a_frame_error(
    message: AnyMessage, data: st.DataObject
) -> None:
    frame = bytearray(framing.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    whole, fault = decode([bytes(frame)])
    pieces, piece_fault = decode([bytes([byte]) for byte in frame])
    assert (repr(whole), str(fault)) == (repr(pieces), str(piece_fault))  # by text: NaN is no NaN
    assert len(whole) <= len(frame) // framing.HEADER.size


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_any_other_msgpack_is_a_bad_message(value: Any) -> None:
    try:
        payload = msgspec.msgpack.encode(value)
    except OverflowError:
        return
    _, fault = decode([framing.HEADER.pack(len(payload)) + payload])
    assert fault is not None
    assert fault.code == "bad_message"


def test_messages_before_a_bad_frame_come_out_and_nothing_after_it() -> None:
    decoder = framing.from_clients()
    stream = decoder.feed(framing.encode(Ping(seq=1)) + b"\0\0\0\0" + framing.encode(Ping(seq=2)))
    assert next(stream) == Ping(seq=1)
    with pytest.raises(FrameError, match="frame of 0 bytes"):
        next(stream)
    with pytest.raises(FrameError, match="frame of 0 bytes"):
        list(decoder.feed(framing.encode(Ping(seq=3))))


def test_oversized_frame_is_refused_by_its_header_alone() -> None:
    decoder = framing.from_clients(limit=100)
    with pytest.raises(FrameError, match="101 bytes") as caught:
        list(decoder.feed(framing.HEADER.pack(101)))
    assert caught.value.code == "bad_frame"


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 5000,
        b"\x82\xa1t\xa4ping\xa1x" + b"\x91" * 100_000,  # nesting beyond any stack
        b"\x82\xa1t\xa7reserve\xa5items\xdd\xff\xff\xff\xff",  # promises four billion items
        b"\x83\xa1t\xa6lookup\xa7request\xa2\xff\xfe\xa7digests\xc4\x00",  # no UTF-8
        b"\x81\xa1t\xa4nope",
        b"\x81\xa1t\xa7welcome",  # a message, but of the other direction
        b"\x81\xa1t\xa4pingzz",
        b"\x81\xa1t\xa9a\n\x1b[31mzz",
    ],
)
def test_bad_payloads(payload: bytes) -> None:
    messages, fault = decode([framing.HEADER.pack(len(payload)) + payload])
    assert messages == []
    assert fault is not None
    assert fault.code == "bad_message"
    assert str(fault).isprintable()


@pytest.mark.parametrize("bad", [b"\0\0\0\0", b"\x05\0\0\0hello"])
def test_after_a_fault_a_decoder_keeps_nothing_and_is_freed_by_reference_counting(
    bad: bytes,
) -> None:
    gc.disable()
    try:
        decoder = framing.from_clients()
        for _ in range(2):
            with pytest.raises(FrameError):
                [*decoder.feed(bad + bytes(1 << 20))]
            assert not decoder.inside_frame
        gone = weakref.ref(decoder)
        del decoder
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, 2**64, 2**80, -(2**70)])
def test_an_answer_with_a_number_that_is_too_large_is_sent(number: int) -> None:
    reply = StatusReply(seq=7, fields={"a": [{"bytes": number}], "b": True, "c": "x", "d": 0.5})
    (heard,) = framing.from_daemon().feed(framing.encode_reply(reply))
    bounded = max(-(2**63) + 1, min(2**63 - 1, number)) if number != 2**63 else number
    assert heard == StatusReply(seq=7, fields=reply.fields | {"a": [{"bytes": bounded}]})


def test_an_answer_with_a_path_that_is_no_unicode_is_sent() -> None:
    reply = StatusReply(seq=7, fields={"arena": "/dev/shm/\udcff", "\udcff": [1, 2.5, None, b"x"]})
    (heard,) = framing.from_daemon().feed(framing.encode_reply(reply))
    assert heard == StatusReply(
        seq=7, fields={"arena": "/dev/shm/\\udcff", "\\udcff": [1, 2.5, None, b"x"]}
    )


def test_an_answer_that_is_larger_than_a_frame_is_an_error() -> None:
    reply = StatusReply(seq=7, fields={"a": "x" * Limits().frame_bytes})
    (heard,) = framing.from_daemon().feed(framing.encode_reply(reply))
    assert isinstance(heard, Error)
    assert (heard.seq, heard.code, heard.fatal) == (7, "limit", False)
