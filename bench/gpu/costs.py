"""What the GPU data path costs beside the copies: pinning, and the engine's own work."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, Final

from bench.geometries import Geometry
from bench.gpu.device import Device
from bench.gpu.rig import Rig, Stores
from kvass.cli.bench.rig import seconds, shared_memory
from kvass.errors import Unavailable
from kvass.transfer.batch import Stagings

PIN_BYTES: Final = 1 << 30
PIN_ROUNDS: Final = 3
PRODUCTS: Final = 64
"""Of 8,192 x 8,192 matrices: some 0.1 s of a large device."""


def measure_pinning(device: Device, count: int = PIN_BYTES) -> dict[str, Any]:
    """``pin_s_per_gib``, of memory that is faulted in already. Raises ``Unavailable``."""
    arena = shared_memory(count)
    address = int(arena.buffer.ctypes.data)
    times = []
    try:
        for _ in range(PIN_ROUNDS):
            began_s = time.perf_counter()
            fault = device.runtime.register(address, count)
            times.append(time.perf_counter() - began_s)
            fault = fault or device.runtime.unregister(address)
            if fault is not None:
                raise Unavailable(f"pinning {count / 2**30:.3g}GiB: {fault.text}")
    finally:
        arena.close()
    return {"pin_s_per_gib": median(times) / (count / 2**30)}


def measure_gemm(
    device: Device,
    geometry: Geometry,
    tokens: int,
    rounds: int,
    products: int = PRODUCTS,
    stagings: Stagings | None = None,
) -> dict[str, Any]:
    """``gpu_gemm_slowdown`` (0.05: five percent longer), and how fast the stores beside it were,
    of what they are alone. ``stagings``: as for ``Rig``."""
    rig = Rig(device, geometry, tokens, stagings)
    try:
        return _measure_gemm(rig, rounds, products)
    finally:
        rig.close()


def _measure_gemm(rig: Rig, rounds: int, products: int) -> dict[str, Any]:
    rig.fill(1)
    slower: list[float] = []
    speeds: list[float] = []
    for number in range(rounds + 1):  # the first warms up
        alone_s = rig.device.compute(products)
        took_s = seconds(lambda: rig.move(("store", rig.stores[0])))
        stores = Stores(rig)
        stores.start()
        try:
            stores.wait_flowing()
            bytes_before, began_s = stores.bytes, time.perf_counter()
            beside_s = rig.device.compute(products)
            speed = (stores.bytes - bytes_before) / (time.perf_counter() - began_s)
        finally:
            stores.end()
        if number:
            slower.append(beside_s / alone_s)
            speeds.append(speed / (rig.bytes / took_s))
    return {
        "gpu_gemm_slowdown": median(slower) - 1,
        "gpu_gemm_stores_vs_alone": median(speeds),
    }
