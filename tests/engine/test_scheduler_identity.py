"""Who shares rows with whom: what of an engine's configuration and model is in its namespace."""

from __future__ import annotations

import ast
import functools
import os
import re
import tempfile
from dataclasses import replace
from typing import Any

import pytest

from kvass.connectors.vllm.groups import page_formats
from kvass.connectors.vllm.kv_caches import read_memory
from kvass.engine import identity
from kvass.types import GroupLayout
from tests.support.vllm.process import EngineProcess
from tests.support.vllm.scheduler import before, inert_reason, make_configs, read_setup


def setup(**changes: Any) -> Any:
    return read_setup(*make_configs(**changes))


def test_both_sides_and_both_engines_agree() -> None:
    one, two = setup(), setup()
    assert one.identity == two.identity
    assert one.instance != two.instance


CHANGES = {
    "cache_config.cache_dtype": "fp8",
    "model_config.dtype": "float16",
    "model_config.hf_overrides": {"rope_theta": 5.0},
    "model_config.seed": 7,  # of dummy weights
    "model_config.hf_text_config.rope_parameters": {"rope_type": "longrope"},
    "model_config.hf_config.rms_norm_eps": 0.5,
    "model_config.hf_config.text_config": {"_name_or_path": "/a", "eps": 1},
    "model_config.model_impl": "transformers",
    "attention_config.use_non_causal": True,
}


@pytest.mark.parametrize("path", [*CHANGES, "kv_cache_layout"])
def test_what_changes_the_bytes_changes_the_identity(path: str) -> None:
    """``test_fields.py`` looks at every field; here are those of each rule."""
    config, caches = make_configs()
    plain = read_setup(config, caches)
    if path in CHANGES:
        *parents, name = path.split(".")
        setattr(functools.reduce(getattr, parents, config), name, CHANGES[path])
    else:
        caches.kv_cache_layout = "BLHNC"
    assert read_setup(config, caches).identity != plain.identity


class Gpu:
    """A platform of vLLM: a GPU of some compute capability."""

    device_type = "cuda"

    def __init__(self, capability: tuple[int, int] | None, device_name: str = "cuda") -> None:
        self.capability, self.device_name = capability, device_name

    def get_device_capability(self) -> Any:
        from vllm.platforms.interface import DeviceCapability

        return None if self.capability is None else DeviceCapability(*self.capability)

    def get_device_name(self) -> str:
        return "Data Center GPU"


def test_each_generation_of_gpu_has_rows_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention kernels and KV formats are chosen by compute capability. The CPU beside it does
    not matter: a tier may be shared by machines of different ones."""
    config, caches = make_configs()
    plain = read_setup(config, caches)
    found = set()
    for gpu in (Gpu((9, 0)), Gpu((10, 0)), Gpu((10, 3)), Gpu((9, 0), "rocm"), Gpu((9, 0))):
        monkeypatch.setattr("vllm.platforms.current_platform", gpu)
        one = read_setup(config, caches)
        assert {k for k in one.identity if one.identity[k] != plain.identity[k]} == {"device"}
        found.add(one.identity["device"])
    assert found == {'["cuda",9,0]', '["cuda",10,0]', '["cuda",10,3]', '["rocm",9,0]'}
    monkeypatch.setattr("platform.machine", lambda: "another")
    one = read_setup(config, caches)
    assert one.identity["device"] == '["cuda",9,0]'


def test_a_gpu_without_a_compute_capability_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """XPU has none."""
    config, caches = make_configs()
    monkeypatch.setattr("vllm.platforms.current_platform", Gpu(None, "xpu"))
    assert read_setup(config, caches).identity["device"] == '["xpu","Data Center GPU"]'


def test_an_unknown_kind_of_device_runs_uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    config, caches = make_configs()
    monkeypatch.setattr("vllm.platforms.current_platform", Gpu((9, 0)))
    monkeypatch.setattr("kvass.connectors.vllm.namespace.device_kind", lambda: "tpu")
    assert "device 'tpu' is not supported yet" in inert_reason(config, caches)


def test_the_layout_of_convolution_states_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    found = {}
    for layout in (None, "SD", "DS"):
        if layout is not None:
            monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
        get_conv_state_layout.cache_clear()
        found[layout] = setup().identity
    get_conv_state_layout.cache_clear()
    assert found[None] == found["SD"]
    assert (found["SD"] != found["DS"]) is not before("0.31.0"), "0.30 knows but one on a CPU"


def test_where_a_configuration_lay_is_no_part_of_it() -> None:
    config, caches = make_configs()
    config.model_config.hf_config.text_config = {"_name_or_path": "/a", "eps": 1}
    one = read_setup(config, caches)
    config.model_config.hf_config._name_or_path = "/other"
    config.model_config.hf_config.text_config["_name_or_path"] = "/b"
    two = read_setup(config, caches)
    assert one.identity == two.identity


def test_in_another_process_the_identity_is_the_same_and_lines_look_like_vllms() -> None:
    """One with another seed of ``hash()``, and without the handlers that pytest has here."""
    env = {**os.environ, "PYTHONHASHSEED": "7", "VLLM_LOGGING_LEVEL": "INFO"}
    assert EngineProcess.template is not None
    with tempfile.TemporaryFile() as log:
        fork = EngineProcess.template.fork(["tests.support.vllm.elsewhere"], env, log.fileno())
        status, said = fork.ran()
        log.seek(0)
        logged = log.read().decode()
    assert status == 0, logged
    config, caches = make_configs()
    here = read_setup(config, caches)
    seed, there = ast.literal_eval(said.splitlines()[-1])
    ours = dict(here.identity) | page_formats(caches)
    if "PYTHONHASHSEED" not in os.environ:  # that it is part of the hash is meant
        assert seed != hash("a seed")
        assert there.pop("hash") != ours.pop("hash")
    assert there == ours
    (line,) = [line for line in (said + logged).splitlines() if "all is well" in line]
    assert re.search(r"INFO \d\d-\d\d \d\d:.*all is well", line), line


def module_level(config: Any) -> Any:
    return config


class Opaque:
    def method(self) -> None:
        pass


@pytest.mark.parametrize("value", [lambda config: config, Opaque(), Opaque().method])
@pytest.mark.parametrize("nested", [False, True])
def test_what_cannot_be_described_makes_the_engine_run_uncached(value: Any, nested: bool) -> None:
    config, caches = make_configs()
    config.model_config.hf_overrides = {"rope": [value]} if nested else value
    with pytest.raises(identity.Indescribable):
        identity.canonical(config.model_config.hf_overrides)
    reason = inert_reason(config, caches)
    assert ("hf_overrides.rope[0]: " if nested else "hf_overrides: ") in reason
    assert "0x" not in reason
    config.model_config.hf_overrides = {"rope": [module_level]} if nested else module_level
    read_setup(config, caches)


def test_canonical_text_knows_no_address_and_no_order() -> None:
    assert identity.canonical({"b": {3, 1, 2}, "a": (1, b"\x01", None)}) == (
        '{"a":[1,"01",null],"b":["1","2","3"]}'
    )
    assert identity.canonical(module_level) == f'"{__name__}.module_level"'
    assert identity.canonical(Opaque) == f'"{__name__}.Opaque"'
    assert identity.canonical(len) != identity.canonical(max)
    assert identity.digest(["a", "bc"]) != identity.digest(["ab", "c"])


# ---------------------------------------------------------------- what pages mean


def state(**changes: Any) -> Any:
    """A state's spec: a convolution's and a sum's, as vLLM makes it for Mamba 2."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    fields = {
        "block_size": 16,
        "shapes": ((3, 64), (2, 8, 8)),
        "dtypes": (torch.bfloat16, torch.bfloat16),
        "page_size_padded": 4096,
        "mamba_cache_mode": "align",
    }
    return MambaSpec(**(fields | changes))


def pages(**changes: Any) -> Any:
    """The spec of pages of tokens."""
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    fields: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 64}
    fields |= {"dtype": torch.uint8, "page_size_padded": 4096, "cache_dtype_str": "fp8"}
    return MLAAttentionSpec(**(fields | changes))


def told(spec: Any, *others: Any) -> tuple[GroupLayout, ...]:
    """What a rank tells the daemon of two layers of ``spec``, or one of it and one of another."""
    import torch
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    _, caches = make_configs(blocks=8)
    (tensor,), (group,) = caches.kv_cache_tensors, caches.kv_cache_groups
    each = dict(zip(group.layer_names, (spec, *(others or (spec,))), strict=True))
    page = spec.page_size_bytes
    tensor.size, tensor.layer_stride, tensor.block_stride = 16 * page, 8 * page, page
    group.kv_cache_spec = spec
    if others:
        group.kv_cache_spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=each)
    memory = torch.zeros(tensor.size, dtype=torch.uint8)
    views = {name: memory[i * tensor.layer_stride :] for i, name in enumerate(tensor.layers)}
    return read_memory(caches, views, 32, (GroupLayout("full", 16, (), ()),)).layout.groups


def formats() -> list[tuple[str, Any]]:
    import torch
    from vllm.v1.kv_cache_interface import KVQuantMode

    half, single = torch.float16, torch.float32
    return [
        ("a state", state()),
        ("another 16 bits", state(dtypes=(torch.bfloat16, half))),
        ("32 bits in the same padded page", state(dtypes=(torch.bfloat16, single))),
        ("a convolution turned round", state(shapes=((64, 3), (2, 8, 8)))),
        ("pages", pages()),
        ("pages of another type", pages(dtype=torch.int8)),
        ("of another format in the same bytes", pages(cache_dtype_str="fp8_ds_mla")),
        ("quantized", pages(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)),
    ]


def test_pages_of_equal_size_that_mean_other_things_are_never_shared() -> None:
    """The daemon digests what each rank tells of its layout into the namespace."""
    found = {name: told(spec) for name, spec in formats()}
    assert {group.page_bytes for (group,) in found.values()} == {(4096, 4096)}
    assert len(set(found.values())) == len(found)
    assert found == {name: told(spec) for name, spec in formats()}


def test_each_layer_of_a_group_has_a_format_of_its_own() -> None:
    one, other = pages(), pages(cache_dtype_str="fp8_ds_mla")
    assert len({told(one), told(one, one), told(one, other), told(other, one)}) == 3
    assert told(one) == told(one, one), "how vLLM wrote it down is no difference"


def test_what_pages_mean_is_no_matter_of_the_identity_that_all_ranks_share() -> None:
    """A pipeline stage knows its own layers' only, and the scheduler one layer's of a group."""
    config, caches = make_configs()
    plain = read_setup(config, caches).identity
    caches.kv_cache_groups[0].kv_cache_spec = replace(
        caches.kv_cache_groups[0].kv_cache_spec, page_size_padded=1 << 20
    )
    assert read_setup(config, caches).identity == plain


def test_a_format_without_a_name_makes_the_engine_run_uncached() -> None:
    config, caches = make_configs()
    caches.kv_cache_groups[0].kv_cache_spec = replace(
        caches.kv_cache_groups[0].kv_cache_spec, attention_chunk_size=Opaque()
    )
    assert "KV cache spec.attention_chunk_size" in inert_reason(config, caches)


def test_quantizations_of_one_number_are_told_apart_by_their_name() -> None:
    """vLLM 0.33 numbers ``CUSTOM`` and ``OCTAVE_K3V4`` alike, so a cache spec cannot tell them."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    found = {}
    for name, dtype in (("CUSTOM", "a plug-in's"), ("OCTAVE_K3V4", "octave_k3v4")):
        if not hasattr(KVQuantMode, name):
            pytest.skip("this vLLM has no such modes")
        config, caches = make_configs()
        config.cache_config.cache_dtype = dtype
        spec = replace(caches.kv_cache_groups[0].kv_cache_spec, kv_quant_mode=KVQuantMode[name])
        caches.kv_cache_groups[0].kv_cache_spec = spec
        found[name] = read_setup(config, caches).identity
    assert found["CUSTOM"] != found["OCTAVE_K3V4"]
    differ = {
        name for name in found["CUSTOM"] if found["CUSTOM"][name] != found["OCTAVE_K3V4"][name]
    }
    assert differ == {"kv_dtype"}
