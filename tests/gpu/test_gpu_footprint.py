"""The daemon takes nothing of a GPU."""

from __future__ import annotations

import os
from pathlib import Path

from kvass.testing.daemon import running_daemon
from tests.gpu.device import Device
from tests.gpu.engine import DeviceEngine


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
