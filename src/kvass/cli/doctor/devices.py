"""Calls that may hang or crash: each one is made in its own process, with a time limit.

A process that cannot be killed, because it is inside the kernel, is left running.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Final

import msgspec

from kvass.wire.framing import one_line

TORCH_S: Final = 60.0
"""The time limit for torch. Importing it and loading a GPU's firmware take seconds; a driver that
lost its GPU may never answer."""
KILL_S: Final = 1.0
CODE: Final = "from kvass.cli.doctor.devices import main; main()"


class Device(msgspec.Struct, frozen=True):
    name: str
    bytes: int


class DeviceReport(msgspec.Struct, frozen=True):
    """The GPUs that torch finds, or the error why it cannot be asked. ``torch``: its version, and
    that of what it was built for. All are empty if there is no GPU's device file."""

    torch: str = ""
    devices: tuple[Device, ...] = ()
    error: str = ""


def ask_torch() -> DeviceReport:
    """What torch says of this machine's GPUs."""
    said, trouble = run_python(CODE, TORCH_S)
    try:
        return msgspec.json.decode(said, type=DeviceReport)
    except msgspec.DecodeError:
        return DeviceReport(error=f"torch did not answer: {trouble}")


def run_python(code: str, limit_s: float, *arguments: str) -> tuple[bytes, str]:
    """Run ``code`` in a process. Returns what it printed, and why it failed (empty if it did
    not)."""
    command = [sys.executable, "-c", code, *arguments]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        said, printed = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        try:
            child.communicate(timeout=KILL_S)
        except subprocess.TimeoutExpired:  # it does not return from the kernel
            pass
        return b"", f"no answer after {limit_s:g} s"
    if child.returncode < 0:
        return b"", f"{signal.strsignal(-child.returncode) or 'signal'} ({-child.returncode})"
    lines = printed.decode(errors="replace").strip().splitlines()
    ended = one_line(lines[-1]) if lines else f"exit status {child.returncode}"
    return said, ended if child.returncode else ""


# ---------------------------------------------------------------- the process that asks torch


def main() -> None:
    """Print the report as JSON. Whatever torch itself prints goes to stderr."""
    wire = os.dup(1)
    os.dup2(2, 1)
    os.write(wire, msgspec.json.encode(ask()))


def ask() -> DeviceReport:
    """The report of this process."""
    try:
        import torch
    except ImportError as error:
        return DeviceReport(error=f"torch cannot be imported here: {one_line(str(error))}")
    version = torch.version
    built = [(k, getattr(version, k, None)) for k in ("cuda", "hip", "xpu")]
    text = ", ".join([f"torch {torch.__version__}", *(f"{k} {v}" for k, v in built if v)])
    try:
        kind = torch.accelerator.current_accelerator(check_available=True)
        if kind is None:
            return DeviceReport(text)
        module = torch.get_device_module(kind)
        found = map(module.get_device_properties, range(module.device_count()))
        return DeviceReport(text, tuple(Device(each.name, each.total_memory) for each in found))
    except (RuntimeError, AssertionError, AttributeError) as error:
        return DeviceReport(text, error=one_line(str(error)))
