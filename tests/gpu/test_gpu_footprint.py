"""What kvass takes of a GPU: of its memory, in the worker and in the daemon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kvass.testing.daemon import running_daemon
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.runtime import Kind
from tests.gpu.conftest import NEEDS_GPU
from tests.gpu.device import Device, open_device
from tests.gpu.engine import DeviceEngine
from tests.gpu.rig import rigged

MOST_BYTES = 16 << 20


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=NEEDS_GPU)])
def test_the_worker_keeps_little_memory_of_the_device(where: str) -> None:
    """Streams, events, the kernel and its tables, from before the mover is made."""
    device = open_device(where)
    with rigged(device, "llama_70b_tp8", kernel_below=KERNEL_BELOW) as rig:
        rig.compute()
        rig.fill(0, table=1)
        rig.kv.digest(rig.tables[1])
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        kinds: list[Kind] = ["store", "load", "store", "load"]
        for kind in kinds:
            assert rig.move(kind).ok
        torch.cuda.synchronize()
        assert before - torch.cuda.mem_get_info()[0] <= MOST_BYTES


def test_the_daemon_has_nothing_to_do_with_the_device(device: Device, tmp_path: Path) -> None:
    """No CUDA, no torch and no device file in its process, while a worker copies."""
    with running_daemon(tmp_path, "2GiB" if device.real else "64MiB") as daemon:
        engine = DeviceEngine(daemon.socket, device, "llama_8b")
        what = engine.reserve(range(2 * engine.chunk_tokens))
        assert what is not None
        engine.step(what)
        process = Path(f"/proc/{daemon.pid}")
        maps = (process / "maps").read_text()
        files = [os.readlink(one) for one in (process / "fd").iterdir()]
        assert engine.wait(what) == 2
        engine.close()
    assert "kvass-arena" in maps
    assert not [word for word in ("libcuda", "libtorch", "/dev/nvidia") if word in maps]
    assert not [file for file in files if "nvidia" in file]
