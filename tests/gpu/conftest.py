"""Each program of this folder runs on a fake, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.device import Device, has_gpu, open_device

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu(), reason="needs a GPU and torch with CUDA"),
]


@pytest.fixture(params=["fake", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The device that the program runs on."""
    one = open_device(request.param)
    yield one
    one.check()
