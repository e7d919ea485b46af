"""Pages are copied whole in each of vLLM's six layouts: its own allocation, its own views.

A block copied by us, to a slot and from there into another block, must be what vLLM itself sees as
a copy of that block in every layer, in all of the memory.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from kvass.connectors.vllm import served
from kvass.connectors.vllm.kv_caches import read_memory
from kvass.engine.memory import KVMemory
from kvass.errors import ConfigError, UsageError
from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.transfer.base import Job
from kvass.transfer.batch import Region
from kvass.transfer.descriptors import plan_runs
from kvass.transfer.host import HostMover
from kvass.types import GroupLayout
from tests.support.vllm.scheduler import before, make_configs

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
BLOCK, CHUNK, BLOCKS = 16, 48, 20


def full(heads: int = 2, size: int = 8) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16
    )


def window() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=40
    )


def groups(model: str) -> list[Any]:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

    if model == "two groups":
        return [KVCacheGroupSpec(["a", "b"], full()), KVCacheGroupSpec(["c", "d"], window())]
    if model == "pages of two sizes":
        specs = {"a": full(), "b": full(4), "c": full(), "d": full(4)}
        return [KVCacheGroupSpec([*specs], UniformTypeKVCacheSpecs(BLOCK, specs))]
    return [KVCacheGroupSpec(["a", "b", "c"], full(heads=1 if model == "one head" else 2))]


def allocate(model: str, layout: str) -> tuple[Any, Any, list[dict[str, Any]]]:
    """vLLM's configuration, the memory, and twice its views of that: of it, and of a copy."""
    import torch
    from vllm.v1.kv_cache_interface import KVCacheLayout, create_kv_cache_views

    home = "kv_cache_utils" if before("0.33.0") else "kv_cache_planning"
    planning = import_module(f"vllm.v1.core.{home}")
    config, _ = make_configs()
    config.cache_config.kv_cache_layout = layout
    config.cache_config.num_gpu_blocks_override = BLOCKS
    caches = planning.get_kv_cache_config_from_groups(config, groups(model), 1 << 24)
    caches.hash_block_size, caches.cache_hit_alignment_tokens = BLOCK, BLOCK
    specs = {
        name: getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        for group in caches.kv_cache_groups
        for name in group.layer_names
    }
    size = caches.kv_cache_tensors[0].size
    raw = torch.from_numpy(np.random.default_rng(1).integers(-128, 128, size, np.int8))
    twins = []
    for memory in (raw, raw.clone()):
        views: dict[str, Any] = {"raw": memory}
        for tensor in caches.kv_cache_tensors:
            spec = specs[tensor.layers[0]]
            made = create_kv_cache_views(memory, spec, BLOCKS, KVCacheLayout[layout], tensor)
            views |= dict(zip(tensor.layers, made, strict=True))
        twins.append(views)
    return caches, raw, twins


def read(caches: Any, views: dict[str, Any]) -> KVMemory:
    tokens = [group.kv_cache_spec.block_size for group in caches.kv_cache_groups]
    layouts = [GroupLayout("full", n, (), ()) for n in tokens]
    return read_memory(caches, views, CHUNK, layouts)


def plans(memory: KVMemory, group: int, ids: list[int]) -> tuple[CopyPlan]:
    planes = memory.planes[group]
    table = np.array(ids).reshape(-1, planes.chunk_blocks)
    return (plan_copy(planes, table, np.arange(len(table))[::-1] * planes.shard_bytes),)


MODELS = [
    *((model, layout) for model in ("one group", "one head", "two groups") for layout in LAYOUTS),
    ("pages of two sizes", "LBHNC"),
    ("pages of two sizes", "BLHNC"),
    ("pages of two sizes", "BLNHC"),
]


@pytest.mark.parametrize(("model", "layout"), MODELS)
def test_a_block_is_copied_as_vllm_would(model: str, layout: str) -> None:
    caches, raw, (views, twin) = allocate(model, layout)
    memory = read(caches, views)
    assert len(memory.regions) == 1
    mover = HostMover(memory.regions, memory.planes)
    for number, group in enumerate(caches.kv_cache_groups):
        count = memory.planes[number].chunk_blocks
        source, target = [5, 2, 9, 10, 3, 14][: 2 * count], [1, 16, 7, 8, 18, 4][: 2 * count]
        arena = np.zeros(2 * memory.planes[number].shard_bytes, np.uint8)
        mover.submit(Job("store", plans(memory, number, source), arena))
        assert mover.drain(10)
        mover.submit(Job("load", plans(memory, number, target), arena))
        assert mover.drain(10)
        for name in group.layer_names:
            twin[name][target] = twin[name][source]
    assert all(done.ok for done in mover.poll())
    mover.close()
    assert (raw == twin["raw"]).all()


@pytest.mark.parametrize(("model", "layout"), MODELS)
def test_a_block_is_one_run_where_blocks_are_outermost(model: str, layout: str) -> None:
    caches, raw, (views, _) = allocate(model, layout)
    memory = read(caches, views)
    here = [Region(raw.data_ptr(), raw.nbytes)]
    for number, group in enumerate(caches.kv_cache_groups):
        count = memory.planes[number].chunk_blocks
        (some,) = plan_runs(plans(memory, number, [5, 2, 9, 11, 3, 14][: 2 * count]), here, 1 << 30)
        if layout.startswith("B"):
            assert len(some) == 2 * count
            assert len(set(some.count.tolist())) == 1
        else:
            pieces = 2 if layout == "LHBNC" and model != "one head" else 1
            assert len(some) == 2 * count * len(group.layer_names) * pieces


def test_the_daemon_is_told_what_is_one_piece() -> None:
    """So that two engines share rows only if a slot means the same to both."""
    layouts = {}
    for layout in LAYOUTS:
        caches, _, (views, _) = allocate("one group", layout)
        (group,) = read(caches, views).layout.groups
        layouts[layout] = tuple(re.sub("@[0-9a-f]{16}", "", name) for name in group.layers)
        assert group.shard_bytes(CHUNK) == 4096 * -(-3 * 3 * 1024 // 4096)
    assert layouts == {
        "LBHNC": ("a", "b", "c"),
        "LBNHC": ("a", "b", "c"),
        "LHBNC": ("a#0", "a#1", "b#0", "b#1", "c#0", "c#1"),
        "BLHNC": ("a+b+c",),
        "BLNHC": ("a+b+c",),
        "BHLNC": ("a+b+c",),
    }


def test_strides_that_fit_no_layout_are_refused() -> None:
    caches, _, (views, _) = allocate("one group", "BHLNC")
    (tensor,) = caches.kv_cache_tensors
    tensor.block_stride -= 1024
    with pytest.raises(UsageError, match="do not fit"):
        read(caches, views)


# ---------------------------------------------------------------- the option


def resolved(option: str, supported: tuple[str, ...] = LAYOUTS, **transfer: Any) -> str:
    """What vLLM makes of the option, where the model's attention can have ``supported``."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    config, _ = make_configs({"kvass.kv_layout": option} if option else {})
    config.cache_config.kv_cache_layout = None
    for name, value in transfer.items():
        setattr(config.kv_transfer_config, name, value)
    return str(resolve_kv_cache_layout(config, [list(supported)]).name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the compute capability of the platform's device."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    def set_capability(*capability: int) -> None:
        found = DeviceCapability(*capability) if capability else None
        monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: found)

    return set_capability


def test_a_layout_by_name_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its backend cannot have it, or vLLM is told otherwise."""
    for option, layout in (("BLNHC", "BLNHC"), ("BLHNC", "BLHNC"), ("", "LBHNC")):
        assert resolved(option) == layout
    assert resolved("blocks", ("LBHNC",)) == "LBHNC"
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBNHC")
    assert resolved("BLNHC") == "LBNHC"


@pytest.mark.parametrize(
    ("capability", "layout"),
    [((), "BLNHC"), ((8, 0), "BLNHC"), ((9, 0), "BLNHC"), ((10, 0), "BLHNC"), ((12, 0), "BLHNC")],
)
def test_blocks_outermost_suits_the_device(
    gpu: Any, capability: tuple[int, ...], layout: str
) -> None:
    gpu(*capability)
    assert resolved("blocks") == layout


def test_a_wrong_option_stops_the_start_before_any_memory_is_taken() -> None:
    with pytest.raises(ConfigError, match="Invalid enum value 'HND'"):
        resolved("HND")


def test_a_vllm_that_is_not_served_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "_differences", lambda *_: ["a name is gone"])
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    assert resolved("BLNHC") == "LBHNC"
