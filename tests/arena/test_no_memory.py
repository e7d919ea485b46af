"""Memory that cannot be had: an error where it is asked for, never a process killed by SIGBUS.

An arena in a file system of 1 MiB, in a mount namespace of its own.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

FULL = """
import os, sys
import numpy as np
from kvass.arena import memory
from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import describe_group
from kvass.transfer.base import Job
from kvass.transfer.host import HostMover
from kvass.types import GroupLayout

MIB = 1 << 20
fd = os.open(sys.argv[1] + "/arena", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 4 * MIB)
arena = memory.Arena(fd, 4 * MIB)


def store(slot, prepare):
    group = GroupLayout("full", 16, ("a",), (4096,))
    planes = describe_group(0, group, 32, 8, [0], [4096])
    mover = HostMover([np.ones(8 * 4096, np.uint8)], [planes])
    plan = plan_copy(planes, np.array([[1, 2]]), np.array([slot]))
    ended = []
    job = Job("store", (plan,), arena.buffer, populated=0, prepare=prepare, on_done=ended.append)
    mover.submit(job)
    mover.drain(20)
    mover.close()
    print(ended[0].outcome, ended[0].error, flush=True)


try:
    for lo in range(0, 4 * MIB, MIB // 2):
        arena.populate(lo, lo + MIB // 2)
except OSError as error:
    print("populated", lo, error.strerror, flush=True)
store(0, arena.populate)
store(3 * MIB, arena.populate)
store(3 * MIB, None)
print("not reached")
"""


def test_a_full_file_system_is_an_error_and_a_copy_that_failed(tmp_path: Path) -> None:
    """The control, a store that does not ask first, is killed."""
    mount = f'mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, FULL], capture_output=True, text=True, timeout=60
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.splitlines() == [
        f"populated {1 << 20} No space left on device",
        "done ",
        "failed OSError: [Errno 28] No space left on device: 'arena of 4194304 bytes at 3145728'",
    ], done.stderr
    assert done.returncode == -signal.SIGBUS
