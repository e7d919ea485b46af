"""What the GPU data path costs beside the copies: memory, pinning, the engine's own work.

Law of this file: what cannot be known here is None, never a guess.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.footprint import pid_behind
from bench.geometries import Geometry
from bench.gpu.device import Device
from bench.gpu.rig import Rig, Stores
from kvass.cli.bench.rig import seconds, shared_memory, start_daemon
from kvass.errors import Unavailable

PIN_BYTES: Final = 1 << 30
PIN_ROUNDS: Final = 3
PRODUCTS: Final = 64
"""Of 8,192 x 8,192 matrices: some 0.1 s of a large device."""
NVIDIA_SMI: Final = "nvidia-smi"
_ASK_S: Final = 20.0
_MIB: Final = 1 << 20


def measure_worker(device: Device, geometry: Geometry, tokens: int) -> dict[str, Any]:
    """``gpu_worker_mib``: what the first mover's first copies take, the kernel's code included.
    Nobody else may use the device meanwhile, and no mover did before."""
    rig = Rig(device, geometry, tokens)
    try:
        for seed in (1, 2):  # whatever the device's library needs for our own purposes
            rig.fill(seed)
            rig.same()
            rig.spoil()
        rig.fill(3)
        before, same = device.used_bytes(), True
        for store, load in zip(rig.stores, rig.loads, strict=True):
            rig.spoil()
            rig.move(("store", store))
            rig.move(("load", load))
            same = rig.same() and same
        taken = device.used_bytes() - before
        return {"gpu_worker_mib": max(0.0, taken / _MIB), "bytes_equal": same}
    finally:
        rig.close()


def measure_pinning(device: Device, count: int = PIN_BYTES) -> dict[str, Any]:
    """``pin_s_per_gib`` and ``gpu_pin_mib_per_gib``: of memory that is faulted in already. Raises
    ``Unavailable``."""
    arena = shared_memory(count)
    address = int(arena.buffer.ctypes.data)
    times, taken = [], []
    try:
        for _ in range(PIN_ROUNDS):
            before = device.used_bytes()
            began_s = time.perf_counter()
            fault = device.runtime.register(address, count)
            times.append(time.perf_counter() - began_s)
            taken.append(device.used_bytes() - before)
            fault = fault or device.runtime.unregister(address)
            if fault is not None:
                raise Unavailable(f"pinning {count / 2**30:.3g}GiB: {fault.text}")
    finally:
        arena.close()
    gib = count / 2**30
    return {
        "pin_s_per_gib": median(times) / gib,
        "gpu_pin_mib_per_gib": max(0.0, median(taken) / _MIB / gib),
    }


def measure_gemm(
    device: Device, geometry: Geometry, tokens: int, rounds: int, products: int = PRODUCTS
) -> dict[str, Any]:
    """``gpu_gemm_slowdown`` (0.05: five percent longer), and how fast the stores beside it were,
    of what they are alone."""
    rig = Rig(device, geometry, tokens)
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


def measure_daemon(l1_bytes: int) -> dict[str, Any]:
    """``gpu_daemon_mib`` and ``gpu_daemon_opens_device`` of a daemon that serves."""
    with start_daemon(l1_bytes) as daemon:
        pid = pid_behind(daemon.socket)
        held = memory_of(pid, nvidia_smi())
        return {"gpu_daemon_mib": held, "gpu_daemon_opens_device": opens_device(pid)}


def memory_of(pid: int, processes: dict[int, float] | None) -> float | None:
    """MiB of device memory that ``pid`` holds, if the list can be about our processes at all: it
    names us, who hold some. (In a container it may name another namespace's.)"""
    if processes is None or os.getpid() not in processes:
        return None
    return processes.get(pid, 0.0)


def nvidia_smi() -> dict[int, float] | None:
    """Processes and the MiB of device memory they hold, as NVIDIA's tool says; None without."""
    command = [NVIDIA_SMI, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.split(",") for line in said.stdout.splitlines()]
    return _sums([row for row in rows if len(row) == 2])


def _sums(rows: Sequence[Sequence[str]]) -> dict[int, float] | None:
    """Over all devices; None if any size is not told ("[N/A]")."""
    held: dict[int, float] = {}
    for pid, mib in rows:
        try:
            held[int(pid)] = held.get(int(pid), 0.0) + float(mib)
        except ValueError:
            return None
    return held


def opens_device(pid: int) -> bool:
    """Whether the process has a device of NVIDIA's open; without, it holds no memory of one."""
    for entry in (Path("/proc") / str(pid) / "fd").iterdir():
        try:
            if os.readlink(entry).startswith("/dev/nvidia"):
                return True
        except OSError:
            continue  # closed meanwhile
    return False
