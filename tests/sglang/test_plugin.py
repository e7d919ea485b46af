"""The variable ``KVASS`` in SGLang's processes."""

from __future__ import annotations

import json
import logging
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvass.connectors.sglang import plugin
from tests.support.sglang.fake import Arguments

ROOT = Path(__file__).parent.parent.parent


def configured(value: str, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Arguments:
    monkeypatch.setenv("KVASS", value)
    arguments = Arguments("model", **{"hicache_storage_backend": None} | given)
    plugin.configure(arguments)
    return arguments


def test_a_socket_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = configured("/run/k.sock", monkeypatch)
    assert arguments.hicache_storage_backend == "dynamic"
    extra = json.loads(arguments.hicache_storage_backend_extra_config or "")
    assert extra == plugin.backend_config() | {"kvass.socket": "/run/k.sock"}
    plugin.configure(arguments)  # SGLang may make its arguments anew from these
    assert json.loads(arguments.hicache_storage_backend_extra_config or "") == extra


def test_the_default_socket_and_the_operators_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given = json.dumps({"kvass.tag": "a", "prefetch_threshold": 64})
    arguments = configured("1", monkeypatch, hicache_storage_backend_extra_config=given)
    extra = json.loads(arguments.hicache_storage_backend_extra_config or "")
    assert extra == plugin.backend_config() | {"kvass.tag": "a", "prefetch_threshold": 64}


@pytest.mark.parametrize(
    ("value", "given"),
    [
        ("1", {"hicache_storage_backend": "file"}),
        ("1", {"enable_hierarchical_cache": False}),
        ("1", {"hicache_storage_backend_extra_config": '{"module_path": "other"}'}),
        ("1", {"hicache_storage_backend_extra_config": "@file.yaml"}),
        ("yes", {}),
    ],
    ids=["another backend", "no HiCache", "another class", "a file", "no path"],
)
def test_what_it_does_not_change_it_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str, given: Any
) -> None:
    before = given.get("hicache_storage_backend")
    with caplog.at_level(logging.WARNING, "kvass"):
        arguments = configured(value, monkeypatch, **given)
    assert arguments.hicache_storage_backend == before
    assert len(caplog.records) == 1
    assert "has no effect" in caplog.text


def test_the_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["sglang.srt.plugins"]["kvass"].split(":")
    assert getattr(import_module(module), name) is plugin.register


@pytest.mark.parametrize("value", ["", "0"])
def test_without_the_variable_nothing_is_hooked(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("KVASS", value)
    plugin.register()  # it would import SGLang
