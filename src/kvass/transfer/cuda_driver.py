"""What this machine's CUDA driver is and can do: asked of libcuda, by ctypes.

Only versions and attributes are asked: no context, no memory of a device, no torch. So anybody may
ask, beside whatever engine runs. ``obstacle`` alone says whether a device can be used.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Final

from kvass.errors import KvassError

LEAST_CUDA: Final = 12080
"""CUDA 12.8, whose ``cuMemcpyBatchAsync`` has nine arguments. CUDA 13 gives the name another form,
so it is asked for by this version."""
LEAST_SINGLE: Final = 12000
"""For copies one by one. The calls are older; torch's builds for CUDA 12 ask for this."""
SINGLE: Final = "kvass.gpu_copies set to single"
"""How to ask for that."""
_BATCH_COPY: Final = b"cuMemcpyBatchAsync"
_DIRECT_HOST_POINTER: Final = 91
"""Attribute: registered host memory can be used by the host's own addresses."""
_HOST_PAGE_TABLES: Final = 100
"""Attribute: the device goes by the host's page tables, and registering locks no page."""
FATAL: Final = frozenset(
    {4, 46, 201, 214, 220, 226, 700, 702, 706, 707, 709, 710, *range(714, 720), 721}
    | {805, 806, 807, 810, 911, 999}
)
"""After these the context is of no use: kernels that failed, memory errors, a device or an MPS
server that is gone, a driver that ends."""


class MissingError(KvassError):
    """This machine cannot do it; the text says why."""


@dataclass(frozen=True, slots=True)
class Device:
    """``direct``: it can use pinned memory by its own address; ``locks``: registering host memory
    for it locks the pages."""

    name: str
    bytes: int
    direct: bool
    locks: bool = True


@dataclass(frozen=True, slots=True)
class Survey:
    """A driver and its devices. ``cuda`` is 1000 * major + 10 * minor; ``trouble`` says why the
    devices could not be asked."""

    cuda: int
    devices: tuple[Device, ...] = ()
    batches: bool = False
    trouble: str = ""


def load_driver() -> Any:
    """libcuda. Raises MissingError."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MissingError(f"no NVIDIA driver: {error}") from None


def survey(driver: Any) -> Survey:
    """Ask ``driver`` for everything. Raises MissingError if it does not even tell its version."""
    cuda = cuda_version(driver)
    try:
        must(driver, "no CUDA driver that works", driver.cuInit(0))
        count = c_int()
        must(driver, "no count of devices", driver.cuDeviceGetCount(byref(count)))
        devices = tuple(_device(driver, number) for number in range(count.value))
    except MissingError as reason:
        return Survey(cuda, trouble=str(reason))
    return Survey(cuda, devices, cuda >= LEAST_CUDA and find_batch_copy(driver) is not None)


def obstacle(cuda: int, direct: bool, batches: bool, single: bool = False) -> str:
    """Why a device of such a driver cannot be used, by ``single`` copies if they are asked for;
    empty if it can."""
    if cuda < (LEAST_SINGLE if single else LEAST_CUDA):
        needs = f"{spelled(LEAST_CUDA)} or later, {spelled(LEAST_SINGLE)} with {SINGLE}"
        return f"the NVIDIA driver speaks CUDA {spelled(cuda)}; kvass needs {needs}"
    if not direct:
        return "this device cannot use pinned memory by its own address (WSL2?)"
    if not batches and not single:
        return f"the NVIDIA driver has no {_BATCH_COPY.decode()}; none is needed with {SINGLE}"
    return ""


def spelled(cuda: int) -> str:
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def cuda_version(driver: Any) -> int:
    """The CUDA that the driver speaks. Raises MissingError."""
    version = c_int()
    must(driver, "the driver's version", driver.cuDriverGetVersion(byref(version)))
    return version.value


def get_device(driver: Any, number: int) -> c_int:
    """The handle of a device. Raises MissingError."""
    handle = c_int()
    must(driver, f"no device {number}", driver.cuDeviceGet(byref(handle), number))
    return handle


def is_direct(driver: Any, handle: c_int) -> bool:
    """Whether the device can use pinned memory by its own address. Raises MissingError."""
    return _attribute(driver, handle, _DIRECT_HOST_POINTER)


def _attribute(driver: Any, handle: c_int, which: int) -> bool:
    value = c_int()
    must(driver, "a device attribute", driver.cuDeviceGetAttribute(byref(value), which, handle))
    return bool(value.value)


def find_batch_copy(driver: Any) -> int | None:
    """The address of ``cuMemcpyBatchAsync`` in the form of CUDA 12.8; None if there is none."""
    found = c_void_p()
    result = driver.cuGetProcAddress_v2(_BATCH_COPY, byref(found), LEAST_CUDA, c_uint64(0), None)
    return None if result else found.value


def must(driver: Any, what: str, result: int) -> None:
    """Raises MissingError unless ``result`` is success."""
    if result:
        raise MissingError(f"{what}: {error_text(driver, result)}")


def error_text(driver: Any, result: int) -> str:
    """An error by its number and, if the driver knows it, in words."""
    text = ctypes.c_char_p()
    if driver.cuGetErrorString(result, byref(text)) or not text.value:
        return f"CUDA error {result}"
    return f"CUDA error {result}: {text.value.decode(errors='replace')}"


def _device(driver: Any, number: int) -> Device:
    handle, name, size = get_device(driver, number), ctypes.create_string_buffer(256), c_size_t()
    must(driver, "a device's name", driver.cuDeviceGetName(name, len(name), handle))
    must(driver, "a device's memory", driver.cuDeviceTotalMem_v2(byref(size), handle))
    locks = not _attribute(driver, handle, _HOST_PAGE_TABLES)
    text = name.value.decode(errors="replace")
    return Device(text, size.value, is_direct(driver, handle), locks)
