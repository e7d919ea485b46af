"""Notifications to systemd for a ``Type=notify`` service: ready, alive, stopping (sd_notify(3))."""

from __future__ import annotations

import asyncio
import os
import socket


def send(state: str) -> None:
    """Send a state such as ``READY=1`` to systemd. Does nothing unless systemd started us."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(state.encode(), path.replace("@", "\0", 1) if path[0] == "@" else path)
        except OSError:
            pass  # systemd does not listen any more


def feed_watchdog(loop: asyncio.AbstractEventLoop) -> None:
    """Notify systemd twice per ``WatchdogSec`` that the loop runs. Does nothing if the unit has no
    ``WatchdogSec``."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdecimal() or os.environ.get("WATCHDOG_PID", "") != str(os.getpid()):
        return
    send("WATCHDOG=1")
    loop.call_later(int(microseconds) / 2e6, feed_watchdog, loop)
