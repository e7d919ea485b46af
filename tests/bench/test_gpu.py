"""``python -m bench --gpu`` measures what it says, and sees wrong bytes: on a fake of CUDA, so that
all runs here but torch's own calls to a device. No figure means anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from bench import gpu
from bench.__main__ import main
from bench.geometries import GEOMETRIES, Geometry, geometry
from bench.gpu import Sizes, measure_gpu, torch_device
from bench.gpu.costs import measure_gemm, measure_pinning
from bench.gpu.rig import Rig
from kvass.cli import bench
from kvass.errors import Unavailable
from kvass.transfer.batch import Kind
from tests.bench.fake_gpu import FakeDevice, Spoiling

TINY = tuple(replace(geometry(name), chunk_tokens=32) for name in ("gpt_oss", "gpt_oss_blocks"))
TOKENS = 128
SIZES = Sizes(
    geometries=(*TINY, geometry("deepseek_v4")),
    tokens=256,
    gemm=TINY[0],
    pin_bytes=1 << 20,
)
PER_GEOMETRY = {
    "gpu_store_vs_pinned",
    "gpu_load_vs_pinned",
    "gpu_both_vs_one",
    "gpu_pinned_both_vs_one",
    "gpu_store_gbps",
    "gpu_load_gbps",
    "gpu_pinned_store_gbps",
    "gpu_pinned_load_gbps",
    "gpu_run_kib",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch's that wait for each other on a busy machine take minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_figure_is_there() -> None:
    device = FakeDevice()
    figures = measure_gpu(device, 1, SIZES)
    device.check()
    assert figures["bytes_equal"] is True
    for name in PER_GEOMETRY:
        assert set(figures[name]) == {one.name for one in SIZES.geometries}
        assert all(value > 0 for value in figures[name].values())
    for name in ("gpu_submit_us", "gpu_plan_us"):
        assert 0 < figures[name]["p50"] <= figures[name]["p99"]
    assert figures["gpu_gemm_slowdown"] == pytest.approx(0)
    assert figures["gpu_gemm_stores_vs_alone"] >= 0  # none, on a busy machine
    assert figures["pin_s_per_gib"] > 0


def test_both_ways_of_a_copy_are_used() -> None:
    """Short runs are loaded by the kernel, long ones by batches; and nothing the slow way."""
    device = FakeDevice()
    for name in ("deepseek_v3", "deepseek_v3_blocks"):
        rig = Rig(device, geometry(name), 256)
        rig.fill(1)
        rig.move(("store", rig.stores[0]))
        rig.move(("load", rig.loads[0]))
        assert rig.same()
        rig.close()
    device.check()
    assert {(batch.kind, batch.way) for batch in device.fake.copied} == {
        ("store", "dma"),
        ("load", "dma"),
        ("load", "kernel"),
    }


@pytest.mark.parametrize("one", GEOMETRIES, ids=lambda one: one.name)
def test_every_geometry_comes_back(one: Geometry) -> None:
    device = FakeDevice()
    rig = Rig(device, one, one.chunk_tokens)
    rig.fill(1)
    assert not rig.same()
    rig.move(("store", rig.stores[1]))
    rig.move(("load", rig.loads[1]))
    assert rig.same()
    rig.spoil()
    assert not rig.same()
    rig.close()
    device.check()


# ---------------------------------------------------------------- wrong bytes


def _rounds(device: FakeDevice) -> bool:
    rig = Rig(device, TINY[0], TOKENS)
    same = gpu._rounds(rig, device.plain(rig.bytes), 1)[1]
    rig.close()
    return same


@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("wrong", [0, 700])
def test_negative_control_a_changed_byte_is_seen(wrong: int, kind: Kind) -> None:
    """Whichever copy it is, also of the rounds that warm up."""
    fake = Spoiling(kind, wrong)
    assert not _rounds(FakeDevice(fake))
    assert fake._wrong < 0


def test_a_difference_anywhere_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = [FakeDevice(), FakeDevice(Spoiling("load", 9))]
    sizes = msgspec.structs.replace(SIZES, geometries=TINY[:1])
    monkeypatch.setattr(torch_device, "open_device", lambda: devices.pop(0))
    monkeypatch.setattr(gpu, "Sizes", lambda: sizes)
    monkeypatch.setattr(bench, "MIN_ROUNDS", 1)
    flags = ["--gpu", "--rounds", "1"]
    assert main(flags) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bytes_equal", "yes"] in lines
    assert ["gpu_run_kib", "gpt_oss", "32"] in lines
    assert main([*flags, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["bytes_equal"] is False


# ---------------------------------------------------------------- what goes wrong otherwise


@pytest.mark.parametrize("missing", ["torch", "device"])
def test_what_is_missing_is_one_line(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = None if missing == "torch" else object()
    monkeypatch.setattr(torch_device, "find_spec", lambda name: there)
    assert main(["--gpu"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert ("needs torch" if missing == "torch" else "torch finds no CUDA device") in error


def test_pinning_refused_is_no_figure() -> None:
    device = FakeDevice()
    device.fake.plans.fail["register"] = {1}
    with pytest.raises(Unavailable, match="pinning"):
        measure_pinning(device, 1 << 20)
    device.check()


def test_a_copy_that_fails_is_no_figure() -> None:
    device = FakeDevice()
    device.fake.plans.fail["copy"] = {2}
    with pytest.raises(Unavailable, match="copy failed, as planned"):
        measure_gemm(device, TINY[0], TOKENS, 1)
    device.check()


# ---------------------------------------------------------------- arithmetic


def test_figures_are_medians_of_ratios() -> None:
    one = {"store": [2.0, 4.0, 8.0], "load": [2.0, 4.0, 8.0], "both": [2.0, 5.0, 16.0]}
    plain = {f"plain {name}": [1.0, 1.0, 8.0] for name in one}
    figures: dict[str, Any] = gpu._figures(one | plain, 4_000_000_000)
    assert figures["gpu_store_vs_pinned"] == 0.5
    assert figures["gpu_load_vs_pinned"] == 0.5
    assert figures["gpu_both_vs_one"] == 1.6
    assert figures["gpu_pinned_both_vs_one"] == 2
    assert figures["gpu_store_gbps"] == 1
    assert figures["gpu_pinned_load_gbps"] == 4


# ---------------------------------------------------------------- geometries


def test_the_geometries_are_what_they_are_called() -> None:
    """Whole blocks and pages as published, DeepSeek-V4's groups as vLLM 0.32 makes them."""
    assert geometry("llama_8b").block_bytes == 2 << 20
    assert geometry("llama_70b_tp8_blocks").block_bytes == 640 << 10
    assert geometry("deepseek_v3").block_bytes == 61 * 18 << 10
    assert geometry("gpt_oss").block_bytes == 384 << 10
    assert geometry("qwen3_next").block_bytes == int(12.75 * 2**20)
    v4 = geometry("deepseek_v4")
    assert [g.block_tokens for g in v4.groups] == [64, 64, 256, 4, 8]
    assert {page for g in v4.groups for page in g.page_bytes} == {37440, 8640, 1728, 32832}
    assert v4.block_bytes == 10 * 93888
