"""The trial's pages on a fake GPU."""

from __future__ import annotations

import numpy as np

from kvass.transfer.base import U8Array
from kvass.transfer.self_check import SCRATCH_BYTES
from tests.support.gpu.fake_gpu import FakeGpu


class FakeScratch:
    """Memory of a fake device; writing it takes the device a while."""

    def __init__(self, fake: FakeGpu) -> None:
        self._fake = fake
        self.region, self._memory = fake.allocate(SCRATCH_BYTES)

    def write(self, data: U8Array) -> None:
        copy = data.copy()
        for _ in range(50):
            self._fake.queue(lambda: None)
        self._fake.queue(lambda: np.copyto(self._memory, copy))

    def read(self) -> U8Array:
        return self._memory.copy()  # as it is: what is over must be there
