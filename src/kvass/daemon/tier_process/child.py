"""Start the process of a tier, and see how it ended.

Law of this file: a process counts as dead only once it was reaped (law 3). If its socket closes, it
is of no use any more, but may still write to the arena.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Final

from kvass.daemon.tier_process.server import IGNORED_SIGNALS

_REAP_S: Final = 0.01


def spawn(fd: int, arena_fd: int, name: str) -> subprocess.Popen[bytes]:
    """A process that runs ``server`` on the socket ``fd``, over the arena behind ``arena_fd``.

    ``name`` is for those who list processes. Raises ``OSError``.
    """
    program = [sys.executable, "-P", "-m", "kvass.daemon.tier_process.server"]
    where = [os.path.abspath(path) for path in sys.path]
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVASS_")}  # secrets
    # Blocked until the process ignores them: they are meant for the daemon.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        return subprocess.Popen(
            [*program, str(fd), str(arena_fd), str(os.getpid()), name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(fd, arena_fd),
            env={**env, "PYTHONPATH": os.pathsep.join(where)},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def reaped(process: subprocess.Popen[bytes], within_s: float) -> str:
    """Wait until the process has ended, and return its exit status as text. After ``within_s`` it
    is killed."""
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
