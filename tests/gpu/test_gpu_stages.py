"""Short pages go through stages: bytes and order, each with a control that must go wrong; and what
is measured at the start. On a fake, and on a GPU (not run on one yet: docs/gpu.md)."""

from __future__ import annotations

from typing import Any

import pytest

from kvass.transfer import staging
from kvass.transfer.batch import Kind, Stage, Staging
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.open_device import TorchScratch
from kvass.transfer.staging import choose_stagings
from tests.gpu.device import Counting, Device, Fake, Hasty
from tests.gpu.kv import keys_of
from tests.gpu.rig import rigged

SHORT = ["llama_70b_tp8", "deepseek_v3", "gpt_oss"]
ROWS = 6


def stages(device: Device) -> dict[str, Any]:
    """For a mover: stages that are filled many times in a job."""
    if device.runtime.tables is None:
        pytest.skip("needs vLLM's kernel")
    size = 2 << 20 if device.real else 16 << 10
    found = dict[Kind, Staging]()
    for kind in ("store", "load"):
        own = [device.runtime.open_stage(size) for _ in range(2)]
        found[kind] = Staging(1 << 40, tuple(one for one in own if isinstance(one, Stage)))
    return {"stagings": found}


def shared(more: dict[str, Any]) -> dict[str, Any]:
    """The control: both streams of a kind use one stage."""
    found = more["stagings"].items()
    return {"stagings": {kind: Staging(x.below, x.stages[:1] * 2) for kind, x in found}}


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("name", SHORT)
def test_every_byte_there_and_back(device: Device, name: str, broken: bool) -> None:
    """And no block of anybody else's is touched."""
    more = shared(stages(device)) if broken else stages(device)
    runtime: Any = Counting(device.runtime)
    with rigged(device, name, ROWS, runtime=runtime, **more) as rig:
        right = True
        for round_ in range(2):
            keys = keys_of(f"{round_}", rig.rows)
            rig.compute(keys=keys)
            assert rig.move("store").ok
            right = right and rig.stored(keys)
            rig.fill(0)
            rig.fill(0x5A, table=1)
            before = rig.kv.digest(rig.tables[1])
            assert rig.move("load").ok
            right = right and rig.loaded(keys=keys)
            assert broken or rig.kv.digest(rig.tables[1]) == before
        assert right is not broken
        assert "staged" in runtime.ways


@pytest.mark.parametrize("hasty", [False, True])
@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("name", SHORT)
def test_copies_wait_for_what_the_engine_has_queued(
    device: Device, name: str, kind: Kind, hasty: bool
) -> None:
    """On both streams of their kind."""
    runtime: Any = Hasty(device.runtime) if hasty else device.runtime
    storing = kind == "store"
    with rigged(device, name, ROWS, runtime=runtime, **stages(device)) as rig:
        rig.compute(keys=keys_of("before", rig.rows) if storing else None)
        assert rig.move("store").ok  # pins, too
        kernels = rig.kv.writes(rig.keys, rig.tables[0])
        if not storing:
            kernels = rig.kv.fills(rig.tables[1], 0)
        device.hold()
        for kernel in kernels:
            device.queue(kernel)
        rig.submit(kind, table=int(not storing))
        assert not device.idle()
        rig.given_time()
        assert rig.end().ok
        assert (rig.stored() if storing else rig.loaded(table=1)) is not hasty


class Scratch(TorchScratch):
    """Pages for the trial, on either device."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.where)
        self._device = device
        if isinstance(device, Fake):
            device.region(self._pages)

    def write(self, data: Any) -> None:
        if not isinstance(self._device, Fake):
            super().write(data)
            return
        copy = self._torch.from_numpy(data.copy())
        for _ in range(50):
            self._device.queue(lambda: None)
        self._device.queue(lambda: self._pages.copy_(copy))

    def read(self) -> Any:
        return self._pages.numpy().copy() if isinstance(self._device, Fake) else super().read()


def test_what_is_chosen_is_right_and_pages_are_as_before(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which it is depends on the device; its figures are in the log (``-o log_cli=true``)."""
    if not device.real:  # whose pages are tiny
        monkeypatch.setattr(staging, "LONGEST", 512)
        monkeypatch.setattr(staging, "ROUNDS", 1)
    with rigged(device, "llama_70b_tp8", ROWS) as rig:
        rig.compute()
        before = [rig.kv.digest(table) for table in rig.tables]
        with device.engine():
            found = choose_stagings(
                device.runtime, [rig.kv.region], rig.kv.planes, KERNEL_BELOW,
                lambda: Scratch(device),
            )  # fmt: skip
        assert [rig.kv.digest(table) for table in rig.tables] == before
    with rigged(device, "llama_70b_tp8", ROWS, stagings=found) as rig:
        rig.compute()
        assert rig.move("store").ok
        assert rig.stored()
        rig.fill(0)
        assert rig.move("load").ok
        assert rig.loaded()
