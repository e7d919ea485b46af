"""The system calls of a disk tier, watched."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from kvass.types import PAGE


class Calls:
    """Stands before one of the two system calls: how long each was; the ``nth`` ends early."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, nth: int = 0) -> None:
        self.sizes: list[int] = []
        self.nth = nth
        self._real = getattr(os, name)
        patch.setattr(os, name, self)

    def __call__(self, fd: int, parts: list[memoryview], at: int) -> Any:
        assert at % PAGE == 0
        assert all(np.frombuffer(p, np.uint8).ctypes.data % PAGE == 0 for p in parts), "O_DIRECT"
        size = sum(map(len, parts))
        if size > PAGE:  # a page is a segment's own
            self.sizes.append(size)
            if len(self.sizes) == self.nth:
                parts = [parts[0][:PAGE]]
        return self._real(fd, parts, at)
