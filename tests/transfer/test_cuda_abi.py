"""The calls of CUDA's driver: what ``kvass.transfer`` passes is what ``cuda.h`` declares.

The real runtime makes every call it has to ``stub_cuda.c``, which is compiled against NVIDIA's
header (of CUDA 12.8; it comes with Triton's package). How long a real device takes, and in which
order it works, only a GPU can show (docs/gpu.md).
"""

from __future__ import annotations

import ast
import ctypes
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from ctypes import byref, c_int, c_uint8
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvass.transfer import cuda_copies, cuda_driver, cuda_runtime
from kvass.transfer.base import U8Array
from kvass.transfer.cuda_driver import Device, MissingError, Survey
from kvass.transfer.runtime import Batch, Event, Fault, Kind, Stream
from tests.transfer.stub_driver import (
    PAGE,
    Arguments,
    Said,
    Spoil,
    Stub,
    WrongSizeError,
    arena_of,
    column,
    sizes_of,
    watch,
)

CONTEXT, STREAM, EVENT = 0xC0A7E871 << 32 | 1, 0x57A3EA17 << 32, 0xE7E47193 << 32
"""The stub's handles."""


# ---------------------------------------------------------------- every call

BYTES = 5 * (1 << 32) + 3 * PAGE
"""More than 32 bits, as addresses are."""


class Proof:
    """Every call of ``kvass.transfer``, once or more: what the driver got, and what came back."""

    def __init__(self, stub: Stub, spoil: Spoil | None = None) -> None:
        self._stub = stub
        self._region, self._memory = stub.allocate(4 * PAGE)
        self._rng = np.random.default_rng(1)
        self._begin = stub.count
        self.watched, self._one = watch(stub, spoil)

    def said(self) -> list[Said]:
        """What the driver was asked since the last look."""
        begin, self._begin = self._begin, self._stub.count
        return [call.said for call in self._stub.calls(begin)]

    def expect(self, *calls: Said) -> None:
        assert self.said() == list(calls)

    def within(self, *calls: Said) -> None:
        """The same, between what every call of the runtime begins and ends with."""
        mode = ("cuThreadExchangeStreamCaptureMode", "*4")
        push, pop = ("cuCtxPushCurrent_v2", CONTEXT), ("cuCtxPopCurrent_v2", "*8")
        self.expect(push, mode, *calls, mode, pop)

    def run(self) -> None:
        self.opening()
        self.survey()
        self.streams()
        self.pinning()
        self.copies()
        self.trouble()

    def opening(self) -> None:
        self.expect(
            ("cuInit", 0),
            ("cuDeviceGet", "*4", 0),
            ("cuDriverGetVersion", "*4"),
            ("cuGetProcAddress_v2", "*1", "*8", 12080, 0, 0),
            ("cuDeviceGetAttribute", "*4", 91, 0),
            ("cuDevicePrimaryCtxRetain", "*8", 0),
        )

    def survey(self) -> None:
        device = Device("NVIDIA Stub", (139 << 30) + 4096, direct=True, locks=True)
        assert cuda_driver.survey(self.watched) == Survey(13000, (device,), batches=True)
        self.expect(
            ("cuDriverGetVersion", "*4"),
            ("cuInit", 0),
            ("cuDeviceGetCount", "*4"),
            ("cuDeviceGet", "*4", 0),
            ("cuDeviceGetName", "*1", 256, 0),
            ("cuDeviceTotalMem_v2", "*8", 0),
            ("cuDeviceGetAttribute", "*4", 100, 0),
            ("cuDeviceGetAttribute", "*4", 91, 0),
            ("cuGetProcAddress_v2", "*1", "*8", 12080, 0, 0),
        )

    def streams(self) -> None:
        one, create = self._one, "cuStreamCreateWithPriority"
        asked = ("cuCtxGetStreamPriorityRange", "*4", "*4")
        store, load = one.open_stream("store"), one.open_stream("load")
        assert (store, load) == (STREAM | 1, STREAM | 2)
        calls = self.said()
        assert calls[2:4] == [asked, (create, "*8", 1, 0)]
        assert calls[8:10] == [asked, (create, "*8", 1, 2**64 - 5)]
        event = one.mark(Stream(STREAM | 1))
        assert event == EVENT | 1
        self.within(("cuEventCreate", "*8", 2), ("cuEventRecord", EVENT | 1, STREAM | 1))
        assert one.wait(Stream(STREAM | 2), Event(EVENT | 1)) is None
        self.within(("cuStreamWaitEvent", STREAM | 2, EVENT | 1, 0))
        assert [one.done(Event(EVENT | 1)) for _ in range(2)] == [False, True]
        assert self.said()[2] == ("cuEventQuery", EVENT | 1)
        one.forget(Event(EVENT | 1))
        self.within(("cuEventDestroy_v2", EVENT | 1))
        order = one.order()
        assert order == EVENT | 2
        self.within(
            ("cuStreamIsCapturing", 0, "*4"),
            ("cuEventCreate", "*8", 2),
            ("cuEventRecord", EVENT | 2, 0),
        )
        one.forget(Event(EVENT | 2))
        self.said()
        self._stub.set("stub_capturing", 1)
        assert one.order() == Fault("the engine's stream is being captured into a graph")
        self._stub.set("stub_capturing", 0)
        self.within(("cuStreamIsCapturing", 0, "*4"))

    def pinning(self) -> None:
        arena = arena_of(BYTES)
        address = arena.ctypes.data
        vars(self._one)["_madvise"] = lambda *_: 0  # it would fault in 20 GiB
        assert self._one.register(address, BYTES) is None
        self.within(("cuMemHostRegister_v2", address, BYTES, 3))
        assert self._one.unregister(address) is None
        self.within(("cuMemHostUnregister", address))
        assert self._stub.left.pinned == 0

    def copies(self) -> None:
        one, memory, stream = self._one, self._memory, Stream(STREAM | 1)
        arena = arena_of(4 * PAGE)
        here, there = self._region.address, arena.ctypes.data
        assert one.register(there, arena.nbytes) is None
        self.said()
        kinds: tuple[Kind, ...] = ("store", "load")
        for kind in kinds:
            memory[:] = self._rng.integers(0, 256, memory.nbytes, np.uint8)
            arena[:] = 0 if kind == "store" else 1
            before = memory.copy(), arena.copy()
            inside = column(here + 8, here + 2 * PAGE)
            outside = column(there + PAGE, there + 16)
            target, source = (outside, inside) if kind == "store" else (inside, outside)
            batch = Batch(kind, "dma", target, source, column(72, 4000), 4072)
            assert one.copy(stream, batch) is None
            arrays = (x.ctypes.data for x in (target, source, batch.bytes))
            self.within(
                ("cuMemcpyBatchAsync", *arrays, 2, "*24", "*8", 1, "*8", STREAM | 1),
            )
            order = ctypes.c_int.in_dll(self._stub.library, "stub_attributes").value
            assert order == {"store": 1, "load": 3}[kind]
            assert [one.idle(stream) for _ in range(2)] == [False, True]
            assert self.said()[2] == ("cuStreamQuery", STREAM | 1)
            self._moved(kind, before, arena)
            batch.way = "pageable"
            memory[:], arena[:] = before
            assert one.copy(stream, batch) is None
            moves = zip(target.tolist(), source.tolist(), batch.bytes.tolist(), strict=True)
            name = {"store": "cuMemcpyDtoHAsync_v2", "load": "cuMemcpyHtoDAsync_v2"}[kind]
            self.within(*((name, *move, STREAM | 1) for move in moves))
            self._moved(kind, before, arena)
        assert one.unregister(there) is None
        self.said()

    def _moved(self, kind: Kind, before: tuple[U8Array, U8Array], arena: U8Array) -> None:
        memory, expected = self._memory, (before[0].copy(), before[1].copy())
        for inside, outside, count in ((8, PAGE, 72), (2 * PAGE, 16, 4000)):
            ours, theirs = slice(inside, inside + count), slice(outside, outside + count)
            if kind == "store":
                expected[1][theirs] = expected[0][ours]
            else:
                expected[0][ours] = expected[1][theirs]
        assert np.array_equal(memory, expected[0])
        assert np.array_equal(arena, expected[1])

    def trouble(self) -> None:
        """Sizes above 32 bits, of copies that are refused; an error's text; the end of streams."""
        one, stream, size = self._one, Stream(STREAM | 1), (7 << 32) + 5
        here = column(self._region.address)
        for name, batch in (
            ("cuMemcpyDtoHAsync_v2", Batch("store", "pageable", here, here, column(size), size)),
            ("cuMemcpyHtoDAsync_v2", Batch("load", "pageable", here, here, column(size), size)),
        ):
            assert one.copy(stream, batch) == Fault("copy: CUDA error 1: invalid argument")
            said = self.said()
            assert said[2] == (name, self._region.address, self._region.address, size, STREAM | 1)
            assert ("cuGetErrorString", 1, "*8") in said
        one.close_stream(Stream(STREAM | 2))
        self.within(("cuStreamDestroy_v2", STREAM | 2))
        one.close_stream(stream)
        modes = {call.mode for call in self._stub.calls() if call.name in COPIES}
        assert modes == {2}
        self._stub.free(self._region)


COPIES = {"cuMemcpyBatchAsync", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventQuery"}


def calls_in_source() -> set[str]:
    """Every function of CUDA's driver that ``kvass`` names."""
    folder = Path(inspect.getfile(cuda_driver)).parents[1]
    names = set[str]()
    for file in folder.rglob("*.py"):
        if "testing" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            text = node.attr if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.Constant):
                text = node.value.decode() if isinstance(node.value, bytes) else ""
            if text[:2] == "cu" and text[2:3].isupper():
                names.add(text)
    return names


@pytest.mark.parametrize("deep", [False, True])
def test_every_call_gives_the_driver_what_cuda_h_declares(stub: Stub, deep: bool) -> None:
    """Its values, each argument's size, and the size of what each pointer points to. A thread that
    has a context and a capture mode (``deep``) gets them back."""
    with stub.context() if deep else nullcontext():
        before = stub.thread
        proof = Proof(stub)
        proof.run()
        assert stub.thread == before
    assert proof.watched.seen.keys() == calls_in_source()
    assert len(calls_in_source()) == 28


# ---------------------------------------------------------------- controls: wrong calls are noticed


def number(argument: Any) -> Any:
    value = getattr(argument, "value", argument)
    return 0 if value is None else value


def ways_to_spoil(arguments: Arguments, at: int) -> Iterator[str]:
    """``narrow``: an int for what has 64 bits. ``more``: another number. ``small``: a pointer to
    one byte. ``swapped``: with the argument before it."""
    argument = arguments[at]
    value = number(argument)
    if isinstance(value, int) and (value > 0xFFFFFFFF or sizes_of((argument,)) == [(8, 0)]):
        yield "narrow"
    elif isinstance(value, int):
        yield "more"
    if hasattr(argument, "_obj"):
        yield "small"
    if at and value != number(arguments[at - 1]):
        yield "swapped"


def spoiling(name: str, at: int, way: str) -> Spoil:
    def spoil(called: str, arguments: Arguments) -> Arguments:
        if called != name:
            return arguments
        given = list(arguments)
        if way == "swapped":
            given[at - 1], given[at] = given[at], given[at - 1]
        elif way == "small":
            given[at] = byref(c_uint8())
        elif way == "narrow":
            given[at] = number(given[at]) & 0xFFFFFFFF
        else:
            given[at] = number(given[at]) + 1
        return tuple(given)

    return spoil


def notices(stub: Stub, spoil: Spoil) -> bool:
    try:
        Proof(stub, spoil).run()
    except (AssertionError, MissingError):
        return True
    return False


def test_control_a_wrong_argument_is_noticed(compiled: Path, tmp_path: Path) -> None:
    """Each argument of each call, in each way."""
    right = Proof(Stub(compiled, tmp_path))
    right.run()
    spoiled = [
        (name, at, way)
        for name, arguments in right.watched.seen.items()
        for at in range(len(arguments))
        for way in ways_to_spoil(arguments, at)
    ]
    assert len(spoiled) > 80
    assert {name for name, _, _ in spoiled} == calls_in_source()
    missed = [one for one in spoiled if not notices(Stub(compiled, tmp_path), spoiling(*one))]
    assert missed == []


TYPES = tuple(cuda_copies.BatchCopy._argtypes_)


@pytest.mark.parametrize("at", range(len(TYPES)))
def test_control_a_batch_copy_of_another_type_is_noticed(
    at: int, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ctypes.CFUNCTYPE(c_int, *TYPES[:at], c_int, *TYPES[at + 1 :])
    monkeypatch.setattr(cuda_runtime, "BatchCopy", wrong)
    proof = Proof(Stub(compiled, tmp_path))
    with pytest.raises(WrongSizeError, match="cuMemcpyBatchAsync"):
        proof.run()
