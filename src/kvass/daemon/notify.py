"""Notifications to systemd for a ``Type=notify`` service (sd_notify(3)): ready, alive, stopping."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress


def send(state: str) -> None:
    """Send a state such as ``READY=1`` to systemd. Does nothing unless systemd started us."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect("\0" + path[1:] if path[0] == "@" else path)
        sender.send(state.encode())  # it raises if systemd does not listen any more


def feed_watchdog(loop: asyncio.AbstractEventLoop) -> None:
    """Notify systemd twice per ``WatchdogSec`` that the loop runs. Does nothing if the unit has no
    ``WatchdogSec``."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdecimal() or os.environ.get("WATCHDOG_PID", "") != str(os.getpid()):
        return
    send("WATCHDOG=1")
    loop.call_later(int(microseconds) / 2e6, feed_watchdog, loop)
