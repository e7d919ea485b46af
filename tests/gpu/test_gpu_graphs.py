"""Copies beside CUDA graphs: while they are replayed, and what is submitted during a capture.

No copy runs while a graph is captured (``transfer/device.py``). What is submitted meanwhile fails,
and neither the graph nor any other copy notices.
"""

from __future__ import annotations

import pytest

from kvass.transfer.batch import Kind
from tests.gpu.device import Device
from tests.gpu.kv import KvMemory, Tables, keys_of
from tests.gpu.rig import rigged

REPLAYS = 30


@pytest.mark.parametrize("name", ["llama_8b", "gpt_oss", "deepseek_v4"])
def test_copies_while_a_graph_is_replayed(device: Device, name: str) -> None:
    """The graph computes rows in blocks that are stored, and rewrites blocks that are not."""
    with rigged(device, name) as rig:
        noise = rig.kv.fills(rig.tables[1], 0x3C)
        kernels = [*rig.kv.writes(rig.keys, rig.tables[0]), *noise]
        for kernel in kernels:  # as engines do, once before the capture
            device.queue(kernel)
        with device.capture() as replay:
            for kernel in kernels:
                device.queue(kernel)
        rig.fill(0)
        replay()
        rig.submit("store")
        assert rig.end().ok
        assert rig.stored()
        rig.fill(0)
        with device.capture() as other:
            for kernel in noise:
                device.queue(kernel)
        kinds: list[Kind] = ["load", "store", "load"]
        for kind in kinds:
            for _ in range(REPLAYS):
                other()
            rig.submit(kind)
            for _ in range(REPLAYS):
                other()
            assert rig.end().ok
        assert rig.loaded()
        assert rig.stored()
        assert values(rig.kv, rig.tables[1]) == {0x3C}


def values(kv: KvMemory, tables: Tables) -> set[int]:
    """The least and the greatest byte of each page."""
    found = set[int]()
    for *_, pages in kv.pages(tables):
        found.update((int(pages.min()), int(pages.max())))
    return found


def test_what_is_submitted_while_capturing_fails_alone(device: Device) -> None:
    """Copies that come after it go on."""
    with rigged(device, "llama_8b") as rig:
        rig.compute()
        assert rig.move("store").ok
        kernels = rig.kv.fills(rig.tables[1], 0x11)
        for kernel in kernels:
            device.queue(kernel)
        with device.capture() as replay:
            for kernel in kernels:
                device.queue(kernel)
            rig.submit("load")
            assert rig.mover.drain(60)
        (load,) = rig.mover.poll()
        assert load.outcome == "failed"
        assert "captured" in load.error
        replay()
        assert values(rig.kv, rig.tables[1]) == {0x11}
        other = keys_of("after", rig.rows)
        rig.compute(keys=other)
        assert rig.move("store").ok
        assert rig.stored(other)
        rig.fill(0)
        assert rig.move("load").ok
        assert rig.loaded(keys=other)
