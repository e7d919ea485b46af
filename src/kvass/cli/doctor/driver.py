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

from kvass.transfer.cuda_driver import MissingError, Survey, cuda_version, load_driver, survey
from kvass.wire.framing import one_line

DRIVER_S: Final = 20.0
"""The time limit for the driver. Loading its firmware takes seconds; if it lost its GPU, it may
never answer."""
KILL_S: Final = 1.0
CODE: Final = "from kvass.cli.doctor.driver import main; main()"


class DriverReport(msgspec.Struct, frozen=True):
    """A survey of the driver, or the error why there is none. Without both there is no driver."""

    survey: Survey | None = None
    error: str = ""


def ask_driver(devices: bool) -> DriverReport:
    """A report of the NVIDIA driver and its devices. Without ``devices`` the driver is not
    initialized, because that would load its kernel module."""
    said, trouble = run_python(CODE, DRIVER_S, *(["devices"] if devices else []))
    try:
        return msgspec.json.decode(said, type=DriverReport)
    except msgspec.DecodeError:
        return DriverReport(error=f"the driver did not answer: {trouble}")


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


# ---------------------------------------------------------------- the process that asks the driver


def main() -> None:
    """Print the report as JSON. Whatever the driver itself prints goes to stderr."""
    wire = os.dup(1)
    os.dup2(2, 1)
    os.write(wire, msgspec.json.encode(ask("devices" in sys.argv)))


def ask(devices: bool) -> DriverReport:
    """The report of this process: with ``devices`` a full survey, else only the driver's
    version."""
    try:
        driver = load_driver()
        return DriverReport(survey(driver) if devices else Survey(cuda_version(driver)))
    except MissingError as error:
        return DriverReport(error=str(error) if devices else "")
    except AttributeError as error:  # a libcuda that is too old, or that lacks a call
        return DriverReport(error=f"this is no driver that kvass can use: {error}")
