"""Functions that start the process of a tier and wait for its end.

Law of this file: a process counts as dead once it was reaped, and not before (law 3). The end of
its socket does not show that it is dead.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

from kvass.daemon.tier_process.server import IGNORED_SIGNALS

_REAP_S: Final = 0.01


def spawn(
    fd: int, arena_fd: int, name: str, inherited: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process that runs ``server`` with the socket ``fd`` and the arena ``arena_fd``.

    ``inherited``: descriptors that it has open until it ends. ``name`` appears in the command line
    of the process. Raises ``OSError``.
    """
    program = [sys.executable, "-P", "-m", "kvass.daemon.tier_process.server"]
    where = [os.path.abspath(path) for path in sys.path]
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVASS_")}  # secrets
    # These signals are meant for the daemon. They are blocked until the process ignores them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        return subprocess.Popen(
            [*program, str(fd), str(arena_fd), str(os.getpid()), name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(fd, arena_fd, *inherited),
            env={**env, "PYTHONPATH": os.pathsep.join(where)},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def wait_or_kill(process: subprocess.Popen[bytes], within_s: float) -> str:
    """Wait until the process has ended, and return how it ended. Kill it if it still runs after
    ``within_s`` seconds."""
    kill_at = time.monotonic() + within_s
    while (status := process.poll()) is None:
        if time.monotonic() >= kill_at:
            process.kill()
        await asyncio.sleep(_REAP_S)
    if status >= 0:
        return f"its process ended with status {status}"
    try:
        return f"its process was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"its process was ended by signal {-status}"
