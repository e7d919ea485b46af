"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

WAIT_S: Final = 20.0
"""Generous: a loaded machine is slow."""


def eventually(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    """Whether ``condition`` comes true within ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.002)
    return True
