"""The options of an engine by all their sources: vLLM's configuration, the environment, a file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvass.config import ENGINE_OPTIONS, EngineOptions
from kvass.connectors.vllm.configuration import (
    asks_for,
    log_sources,
    read_options,
    read_setup,
)
from kvass.connectors.vllm.entry import KvassConnector
from kvass.errors import ConfigError
from tests.support.vllm.scheduler import make_configs

VALUES = {
    "socket": "/run/one.sock",
    "daemon_uid": 7,
    "chunk_tokens": 512,
    "tag": "a",
    "blend": "all",
    "blend_oracle": True,
    "generated": "off",
    "model_id": "m",
    "kv_layout": "BLNHC",
    "fixed_weights": True,
    "global_media_ids": True,
    "skip_slow_loads": False,
    "shadow": 0.5,
    "verify": 500,
    "sync_load_ms": 7.5,
    "gpu_stages": True,
    "several_machines": True,
    "early_lookups": 3,
    "tier_events": 2.5,
    "window_interval": 1024,
}


def write(folder: Path, **options: Any) -> str:
    """A file of options."""
    file = folder / "kvass.yaml"
    file.write_bytes(msgspec.yaml.encode(options))
    return str(file)


def test_every_option_comes_from_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert VALUES.keys() == set(ENGINE_OPTIONS)
    wanted = read_options({f"kvass.{name}": value for name, value in VALUES.items()})
    assert read_options({"kvass": VALUES}) == wanted
    with monkeypatch.context() as patched:
        patched.setenv("KVASS_CONFIG", write(tmp_path, **VALUES, l1_size="4MiB"))
        assert read_options({}) == wanted
    for name, value in VALUES.items():
        text = ("no", "yes")[value] if isinstance(value, bool) else str(value)
        monkeypatch.setenv(f"KVASS_{name.upper()}", text)
    assert read_options({}) == wanted != EngineOptions()


def test_the_connector_wins_over_the_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASS_CONFIG", write(tmp_path, tag="file", model_id="file", socket="/f"))
    monkeypatch.setenv("KVASS_TAG", "environment")
    monkeypatch.setenv("KVASS_SOCKET", "")  # as one that is not set
    found = read_options({"kvass.socket": ""})
    assert (found.model_id, found.tag, found.socket) == ("file", "environment", "/f")
    assert read_options({"kvass.tag": "extra", "kvass.socket": "/x"}).tag == "extra"
    assert read_options({"kvass.tag": ""}).tag == "", "an empty tag is a tag"


def test_blend_is_switched_on_by_any_source(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = make_configs()
    assert not asks_for(config, "kvass.blend")
    monkeypatch.setenv("KVASS_BLEND", "all")
    assert asks_for(config, "kvass.blend")


def test_an_engines_log_says_once_which_source_wins_and_what_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVASS_CONFIG", file := write(tmp_path, tag="file", colour="red"))
    for name, text in (
        ("KVASS_TAG", "environment"),
        ("KVASS_CHUNK_TOKEN", "7"),
        ("KVASS_L1_SIZE", "64GiB"),  # the daemon's
        ("KVASS_SERVICE_HOST", "10.0.0.1"),  # set by Kubernetes
        ("KVASS_PORT", "tcp://10.0.0.1:9273"),
        ("KVASS", "1"),
    ):
        monkeypatch.setenv(name, text)
    config, caches = make_configs(options={"kvass.tag": "extra"})
    for role in ("SCHEDULER", "WORKER"):
        KvassConnector(config, KVConnectorRole[role], caches).shutdown()
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [line for line in lines if "option" in line] == [
        f"unknown option 'colour' in {file}:2 is ignored; there are {', '.join(ENGINE_OPTIONS)}",
        f"option kvass.tag: 'environment' (KVASS_TAG) wins over 'file' ({file}:1: tag)",
        "unknown option 'KVASS_CHUNK_TOKEN' in the environment is ignored; did you mean "
        "KVASS_CHUNK_TOKENS?",
        "option kvass.tag: 'extra' (kv_connector_extra_config) wins over 'environment' (KVASS_TAG)",
    ]
    caplog.clear()
    monkeypatch.delenv("KVASS_CHUNK_TOKEN")
    monkeypatch.setenv("KVASS_CONFIG", write(tmp_path, tag="extra"))
    monkeypatch.setenv("KVASS_TAG", "extra")
    log_sources(config)
    assert not caplog.records, "sources that agree"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("KVASS_CHUNK_TOKENS", "many", "KVASS_CHUNK_TOKENS: Expected `int`, got `str` (got 'many'"),
        (
            "KVASS_FIXED_WEIGHTS",
            "perhaps",
            "KVASS_FIXED_WEIGHTS: Expected `bool`, got `str` (got 'perhaps')",
        ),
        ("KVASS_KV_LAYOUT", "all", "KVASS_KV_LAYOUT: Invalid enum value 'all'"),
        ("KVASS_DAEMON_UID", "-1", "KVASS_DAEMON_UID: Expected `int` >= 0"),
        ("KVASS_CONFIG", "/no/such/file", "cannot read config /no/such/file"),
    ],
)
def test_a_value_that_is_wrong_keeps_the_engine_from_starting(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, says: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as caught:
        read_options({})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_option_that_is_there_nested_and_flat_is_refused_if_they_disagree() -> None:
    nested = {"kvass": {"tag": "a"}}
    assert read_options({**nested, "kvass.tag": "a"}).tag == "a"
    with pytest.raises(ConfigError, match=r"kvass\.tag is given twice"):
        read_options({**nested, "kvass.tag": "b"})


def test_the_namespace_does_not_depend_on_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tag is a field; how it was given, and the other variables, are none."""

    def identity(**options: Any) -> Any:
        config, caches = make_configs()
        config.kv_transfer_config.kv_connector_extra_config = options
        setup: Any = read_setup(config, caches)
        return setup.identity

    wanted = identity(**{"kvass.tag": "a", "kvass.socket": "/s"})
    assert wanted != identity()
    with monkeypatch.context() as patched:
        patched.setenv("KVASS_TAG", "a")
        patched.setenv("KVASS", "/s")
        assert identity() == wanted
    monkeypatch.setenv("KVASS_CONFIG", write(tmp_path, tag="a", socket="/s"))
    assert identity() == wanted
