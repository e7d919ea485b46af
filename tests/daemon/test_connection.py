"""The daemon's end of a session: order, descriptors, bounds, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

import pytest

from kvass.daemon import connection as module
from kvass.daemon.connection import HELLO_BYTES, OUT_BYTES, Connection
from kvass.errors import FrameError
from kvass.wire import framing

Scene = Callable[[Connection, socket.socket], Coroutine[Any, Any, None]]


def played(scene: Scene) -> Callable[[], None]:
    """A test that runs ``scene`` with a connection and its peer's socket."""

    async def main() -> None:
        near, far = socket.socketpair()
        far.settimeout(20)
        loop = asyncio.get_running_loop()
        connection = Connection(loop, near, 1, lambda _: None)
        try:
            await scene(connection, far)
        finally:
            connection.close_now()
            connection.close_now()
            far.close()

    return lambda: asyncio.run(main())


async def read(far: socket.socket, size: int | None = None) -> bytes:
    """``size`` bytes, or all until EOF, with the loop running meanwhile."""
    got = b""
    while size is None or len(got) < size:
        if not (piece := await asyncio.to_thread(far.recv, 1 << 20)):
            break
        got += piece
    return got


@played
async def test_frames_keep_their_order_behind_a_descriptor(
    connection: Connection, far: socket.socket
) -> None:
    parts = [os.urandom(1 << 20) for _ in range(4)]
    fd = os.open("/", os.O_RDONLY)
    connection.queue(parts[0], fd)
    for part in parts[1:]:
        connection.queue(part)
    assert connection.flush()
    assert connection.unsent > 3 << 20
    got = b""
    fds: list[int] = []
    while len(got) < 4 << 20:
        piece, more, _, _ = await asyncio.to_thread(socket.recv_fds, far, 1 << 20, 4)
        got += piece
        fds += more
    assert got == b"".join(parts)
    assert [os.path.samestat(os.fstat(f), os.fstat(fd)) for f in fds] == [True]
    for one in [fd, *fds]:
        os.close(one)


@played
async def test_flush_says_when_too_much_is_unread_and_mute_forgets_it(
    connection: Connection, far: socket.socket
) -> None:
    connection.queue(bytes(OUT_BYTES))
    assert connection.flush()
    connection.queue(bytes(OUT_BYTES))
    assert not connection.flush()
    connection.mute()
    assert connection.unsent == 0
    connection.queue(b"more")
    assert connection.flush()
    assert connection.unsent == 0


@played
async def test_close_sends_what_is_queued_first(connection: Connection, far: socket.socket) -> None:
    connection.queue(bytes(1 << 20))
    with mock.patch.object(module, "LINGER_S", 60.0):
        connection.close()
    connection.queue(b"too late")
    assert len(await read(far)) == 1 << 20


@played
async def test_close_waits_for_no_reader_for_ever(
    connection: Connection, far: socket.socket
) -> None:
    connection.queue(bytes(8 << 20))
    with mock.patch.object(module, "LINGER_S", 0.05):
        connection.close()
    await asyncio.sleep(0.3)
    assert len(await read(far)) < 8 << 20  # and then EOF


@played
async def test_half_close_speaks_no_more_but_hears_the_end(
    connection: Connection, far: socket.socket
) -> None:
    connection.queue(bytes(1 << 20))
    connection.half_close()
    connection.queue(b"too late")
    connection.flush()
    assert len(await read(far)) == 1 << 20
    scratch = memoryview(bytearray(10))
    assert connection.read_into(scratch) is None
    far.send(b"abc")
    assert connection.read_into(scratch) == 3
    far.close()
    assert connection.read_into(scratch) == 0


@played
async def test_half_close_of_a_muted_session_ends_its_stream_at_once(
    connection: Connection, far: socket.socket
) -> None:
    connection.queue(bytes(8 << 20))
    connection.flush()
    connection.mute()
    connection.half_close()
    assert len(await read(far)) < 8 << 20


@played
async def test_failing_write_is_no_end_of_stream(
    connection: Connection, far: socket.socket
) -> None:
    far.shutdown(socket.SHUT_RD)
    connection.queue(b"anyone?")
    assert connection.flush()
    assert connection.read_into(memoryview(bytearray(9))) is None
    far.send(b"still here")
    assert connection.read_into(memoryview(bytearray(10))) == 10


@played
async def test_hang_up_with_words_unread_is_eof(connection: Connection, far: socket.socket) -> None:
    connection.queue(b"unread")
    connection.flush()
    far.close()
    assert connection.read_into(memoryview(bytearray(9))) == 0


@played
async def test_a_session_that_was_not_welcomed_sends_small_frames(
    connection: Connection, far: socket.socket
) -> None:
    header = framing.HEADER.pack(HELLO_BYTES + 1)
    with pytest.raises(FrameError, match="send 1 to 65536"):
        [*connection.decoder.feed(header)]
    connection.half_close()
    connection.allow_large_frames()
    assert [*connection.decoder.feed(header)] == []


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What is freed is freed by reference counting alone."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("end", ["close_now", "close", "half_close", "unread"])
@pytest.mark.usefixtures("no_gc")
def test_a_closed_connection_and_what_it_was_sent_are_freed_at_once(end: str) -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        connection = Connection(asyncio.get_running_loop(), near, 1, lambda _: None)
        connection.allow_large_frames()
        assert [*connection.decoder.feed(framing.HEADER.pack(4 << 20) + b"half")] == []
        gone: list[weakref.ref[Any]] = [weakref.ref(connection), weakref.ref(connection.decoder)]
        if end == "unread":
            connection.queue(bytes(1 << 20))
            connection.close()
            await asyncio.sleep(0)
            connection.mute()
        else:
            getattr(connection, end)()
            assert gone[1]() is None or end == "close_now"
            connection.close_now()
        del connection
        await asyncio.sleep(0)
        assert [one() for one in gone] == [None, None]
        far.close()

    asyncio.run(main())
