"""``stub_cuda.c``, compiled and loaded: a libcuda whose functions have NVIDIA's own prototypes.

Laws of this file:

- What a call was given is read from the stub's log: values and sizes as the C compiler sees them.
- ``Watched`` compares the size of each argument, and of what it points to, with those. It can also
  spoil a call, which the tests must then notice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char, c_int, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from kvass.transfer.base import U8Array
from kvass.transfer.cuda_copies import TABLE_SHAPE, Tables
from kvass.transfer.cuda_runtime import DriverRuntime
from kvass.transfer.runtime import Region, U64Array
from kvass.types import I64Array
from tests.transfer.test_cuda_kernels import triton_folder

SOURCE: Final = Path(__file__).with_name("stub_cuda.c")
FLAGS: Final = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-pthread")
PAGE: Final = mmap.PAGESIZE
Said = tuple[str | int, ...]
"""A call in the log: its name; then of each argument its value, or ``*n`` for a pointer to n
bytes that is not NULL."""
Arguments = tuple[Any, ...]


def headers() -> Path:
    """The folder of NVIDIA's ``cuda.h``, which comes with Triton's package."""
    if folder := triton_folder():
        return Path(folder, "triton/backends/nvidia/include")
    found = find_spec("triton")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "backends/nvidia/include"


def compile_c(source: Path, into: Path, *flags: str) -> Path:
    """Compile ``source`` against ``cuda.h``; fails the test if that cannot be done."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        pytest.fail(
            f"no C compiler {compiler!r}: install one (Debian: apt-get install gcc libc6-dev), or "
            "name one in CC",
            pytrace=False,
        )
    command = [compiler, *FLAGS, *flags, "-I", str(headers()), str(source), "-o", str(into)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return into


def compile_stub(folder: Path) -> Path:
    """``libcuda.so.1`` in ``folder``. It has no soname: loading it by its path does not make it the
    machine's driver for whoever else runs in this process."""
    into = folder / "libcuda.so.1"
    return compile_c(SOURCE, into, "-shared", "-fPIC", "-Wl,-Bsymbolic")


def arena_of(count: int) -> U8Array:
    """Memory that can be pinned. Nothing of it is used before it is written."""
    arena: U8Array = np.frombuffer(mmap.mmap(-1, count, mmap.MAP_PRIVATE | 0x4000), np.uint8)
    return arena


def column(*values: int) -> U64Array:
    return np.array(values, np.uint64)


# ---------------------------------------------------------------- the log


class _Argument(ctypes.Structure):
    _fields_ = (("value", c_uint64), ("size", c_uint32), ("pointee", c_uint32))


class _Call(ctypes.Structure):
    _fields_ = (
        ("name", c_char * 44),
        ("result", c_int32),
        ("mode", c_int32),
        ("count", c_uint32),
        ("arguments", _Argument * 9),
    )


@dataclass(frozen=True)
class Call:
    """A call as the C compiler sees it. ``sizes``: of each argument, and of what it points to (0 if
    it is no pointer to a known type)."""

    name: str
    result: int
    mode: int
    values: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]

    @property
    def said(self) -> Said:
        both = zip(self.values, self.sizes, strict=True)
        return self.name, *(f"*{to}" if to and value else value for value, (_, to) in both)


@dataclass(frozen=True)
class Left:
    """What was made and not given back."""

    streams: int = 0
    events: int = 0
    pinned: int = 0
    allocations: int = 0


class Stub:
    """One copy of the stub, with a state of its own. ``compiled`` is copied into ``folder``, since
    the loader gives each file to a process once."""

    def __init__(self, compiled: Path, folder: Path) -> None:
        self.library = ctypes.CDLL(
            str(shutil.copy(compiled, folder / f"stub-{os.urandom(4).hex()}"))
        )

    def calls(self, begin: int = 0) -> list[Call]:
        """The log from its call number ``begin``."""
        log = (_Call * (1 << 16)).in_dll(self.library, "stub_log")
        return [_read(log[n]) for n in range(begin, self.count)]

    @property
    def count(self) -> int:
        return c_uint64.in_dll(self.library, "stub_calls").value

    @property
    def left(self) -> Left:
        found = (c_uint64 * 4)()
        self.library.stub_left(found)
        return Left(*found)

    @property
    def thread(self) -> tuple[int, int]:
        """Of the calling thread: its contexts, and its capture mode."""
        found = (c_int * 2)()
        self.library.stub_thread(found)
        return found[0], found[1]

    def set(self, name: str, value: int) -> None:
        """``stub_version`` or ``stub_capturing``."""
        c_int.in_dll(self.library, name).value = value

    @contextmanager
    def context(self) -> Iterator[None]:
        """As an engine's thread has it: the device's context is current."""
        context = c_void_p()
        assert not self.library.cuInit(0)
        assert not self.library.cuDevicePrimaryCtxRetain(byref(context), 0)
        assert not self.library.cuCtxPushCurrent_v2(context)
        try:
            yield
        finally:
            assert not self.library.cuCtxPopCurrent_v2(None)

    def allocate(self, count: int) -> tuple[Region, U8Array]:
        """Device memory, and the same as an array."""
        address = c_uint64()
        with self.context():
            assert not self.library.cuMemAlloc_v2(byref(address), c_size_t(count))
        memory = np.ctypeslib.as_array((c_uint8 * count).from_address(address.value))
        return Region(address.value, count), memory

    def free(self, region: Region) -> None:
        with self.context():
            assert not self.library.cuMemFree_v2(c_uint64(region.address))

    def runtime(
        self,
        driver: Any = None,
        single: bool = False,
        tables: int = 4,
        launch: Callable[[int, I64Array], None] | None = None,
    ) -> DriverRuntime:
        """The real runtime. Its kernel is Python's, since nothing here can run one."""
        words = np.zeros((tables, TABLE_SHAPE[1]), np.int64)
        return DriverRuntime(
            driver or self.library, 0, int, launch or move_runs, Tables(words), single
        )


class Failing:
    """The stub, of which some calls return a result of the test's, or are its functions."""

    def __init__(self, stub: Stub, **instead: Any) -> None:
        self._library, self._instead = stub.library, instead

    def __getattr__(self, name: str) -> Any:
        instead = self._instead.get(name)
        if instead is None or callable(instead):
            return instead or getattr(self._library, name)
        return lambda *arguments: instead


def move_runs(stream: int, rows: I64Array) -> None:
    """What the kernel does."""
    for target, source, count in rows.T.tolist():
        ctypes.memmove(target, source, count)


def _read(call: _Call) -> Call:
    arguments = call.arguments[: call.count]
    sizes = tuple((a.size, a.pointee) for a in arguments)
    values = tuple(a.value for a in arguments)
    return Call(call.name.decode(), call.result, call.mode, values, sizes)


# ---------------------------------------------------------------- the Python side of a call


class WrongSizeError(AssertionError):
    """An argument is not as large as in NVIDIA's prototype, or there are too few or too many."""


def sizes_of(arguments: Arguments) -> list[tuple[int, int]]:
    """Of each argument as ctypes passes it: its size, and that of what it points to (0 where that
    is not known)."""
    return [_sizes(argument) for argument in arguments]


def _sizes(argument: Any) -> tuple[int, int]:
    if isinstance(argument, int):
        return ctypes.sizeof(c_int), 0
    if argument is None or isinstance(argument, bytes | ctypes.Array):
        return ctypes.sizeof(c_void_p), 0
    if (points_to := getattr(argument, "_obj", None)) is not None:  # byref
        return ctypes.sizeof(c_void_p), ctypes.sizeof(points_to)
    return ctypes.sizeof(argument), 0


Spoil = Callable[[str, Arguments], Arguments]


@dataclass
class Watched:
    """A driver whose calls are compared with the log, as the head of this file says.

    Raises WrongSizeError. ``spoil`` changes what a call is given.
    """

    stub: Stub
    spoil: Spoil = lambda name, arguments: arguments
    seen: dict[str, Arguments] = field(default_factory=dict)
    """The last arguments of each call."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.stub.library, name)

        def call(*arguments: Any) -> Any:
            self.seen[name] = arguments
            given = self.spoil(name, arguments)
            at, result = self.stub.count, function(*given)
            self.compare(at, name, sizes_of(given))
            return result

        return call

    def batch_copy(self, function: Any) -> Any:
        """``BatchCopy``, whose types are its own."""
        sizes = [(ctypes.sizeof(kind), 0) for kind in function.argtypes]

        def call(*arguments: Any) -> Any:
            self.seen["cuMemcpyBatchAsync"] = arguments
            given = self.spoil("cuMemcpyBatchAsync", arguments)
            at, result = self.stub.count, function(*given)
            self.compare(at, "cuMemcpyBatchAsync", sizes)
            return result

        return call

    def compare(self, at: int, name: str, given: list[tuple[int, int]]) -> None:
        """Call number ``at`` in the log was ``name`` with arguments of these sizes."""
        call = self.stub.calls(at)[0]
        same = len(given) == len(call.sizes) and all(
            size == its_size and to in (0, its_to)
            for (size, to), (its_size, its_to) in zip(given, call.sizes, strict=True)
        )
        if call.name != name or not same:
            raise WrongSizeError(f"{name}{given}: NVIDIA's is {call.name}{list(call.sizes)}")


def watch(stub: Stub, spoil: Spoil | None = None, **more: Any) -> tuple[Watched, DriverRuntime]:
    """The real runtime, with all its calls watched."""
    watched = Watched(stub, spoil) if spoil else Watched(stub)
    runtime = stub.runtime(watched, **more)
    if runtime._batch_copy is not None:
        runtime._batch_copy = watched.batch_copy(runtime._batch_copy)
    return watched, runtime
