"""Calls that may hang or crash, such as those to the GPU driver: each runs in its own process.

Each process has a time limit.

A process that cannot even be killed, because it is inside the kernel, is left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Final

import msgspec

from kvass.transfer.cuda_driver import MissingError, Survey, cuda_version, load_driver, survey
from kvass.wire.framing import one_line

DRIVER_S: Final = 20.0
"""A driver that loads its firmware takes seconds; one that lost its GPU may never answer."""
KILL_S: Final = 1.0
CODE: Final = "from kvass.cli.doctor.driver import main; main()"


class DriverReport(msgspec.Struct, frozen=True):
    """A survey of the driver, or why there is none. If both are empty, there is no driver."""

    survey: Survey | None = None
    error: str = ""


def ask_driver(devices: bool) -> DriverReport:
    """The NVIDIA driver and its devices, or why they cannot be asked. Without ``devices`` the
    driver is not started: it would load its kernel module."""
    said, trouble = run_python(CODE, DRIVER_S, *(["devices"] if devices else []))
    try:
        return msgspec.json.decode(said, type=DriverReport)
    except msgspec.DecodeError:
        return DriverReport(error=f"the driver did not answer: {trouble}")


def run_python(code: str, limit_s: float, *arguments: str) -> tuple[bytes, str]:
    """What a process that runs ``code`` printed, and why it failed (empty if it did not)."""
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


# ---------------------------------------------------------------- the process that asks the driver


def main() -> None:
    """Ask, and say it; whatever else the driver prints goes to stderr."""
    wire = os.dup(1)
    os.dup2(2, 1)
    os.write(wire, msgspec.json.encode(ask("devices" in sys.argv)))


def ask(devices: bool) -> DriverReport:
    """Ask for the driver's version alone, or for everything."""
    try:
        driver = load_driver()
        return DriverReport(survey(driver) if devices else Survey(cuda_version(driver)))
    except MissingError as error:
        return DriverReport(error=str(error) if devices else "")
    except AttributeError as error:  # a libcuda so old, or so strange, that it lacks a call
        return DriverReport(error=f"this is no driver that kvass can use: {error}")
