"""The NVIDIA driver, asked by a process of its own.

Law of this file: a driver that hangs or crashes costs its answer and nothing else. A process that
cannot even be killed, because it is inside the kernel, is left behind.
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


class Answer(msgspec.Struct, frozen=True):
    """A survey, or why there is none; neither: there is no driver."""

    survey: Survey | None = None
    error: str = ""


def ask_driver(nodes: frozenset[str]) -> tuple[Survey | None, str]:
    """The driver and its devices, or why they cannot be asked; (None, ""): there is no driver.
    Without device ``nodes`` it is not started."""
    command = [sys.executable, "-c", CODE, *(["devices"] if nodes else [])]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        said, printed = child.communicate(timeout=DRIVER_S)
    except subprocess.TimeoutExpired:
        _abandon(child)
        return None, f"the driver did not answer for {DRIVER_S:g} s"
    try:
        answer = msgspec.json.decode(said, type=Answer)
    except msgspec.DecodeError:
        end = _end(child.returncode, printed)
        return None, f"the driver ended the process that asked it: {end}"
    return answer.survey, answer.error


def _abandon(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    try:
        child.wait(KILL_S)
    except subprocess.TimeoutExpired:  # it does not return from the driver
        pass
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _end(status: int, printed: bytes) -> str:
    """How a process ended that said nothing of use."""
    if status < 0:
        return f"{signal.strsignal(-status) or 'signal'} ({-status})"
    lines = printed.decode(errors="replace").strip().splitlines()
    return one_line(lines[-1]) if lines else f"exit status {status}"


# ---------------------------------------------------------------- the process that asks


def main() -> None:
    """Ask, and say it; whatever else the driver prints goes to stderr."""
    wire = os.dup(1)
    os.dup2(2, 1)
    os.write(wire, msgspec.json.encode(ask("devices" in sys.argv)))


def ask(devices: bool) -> Answer:
    """Ask for the driver's version alone, or for everything."""
    try:
        driver = load_driver()
        return Answer(survey(driver) if devices else Survey(cuda_version(driver)))
    except MissingError as error:
        return Answer(error=str(error) if devices else "")
    except AttributeError as error:  # a libcuda so old, or so strange, that it lacks a call
        return Answer(error=f"this is no driver that kvass can use: {error}")
