"""The plug-in with which vLLM knows ``KvassConnector`` by its name, and the variable ``KVASS``."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CacheConfig
from vllm.distributed.kv_transfer.kv_connector import factory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvass.connectors import vllm as package
from kvass.connectors.vllm import opt_in
from kvass.connectors.vllm.configuration import read_options
from kvass.connectors.vllm.plugin import register
from kvass.errors import ConfigError
from tests.support.vllm.scheduler import tiny_model

IMPORTS = "import sys; before = set(sys.modules); import kvass.connectors.vllm.plugin; "
NEITHER = "assert not {'torch', 'vllm', 'numpy'} & set(sys.modules) - before"


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which vLLM knows no connector."""
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    package._connector.cache_clear()
    yield
    package._connector.cache_clear()


def test_vllm_finds_it_and_it_imports_nothing_before_it_is_called() -> None:
    (entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "kvass"]
    assert entry.load() is register
    subprocess.run([sys.executable, "-c", IMPORTS + NEITHER], check=True)


@pytest.mark.usefixtures("unknown")
def test_the_name_is_known_however_often_it_is_told() -> None:
    register()
    register()
    found = KVConnectorFactory.get_connector_class_by_name("KvassConnector")
    assert found is package.KvassConnector


@pytest.mark.usefixtures("unknown")
def test_who_loads_the_class_by_its_module_makes_the_name_known() -> None:
    loaded = package.KvassConnector
    assert KVConnectorFactory.get_connector_class_by_name("KvassConnector") is loaded


@pytest.mark.parametrize("gone", ["the class", "the function", "its parameters"])
def test_in_a_vllm_that_it_does_not_know_it_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    def other(cls: Any, name: str) -> None: ...

    if gone == "the class":
        monkeypatch.delattr(factory, "KVConnectorFactory")
    elif gone == "the function":
        monkeypatch.delattr(KVConnectorFactory, "register_connector")
    else:
        monkeypatch.setattr(KVConnectorFactory, "register_connector", classmethod(other))
    register()
    (line,) = [r.getMessage() for r in caplog.records]
    assert "cannot be told the name" in line


# ---------------------------------------------------------------- the variable KVASS

Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """A function that makes vLLM's configuration of flags, as ``vllm serve`` does, after the
    plug-in was loaded with the variable ``KVASS`` of this value."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    for name in ("KVASS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)

    def make(value: str | None, *flags: str) -> Any:
        if value is not None:
            monkeypatch.setenv("KVASS", value)
        register()
        register()
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        common = ["--model", str(tiny_model()), "--skip-tokenizer-init", "--max-model-len", "512"]
        arguments = EngineArgs.from_cli_args(parser.parse_args([*common, *flags]))
        first = arguments.create_engine_config().kv_transfer_config
        again = arguments.create_engine_config().kv_transfer_config
        assert (first and first.kv_connector) == (again and again.kv_connector)
        return first

    return make


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the log about the variable."""
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("KVASS")]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_variable_nothing_of_vllm_is_changed(
    make: Make, caplog: pytest.LogCaptureFixture, value: str | None
) -> None:
    before = EngineArgs.create_engine_config
    assert make(value) is None
    assert EngineArgs.create_engine_config is before
    assert said(caplog) == []


@pytest.mark.parametrize(
    ("value", "extra"),
    [
        ("1", {}),
        ("/run/kvass.sock", {"kvass.socket": "/run/kvass.sock"}),
        ("./kvass.sock", {"kvass.socket": f"{os.getcwd()}/kvass.sock"}),
    ],
)
def test_with_the_variable_the_engine_has_the_connector(
    make: Make, caplog: pytest.LogCaptureFixture, value: str, extra: dict[str, str]
) -> None:
    caplog.set_level(logging.INFO, "kvass")
    found = make(value)
    assert (found.kv_connector, found.kv_role) == ("KvassConnector", "kv_both")
    assert found.kv_connector_extra_config == extra
    (line,) = said(caplog)
    assert line.startswith(f"KVASS={value}: this engine uses kvass: kv_connector KvassConnector, ")


def test_options_in_the_dotted_form_are_kept(make: Make) -> None:
    dotted = "--kv-transfer-config.kv_connector_extra_config.kvass.chunk_tokens"
    found = make("/s", dotted, "512", "--kv-transfer-config.kv_role", "kv_consumer")
    assert (found.kv_connector, found.kv_role) == ("KvassConnector", "kv_consumer")
    options = read_options(found.kv_connector_extra_config)
    assert (options.chunk_tokens, options.socket) == (512, "/s")


@pytest.mark.parametrize(
    ("flags", "environment", "reason", "connector"),
    [
        (
            ("--kv-transfer-config", '{"kv_connector":"ExampleConnector","kv_role":"kv_both"}'),
            {},
            "--kv-transfer-config names a connector",
            "ExampleConnector",
        ),
        (("--kv-offloading-size", "1"), {}, "--kv-offloading-size is given", None),
        (
            (),
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True",
            None,
        ),
        (
            (),
            {"PYTORCH_ALLOC_CONF": "a:1,expandable_segments:True"},
            "PYTORCH_ALLOC_CONF has expandable_segments:True",
            None,
        ),
    ],
)
def test_what_the_operator_gave_is_not_changed(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: tuple[str, ...],
    environment: dict[str, str],
    reason: str,
    connector: str | None,
) -> None:
    caplog.set_level(logging.INFO, "kvass")
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    found = make("1", *flags)
    if "--kv-offloading-size" in flags:
        assert found.kv_connector != "KvassConnector"
    else:
        assert (found and found.kv_connector) == connector
    (line,) = said(caplog)
    assert line.startswith(f"KVASS=1 has no effect: {reason}")


@pytest.fixture
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with the configuration of a model with states."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM as Model

    layers = {"num_hidden_layers": 2, "hybrid_override_pattern": "M*"}
    config = {"architectures": [Model.__name__], "model_type": "nemotron_h", **layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    ModelRegistry.register_model(Model.__name__, Model)  # as in test_fields.py
    return str(tmp_path)


def test_what_vllm_refuses_with_a_connector_is_made_without(
    make: Make, caplog: pytest.LogCaptureFixture, states: str
) -> None:
    caplog.set_level(logging.INFO, "kvass")
    assert make("1", "--model", states, "--use-replayssm") is None
    (line,) = said(caplog)
    assert line.startswith(
        "KVASS=1 has no effect: Value error, --use-replayssm is incompatible with KV connectors"
    )
    assert "\n" not in line


def test_what_vllm_refuses_without_a_connector_is_its_own_error(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="--use-replayssm is not supported for architecture"):
        make("1", "--use-replayssm")
    assert said(caplog) == []


def test_an_error_of_a_network_is_not_taken_for_a_refusal(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would turn kvass off for the engine's life, had vLLM more luck the second time."""
    from vllm.engine.arg_utils import EngineArgs

    def unreachable(self: EngineArgs) -> None:
        raise OSError("the Hub cannot be reached")

    monkeypatch.setattr(EngineArgs, "create_model_config", unreachable)
    with pytest.raises(OSError, match="the Hub"):
        make("1")
    assert said(caplog) == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--no-enable-prefix-caching --prefix-match-unit 8", "--prefix-match-unit is given"),
        ("--prefix-caching-hash-algo xxhash", "prefix-caching hash algorithm xxhash is seeded"),
    ],
)
def test_what_is_refused_after_that_is_made_without(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: str,
    reason: str,
) -> None:
    caplog.set_level(logging.INFO, "kvass")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert make("1", *flags.split()) is None
    (line,) = said(caplog)
    assert line.startswith(f"KVASS=1 has no effect: {reason}")


def test_each_model_and_setting_that_is_refused_later_is_known() -> None:
    def reason(model: dict[str, Any] | None = None, pcp: int = 1) -> str:
        plain = {"is_encoder_decoder": False, "architecture": "LlamaForCausalLM"}
        config = SimpleNamespace(
            model_config=SimpleNamespace(**(plain | (model or {}))),
            parallel_config=SimpleNamespace(prefill_context_parallel_size=pcp),
            cache_config=CacheConfig(),
        )
        return opt_in._refused_later(config)

    assert reason() == ""
    assert reason({"is_encoder_decoder": True}) == (
        "vLLM has no connectors for encoder-decoder models"
    )
    assert "Step5" in reason({"architecture": "Step5ForConditionalGeneration"})
    assert reason(pcp=2) == "prefill context parallelism is not supported"


@pytest.mark.parametrize("value", ["yes", "2", "kvass.sock"])
def test_another_value_is_one_clear_line(make: Make, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(value)
    assert str(caught.value) == (
        f"KVASS={value!r}: write the path of the daemon's socket, 1 for the default socket, or 0 "
        "for off"
    )


@pytest.mark.parametrize("there", ["(self, context)", ""])
def test_a_function_that_is_not_as_the_contract_says_is_not_wrapped(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, there: str
) -> None:
    monkeypatch.setenv("KVASS", "1")
    if there:
        other = eval(f"lambda {there[1:-1]}: None")
        monkeypatch.setattr(EngineArgs, "create_engine_config", other)
    else:
        monkeypatch.delattr(EngineArgs, "create_engine_config")
    register()
    assert not hasattr(getattr(EngineArgs, "create_engine_config", None), "kvass")
    (line,) = said(caplog)
    assert line.startswith("KVASS has no effect: in this vLLM EngineArgs.create_engine_config(")
    assert line.endswith(f" is {there or 'not there'}: use --kv-transfer-config")
