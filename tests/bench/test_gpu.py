"""The copies of a GPU day are measured as they say, and wrong bytes are seen: on a fake of CUDA, so
that all runs here but torch's own calls to a device. No figure means anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench import gpu
from bench.geometries import geometry
from bench.gpu import Sizes, measure_gpu, torch_device
from bench.gpu.costs import measure_gemm
from bench.gpu.gil import measure_gil
from bench.gpu.rig import Rig
from bench.gpu.stages import measure_stages
from bench.gpu.torch_copies import TensorCopies
from bench.gpu_day.scene import write_model
from bench.gpu_day.sizes import weight_bytes
from kvass.errors import ConfigError, Unavailable
from kvass.transfer.batch import Kind
from tests.bench.fake_gpu import FakeDevice, Spoiling
from tests.support.gpu.paced_gpu import PacedDevice
from tests.support.vllm.models import Shape, tensors_of

TINY = tuple(replace(geometry(name), chunk_tokens=32) for name in ("gpt_oss", "gpt_oss_blocks"))
TOKENS = 128
SIZES = Sizes(
    geometries=(*TINY, geometry("deepseek_v4")),
    tokens=256,
    gemm=TINY[0],
    pin_bytes=1 << 20,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch's that wait for each other on a busy machine take minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_all_figures_are_measured() -> None:
    device = FakeDevice()
    figures = measure_gpu(device, 1, SIZES)
    device.check()
    assert figures["bytes_equal"] is True


def test_stages_are_measured_beside_what_else_could_copy_short_pages() -> None:
    """Of those geometries alone that have them."""
    device = FakeDevice()
    figures = measure_stages(device, 1, TINY, 64, products=1)
    device.check()
    assert figures["bytes_equal"] is True
    of = [name for name, value in figures.items() if isinstance(value, dict)]
    assert {"gpu_plain_store_vs_pinned", "gpu_staged_load_gbps", "gpu_gather_torch_gbps"} < set(of)
    assert all(list(figures[name]) == [TINY[0].name] for name in of)


# ---------------------------------------------------------------- wrong bytes


def _rounds(device: FakeDevice) -> bool:
    rig = Rig(device, TINY[0], TOKENS)
    same = gpu.measure_rounds(rig, device.plain(rig.bytes), 1)[1]
    rig.close()
    return same


def test_loads_are_measured_in_few_calls_and_in_many() -> None:
    """64 MiB are one call as shipped; they were four."""
    device: Any = PacedDevice()
    figures = measure_gil(device, 1)
    names = {
        f"gil_{how}_{batches}" for how in ("idle", "busy") for batches in (1, 4, 16, "shipped")
    }
    ratios = {f"{name}_vs_1" for name in names if not name.endswith("_1")}
    assert set(figures) == {"gil_wait_ms", *(f"{name}_ms" for name in names), *ratios}
    one_store_and_two_rounds = 1 + 2 * 2
    assert device.runtime.calls == one_store_and_two_rounds * (1 + 4 + 16 + 1)


@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("wrong", [0, 700])
def test_negative_control_a_changed_byte_is_seen(wrong: int, kind: Kind) -> None:
    """Whichever copy it is, also of the rounds that warm up."""
    fake = Spoiling(kind, wrong)
    assert not _rounds(FakeDevice(fake))
    assert fake._wrong < 0


def test_a_difference_anywhere_is_in_the_figures() -> None:
    sizes = msgspec.structs.replace(SIZES, geometries=TINY[:1])
    noted: list[dict[str, Any]] = []
    figures = measure_gpu(FakeDevice(Spoiling("load", 9)), 1, sizes, lambda **f: noted.append(f))
    assert figures["bytes_equal"] is False
    assert [one["bytes_equal"] for one in noted] == [False], "at once"


# ---------------------------------------------------------------- what goes wrong otherwise


@pytest.mark.parametrize("missing", ["torch", "device"])
def test_what_is_missing_is_one_line(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = None if missing == "torch" else object()
    monkeypatch.setattr(torch_device, "find_spec", lambda name: there)
    says = "need torch" if missing == "torch" else "torch finds no CUDA device"
    with pytest.raises(ConfigError, match=says):
        torch_device.open_device()


def test_a_copy_that_fails_is_no_figure() -> None:
    device = FakeDevice()
    device.fake.plans.fail["copy"] = {2}
    with pytest.raises(Unavailable, match="copy failed, as planned"):
        measure_gemm(device, TINY[0], TOKENS, 1)
    device.check()


# ---------------------------------------------------------------- copies of torch alone


def test_copies_of_torch_move_the_bytes_of_a_batch() -> None:
    """On a CPU, which has no streams: what is asked of torch, and where the bytes go."""
    pages = torch.zeros(64, dtype=torch.uint8)
    arena = np.arange(64, dtype=np.uint8)
    copies = TensorCopies(torch, [pages.untyped_storage()])
    there, here = pages.data_ptr(), arena.ctypes.data
    load = torch.tensor([here + 8, here]), torch.tensor([there, there + 60]), torch.tensor([8, 4])
    copies(*load, True)
    assert pages[:8].tolist() == [*range(8, 16)]
    assert pages[60:].tolist() == [*range(4)]
    copies(torch.tensor([there]), torch.tensor([here + 32]), torch.tensor([8]), False)
    assert arena[32:40].tolist() == [*range(8, 16)]


def test_a_days_model_has_the_weights_that_an_engine_reads(tmp_path: Path) -> None:
    """Of a smoke run models are made otherwise."""
    shape = Shape(vocab=64, hidden=32, intermediate=48, layers=2, heads=2, kv_heads=1, head_dim=16)
    write_model(tmp_path / "model", shape, "cpu")
    weights = load_file(str(tmp_path / "model" / "model.safetensors"))
    assert {name: tuple(one.shape) for name, one in weights.items()} == {
        one.name: one.size for one in tensors_of(shape)
    }
    assert {one.dtype for one in weights.values()} == {torch.bfloat16}
    assert sum(one.nbytes for one in weights.values()) == weight_bytes(shape)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["num_key_value_heads"] == 1
